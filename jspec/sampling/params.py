"""What a request asks for."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from jspec._arguments import LARGEST_INT, LARGEST_NUMBER, is_int, is_number, named_arguments, require
from jspec.config import MAX_POSITIONS

# Below this a temperature is greedy: dividing logits by it would leave fp32's range of meaning.
GREEDY_BELOW = 1e-5
SMALLEST_TOP_P = 2.0**-126  # fp32 has nothing above 0 below it
MAX_STOP_TOKENS = 128  # room per row on the device, the model's end-of-sequence ids included


@named_arguments(max_new_tokens="max_tokens")
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names, meaning and defaults are vLLM's.

    The distribution of a token is the softmax of logits / temperature, cut by min-p, then top-k, then top-p (each over
    what the one before left, ties at a threshold kept), renormalised.

    Args:
      temperature: 0 is greedy, exactly; so is anything below 1e-5.
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
      min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
      seed: one seed, one text: None draws a fresh one.
      max_tokens: most new tokens; None, as any number that is too large, goes on to the end of the context (``max_len``
        of ``load``). Alias ``max_new_tokens``.
      min_tokens: no end-of-sequence or stop token, and no stop string, before this many new tokens.
      stop: text that ends the completion and is cut from it.
      stop_token_ids: tokens that end the completion.
      ignore_eos: do not end at the model's own end-of-sequence tokens.

    Raises:
      ValueError: a value out of range; the message names field, value and what would be right.
      TypeError: an unknown argument, with what it may have meant, or ``max_tokens`` together with its alias.
    """

    aliases: ClassVar[dict[str, str]]

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        self._make_tuple("stop", "a string or a list of strings")
        self._make_tuple("stop_token_ids", "a list of token ids")
        t, k = self.temperature, self.top_k
        ok = is_number(t) and 0 <= t <= LARGEST_NUMBER
        require(ok, "temperature", t, f"a number in 0..{LARGEST_NUMBER:g} (0 is greedy)")
        ok = is_int(k) and -1 <= k <= LARGEST_INT
        require(ok, "top_k", k, "an integer of at least 1 and below 2^31, or 0 or -1 for all tokens")
        ok = is_number(self.top_p) and SMALLEST_TOP_P <= self.top_p <= 1
        require(ok, "top_p", self.top_p, "a number above 0 (that float32 can hold) and at most 1")
        require(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in 0..1")
        seed = self.seed
        require(seed is None or (is_int(seed) and 0 <= seed < 2**63), "seed", seed, "None or an integer in 0..2^63 - 1")
        n, least = self.max_tokens, self.min_tokens
        require(n is None or (is_int(n) and n >= 1), "max_tokens", n, "an integer of at least 1, or None")
        most, why = (MAX_POSITIONS, "") if n is None or n > MAX_POSITIONS else (n, ", which is max_tokens")
        require(is_int(least) and 0 <= least <= most, "min_tokens", least, f"an integer in 0..{most}{why}")
        for text in self.stop:
            require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        for token in self.stop_token_ids:
            ok = is_int(token) and 0 <= token <= LARGEST_INT
            require(ok, "stop_token_ids", token, "token ids of at least 0 and below 2^31")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")

    def _make_tuple(self, name: str, expected: str):
        value = getattr(self, name)
        if isinstance(value, str):
            value = (value,)
        elif value is None:
            value = ()
        elif hasattr(value, "ndim"):  # an array, of numpy or of JAX
            value = np.asarray(value).tolist()
        require(isinstance(value, Iterable) and not isinstance(value, Mapping), name, value, expected)
        object.__setattr__(self, name, tuple(value))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def most_tokens(self, room: int) -> int:
        """Most new tokens, where the context has room for so many."""
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def stop_tokens(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Every token that ends this request, for a model with these end-of-sequence ids."""
        return tuple(dict.fromkeys([*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids]))
