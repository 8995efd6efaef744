"""Folders of real models, and what transformers computes of them.

They are no part of the project. ``JSPEC_REAL_MODELS`` names the folder that has them, one for each name in ``NAMES``, in
Hugging Face's layout and with weights in bfloat16, and the GGUF files ``gguf/NAME.gguf`` that they were made of."""

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

VARIABLE = "JSPEC_REAL_MODELS"
SMOL, GEMMA, QWEN, QWEN_LARGE = NAMES = (
    "smollm2-135m-instruct",
    "gemma-3-270m",
    "qwen2.5-coder-0.5b-instruct",
    "qwen2.5-coder-1.5b-instruct",
)
SMALL = SMOL, GEMMA, QWEN  # those that fit into a few GB beside transformers' own copies
BASE = (GEMMA,)  # models without a chat template
TOKENS = 48  # of a completion
MAX_LEN = 256
ASKED = (
    "Write a Python function that reverses a linked list.",
    "What is the capital of France, and what is it known for?",
    "Sort a list of tuples by their second element.",
    "Explain what a hash table is in two sentences.",
    "Write a SQL query that counts users by country.",
    "Schreibe eine Funktion, die prüft, ob ein Wort ein Palindrom ist.",
    "用 Python 写一个斐波那契函数。",
    "Convert 255 to binary and to hexadecimal.",
)
PROSE = """The harbour wakes before the town does. Ropes creak, somebody coughs behind a lamp, and the first of the boats
turns its bow to the grey line where the sea ends. My grandfather used to say that the weather could be read from the gulls:
when they sat on the roofs it was better to stay at home. He was wrong about 3 days out of 10, which he counted in
chalk on the door of the shed, and nobody ever told him that the almanac did better."""
CODE = '''class Stack:
    """Values of which the last one comes back first."""

    def __init__(self, values=()):
        self._values = list(values)

    def push(self, value):
        self._values.append(value)

    def pop(self):
        if not self._values:
            raise IndexError("pop from an empty stack")
        return self._values.pop()

    def __len__(self):
        return len(self._values)
'''
PASSAGES = PROSE, CODE


def models_folder() -> Path:
    """The folder of all models; the test is skipped where there is none."""
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no folder with real models")
    return Path(named)


def folder(name: str) -> Path:
    """The folder of a model; the test is skipped where it is missing."""
    found = models_folder() / name
    if not (found / "config.json").is_file():
        pytest.skip(f"{VARIABLE} has no folder {name}")
    return found


def gguf_file(name: str) -> Path:
    """The GGUF file of a model; the test is skipped where it is missing."""
    found = models_folder() / "gguf" / f"{name}.gguf"
    if not found.is_file():
        pytest.skip(f"{VARIABLE} has no file gguf/{name}.gguf")
    return found


@functools.cache
def reference_tokenizer(name: str) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder(name), local_files_only=True)


def prompts_of(name: str, count: int = len(ASKED)) -> list[list[int]]:
    """The tokens of questions, as chats where the model has a template for them."""
    tokenizer = reference_tokenizer(name)
    if name in BASE:
        return [tokenizer.encode(text) for text in ASKED[:count]]
    chats = [[{"role": "user", "content": text}] for text in ASKED[:count]]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


def passages_of(name: str) -> list[list[int]]:
    return [reference_tokenizer(name).encode(text) for text in PASSAGES]


def reference_model(name: str, dtype: str = "float32", attention: str = "eager") -> Any:
    """A model of transformers. An ``attention`` of "sdpa" keeps no scores of each two tokens, of which long texts have many.

    Its threads, which wait for work at every one of a small model's products, would be slower than one thread wherever
    something else runs."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": attention, "local_files_only": True}
    return transformers.AutoModelForCausalLM.from_pretrained(folder(name), **options).eval()


def read(model: Any, tokens: Sequence[int], last: int = 0) -> np.ndarray:
    """float32 ``[n, V]``: the logits of a model of transformers after each of n tokens, or after each of the ``last``."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last).logits[0].float().numpy()


def written(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, **settings) -> list[list[int]]:
    """The greedy completions of a model of transformers, in one batch with padding on the left.

    Args:
      **settings: fields of transformers' GenerationConfig, in place of those in generation_config.json.
    """
    import torch

    width, ends = max(map(len, prompts)), model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    tokens = torch.tensor([[ends[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": False, "repetition_penalty": 1.0} | settings
    settings |= {
        "temperature": None,
        "top_p": None,
        "top_k": None,
    }  # those of sampling, which greedy texts would warn of
    with torch.inference_mode():
        made = model.generate(
            tokens, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=ends[0], **settings
        ).tolist()
    texts = [row[width:] for row in made]
    return [text[: next((i + 1 for i, token in enumerate(text) if token in ends), None)] for text in texts]


@dataclasses.dataclass(frozen=True)
class Reference:
    """What transformers makes of a model, in float32 if nothing else is said.

    Attributes:
      prompts: token ids.
      texts: the greedy completions of the prompts, of ``TOKENS`` tokens at most, with the token that ends them.
      passages: token ids.
      logits: float32 ``[n, V]`` of each passage.
      kl_of_bfloat16: nats a token, KL(float32 || bfloat16) of the passages.
    """

    prompts: list[list[int]]
    texts: list[list[int]]
    passages: list[list[int]]
    logits: list[np.ndarray]
    kl_of_bfloat16: float


@functools.cache
def reference(name: str) -> Reference:
    """What transformers makes of one of the small models; the model itself is gone afterwards."""
    prompts, passages = prompts_of(name), passages_of(name)
    model = reference_model(name)
    texts, logits = written(model, prompts, TOKENS), [read(model, tokens) for tokens in passages]
    del model
    model = reference_model(name, "bfloat16")
    rounded = [read(model, tokens) for tokens in passages]
    return Reference(prompts, texts, passages, logits, divergence(logits, rounded))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def divergence(exact: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    """KL(exact || found) in nats a token, of the logits of texts."""
    sums = []
    for one, other in zip(exact, found, strict=True):
        p, q = log_softmax(one), log_softmax(other)
        sums.append((np.exp(p) * (p - q)).sum(-1))
    return float(np.concatenate(sums).mean())
