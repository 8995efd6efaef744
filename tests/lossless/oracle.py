"""What a step should do: the distribution of its texts, how many drafts a round has, and how many it accepts."""

import dataclasses
import functools

import numpy as np

from lossless.distributions import (
    Model,
    Options,
    Warp,
    completion_distribution,
    distribution,
    processed,
    round_distribution,
)
from lossless.steps import ARGMAX_BELOW, BESIDE, CORPUS, NGRAM, Ask, K, N, Program
from lossless.table_model import V, context, stored


@dataclasses.dataclass(frozen=True)
class Oracle:
    """The distributions that the requests of one kind should follow under a program."""

    program: Program
    ask: Ask
    tables: tuple[np.ndarray, np.ndarray]

    @functools.cached_property
    def target(self) -> Model:
        return self._model(self.tables[0], self.ask.warp, np.float64, self.ask.options)

    @functools.cached_property
    def draft_model(self) -> Model:
        how, warp = self.program, self.ask.warp
        temperature = warp.temperature if how.draft_temperature is None else how.draft_temperature
        if how.draft_sampling == "argmax" or (how.draft_sampling == "auto" and warp.temperature < ARGMAX_BELOW):
            temperature = 0.0
        warp = dataclasses.replace(warp, temperature=temperature)
        options = dataclasses.replace(self.ask.options, grammar=None)  # which the drafter does not know
        table = self.tables[1][:, : how.draft_vocab]
        if how.draft_tokens is not None:
            table = np.where(np.isin(np.arange(V), how.draft_tokens), table, -np.inf)
        return self._model(table, warp, stored(0.0).dtype, options)

    def _model(self, table, warp: Warp, dtype, options: Options) -> Model:
        """A model of a table, whose processed logits are rounded to ``dtype``."""
        prompt_length = len(self.ask.prompt)

        @functools.cache
        def of(history):
            logits = processed(table[context(history)], history, prompt_length, options)
            logits = logits.astype(dtype).astype(np.float64)
            if len(history) < prompt_length + self.ask.min_tokens:
                logits[list(self.ask.stop_tokens)] = -np.inf
            return np.pad(distribution(logits, warp), (0, V - len(logits)))

        return of

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """Joint distribution of N tokens, ``[V + 1] * N``."""
        return completion_distribution(self.target, self.ask.prompt, N, self.ask.stop_tokens)

    def drafts(self, history) -> tuple[int, Model]:
        """How many drafts a round after this history has, and their distribution."""
        most = K if self.ask.max_drafts is None else self.ask.max_drafts
        room, length = min(K, most, self.program.slots - 1 - len(history)), len(history)
        grammar = self.ask.options.grammar
        jump_forward = () if grammar is None else grammar.jump_forward_after(history[len(self.ask.prompt) :], K)
        beside = prompt_lookup(history, K, BESIDE) if self.program.lookup and not jump_forward else ()
        if beside:
            return room, lambda seen: np.eye(V)[beside[len(seen) - length]]
        count, draft = self._own_drafts(history, room)
        if self.program.method.startswith("ngram"):
            count = max(count, min(len(jump_forward), room))

        def either(seen):
            i = len(seen) - length
            return np.eye(V)[jump_forward[i]] if i < len(jump_forward) else draft(seen)

        return count, either

    def _own_drafts(self, history, room: int) -> tuple[int, Model]:
        """The drafts that the drafter makes."""
        length = len(history)
        if self.program.method == "draft_model":
            return min(room, max(self.program.draft_positions - length + 1, 0)), self.draft_model
        copied = ()
        if self.program.method.startswith("ngram"):
            copied = prompt_lookup(history, K)
        if self.program.method == "ngram_corpus":
            copied = copied or corpus_lookup(history, K)
        return min(room, len(copied)), lambda seen: np.eye(V)[copied[len(seen) - length]]

    def accepted(self, history) -> np.ndarray:
        """Distribution of the number of drafts accepted in a round after this history, ``[K + 1]``."""
        count, draft = self.drafts(history)
        coupled = self.program.draft_sampling == "coupled"
        probabilities = np.zeros(K + 1)
        for tokens, mass in round_distribution(
            self.program.verify, coupled, self.target, draft, history, count
        ).items():
            probabilities[len(tokens) - 1] += mass
        return probabilities


def prompt_lookup(history, many: int, lengths=NGRAM) -> tuple[int, ...]:
    """What followed the last occurrence of the longest suffix that occurs earlier; nothing if none of these lengths does."""
    shortest, longest = lengths
    for size in range(longest, shortest - 1, -1):
        for end in range(len(history) - 1, size - 1, -1):
            if history[end - size : end] == history[-size:]:
                text = list(history)
                for i in range(many):
                    text.append(text[end + i])
                return tuple(text[len(history) :])
    return ()


def corpus_lookup(history, many: int) -> tuple[int, ...]:
    """What followed the first occurrence, in the corpus, of the longest suffix that occurs there with a token after it."""
    shortest, longest = NGRAM
    for size in range(min(longest, len(history)), shortest - 1, -1):
        for text in CORPUS:
            for end in range(size, len(text)):
                if text[end - size : end] == tuple(history[-size:]):
                    return text[end : end + many]
    return ()
