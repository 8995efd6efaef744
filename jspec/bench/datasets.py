"""Benchmark prompts, from files or of random tokens, each with the maximum length of its response."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jspec._validation import require
from jspec.text.detokenizer import Tokenizer, encode
from jspec.text.files import json_lines, json_or_none, read_utf8

# ShareGPT is filtered as in vLLM: tokens of prompt, of response, and of both together.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
TRIES = 10  # attempts at a random text that has exactly the tokens asked for


@dataclasses.dataclass(frozen=True)
class Sample:
    """A request of a benchmark.

    Attributes:
      prompt: its text.
      output_len: the most tokens of its response.
      prompt_len: tokens of the prompt; None if no tokenizer has counted them.
    """

    prompt: str
    output_len: int
    prompt_len: int | None = None


class Dataset(Protocol):
    """A source of samples."""

    def samples(self, count: int, tokenizer: Tokenizer | None, seed: int) -> list[Sample]:
        """``count`` samples, the same for the same seed.

        Raises:
          ValueError: the dataset has too few, its file cannot be read, or it needs a tokenizer and there is none.
        """
        ...


@dataclasses.dataclass(frozen=True)
class RandomText:
    """Texts of random tokens. Lengths are drawn evenly between (1 - range_ratio) and (1 + range_ratio) times the one given.

    Random tokens say little about speculation: drafts are accepted more or less often than in real text.

    Attributes:
      input_len: tokens of a prompt behind the prefix, special tokens that the tokenizer puts in front included.
      output_len: the most tokens of a response.
      range_ratio: at least 0 and below 1.
      prefix_len: tokens in front, the same in every prompt.
    """

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0

    def __post_init__(self):
        require(self.input_len >= 1, "random_input_len", self.input_len, "an integer of at least 1")
        require(self.output_len >= 1, "random_output_len", self.output_len, "an integer of at least 1")
        require(0 <= self.range_ratio < 1, "random_range_ratio", self.range_ratio, "a number of at least 0 and below 1")
        require(self.prefix_len >= 0, "random_prefix_len", self.prefix_len, "an integer of at least 0")

    def samples(self, count: int, tokenizer: Tokenizer | None, seed: int) -> list[Sample]:
        tokenizer = _required(tokenizer, "random")
        rng = np.random.default_rng(seed)
        special = set(getattr(tokenizer, "all_special_ids", ()))
        allowed = np.array([token for token in sorted(tokenizer.get_vocab().values()) if token not in special])
        inputs, outputs = self._lengths(rng, self.input_len, count), self._lengths(rng, self.output_len, count)
        prefix = rng.choice(allowed, self.prefix_len).tolist()
        samples = []
        for input_len, output_len in zip(inputs, outputs, strict=True):
            text, length = _text(tokenizer, prefix, self.prefix_len + input_len, allowed, rng)
            samples.append(Sample(text, output_len, length))
        return samples

    def _lengths(self, rng: np.random.Generator, length: int, count: int) -> list[int]:
        low, high = int(length * (1 - self.range_ratio)), int(np.ceil(length * (1 + self.range_ratio)))
        return rng.integers(max(low, 1), high, count, endpoint=True).tolist()


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which entries of a file become requests, and in which order.

    Attributes:
      path: of the file.
      shuffle: draw the order by the seed; else it is the file's.
      oversample: repeat entries where the file has fewer than are wanted; else there are fewer requests.
    """

    path: pathlib.Path
    shuffle: bool = True
    oversample: bool = True

    def of(self, entries: Sequence[Any], count: int, seed: int) -> list[Any]:
        """``count`` of the entries."""
        require(len(entries) > 0, "dataset_path", str(self.path), "a file with prompts that this dataset can use")
        order = np.random.default_rng(seed).permutation(len(entries)) if self.shuffle else np.arange(len(entries))
        count = count if self.oversample else min(count, len(entries))
        return [entries[order[i % len(entries)]] for i in range(count)]


@dataclasses.dataclass(frozen=True)
class ShareGPT:
    """The first question of each conversation of a ShareGPT file. Very short and very long ones are left out, as in vLLM.

    Attributes:
      choice: of the conversations, in a file with a JSON list of ``{"conversations": [{"value": text}, ..]}``.
      output_len: the most tokens of a response; None takes as many as the answer in the file has.
    """

    choice: Choice
    output_len: int | None = None

    def samples(self, count: int, tokenizer: Tokenizer | None, seed: int) -> list[Sample]:
        tokenizer = _required(tokenizer, "sharegpt")
        path = self.choice.path
        conversations = json_or_none(read_utf8("dataset_path", path))
        if not isinstance(conversations, list):
            raise ValueError(f"{path}: expected a JSON list of conversations")
        pairs = [pair for place, entry in enumerate(conversations) if (pair := _first_turns(path, place, entry))]
        wanted = count if self.choice.oversample else min(count, len(pairs))
        samples: list[Sample] = []
        for question, answer in self.choice.of(pairs, len(pairs), seed):  # tokens are counted only until enough fit
            if len(samples) == wanted:
                break
            prompt_len, answer_len = (len(encode(tokenizer, text, "a prompt")) for text in (question, answer))
            output_len = answer_len if self.output_len is None else self.output_len
            long_enough = prompt_len >= SHORTEST and (self.output_len is not None or output_len >= SHORTEST)
            if long_enough and prompt_len <= LONGEST_PROMPT and prompt_len + output_len <= LONGEST:
                samples.append(Sample(question, output_len, prompt_len))
        return dataclasses.replace(self.choice, shuffle=False).of(samples, count, seed)


@dataclasses.dataclass(frozen=True)
class Custom:
    """The prompts of a .jsonl file, ``{"prompt": text}`` a line.

    Attributes:
      choice: of the lines.
      output_len: the most tokens of a response; -1 takes ``output_tokens`` of each line.
    """

    choice: Choice
    output_len: int = 256

    def samples(self, count: int, tokenizer: Tokenizer | None, seed: int) -> list[Sample]:
        lines = []
        for where, line in json_lines("dataset_path", self.choice.path):
            prompt, output_len = line.get("prompt"), self.output_len
            if not isinstance(prompt, str):
                raise ValueError(f'{where}: expected an object with a text under "prompt"')
            if output_len == -1:
                output_len = line.get("output_tokens")
                if type(output_len) is not int or output_len < 1:
                    raise ValueError(
                        f'{where}: expected "output_tokens", an integer of at least 1, or --custom-output-len'
                    )
            lines.append((prompt, output_len))
        return [_counted(tokenizer, *line) for line in self.choice.of(lines, count, seed)]


@dataclasses.dataclass(frozen=True)
class SpecBench:
    """The first turns of Spec-Bench (Xia et al., 2024), whose file is question.jsonl: ``{"category", "turns": [text, ..]}``.

    Attributes:
      choice: of the questions.
      output_len: the most tokens of a response.
      category: only questions of this category; None for all.
    """

    choice: Choice
    output_len: int = 256
    category: str | None = None

    def samples(self, count: int, tokenizer: Tokenizer | None, seed: int) -> list[Sample]:
        questions, categories = [], set()
        for where, line in json_lines("dataset_path", self.choice.path):
            turns, category = line.get("turns"), line.get("category")
            if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
                raise ValueError(f'{where}: expected an object with a list of texts under "turns"')
            categories.add(str(category))
            if self.category in (None, category):
                questions.append(turns[0])
        ok = self.category is None or questions
        expected = f"one of {', '.join(sorted(categories))}, or none for all"
        require(bool(ok), "spec_bench_category", self.category, expected)
        return [_counted(tokenizer, prompt, self.output_len) for prompt in self.choice.of(questions, count, seed)]


def _text(
    tokenizer: Tokenizer, prefix: list[int], length: int, allowed: np.ndarray, rng: np.random.Generator
) -> tuple[str, int]:
    """A random text of about ``length`` tokens, and how many it has.

    Random tokens may become others when their text is encoded. After ``TRIES`` attempts the text is taken as it is.
    """
    tokens = prefix + rng.choice(allowed, length - len(prefix)).tolist()
    for _ in range(TRIES):
        tokens = encode(tokenizer, tokenizer.decode(tokens, skip_special_tokens=True), "a random prompt")
        if len(tokens) == length:
            break
        tokens = tokens[:length] + rng.choice(allowed, max(length - len(tokens), 0)).tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return text, len(encode(tokenizer, text, "a random prompt"))


def _counted(tokenizer: Tokenizer | None, prompt: str, output_len: int) -> Sample:
    return Sample(prompt, output_len, None if tokenizer is None else len(encode(tokenizer, prompt, "a prompt")))


def _required(tokenizer: Tokenizer | None, name: str) -> Tokenizer:
    if tokenizer is None:
        raise ValueError(
            f"dataset_name={name!r}: expected --tokenizer beside it, a checkpoint folder, to count tokens with"
        )
    return tokenizer


def _first_turns(path: pathlib.Path, place: int, entry: Any) -> tuple[str, str] | None:
    """The first question and its answer; None if the conversation has fewer than two turns."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    texts: list[str] = []
    for turn in turns if isinstance(turns, list) else [None]:
        text = turn.get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str):
            raise ValueError(f'{path}, conversation {place}: expected {{"conversations": [{{"value": text}}, ..]}}')
        texts.append(text)
    return (texts[0], texts[1]) if len(texts) >= 2 else None
