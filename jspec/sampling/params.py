"""What a request asks for."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar

from jspec._arguments import is_int, is_number, named_arguments, require

# Below this a temperature is greedy: dividing logits by it would leave fp32's range of meaning.
GREEDY_BELOW = 1e-5
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
      max_tokens: most new tokens; alias ``max_new_tokens``.
      min_tokens: no end-of-sequence or stop token, and no stop string, before this many new tokens.
      stop: text that ends the completion and is cut from it.
      stop_token_ids: tokens that end the completion.
      ignore_eos: do not end at the model's own end-of-sequence tokens.

    Raises:
      ValueError: a value out of range; the message names field, value and what would be right.
      TypeError: an unknown argument, or ``max_tokens`` together with its alias.
    """

    aliases: ClassVar[dict[str, str]]

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        for name, what in (("stop", "a string or a list of strings"), ("stop_token_ids", "a list of token ids")):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else () if value is None else value
            require(isinstance(value, Iterable), name, value, what)
            object.__setattr__(self, name, tuple(value))
        t = self.temperature
        require(is_number(t) and t >= 0, "temperature", t, "a finite number of at least 0 (0 is greedy)")
        require(is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "at least 1, or 0 or -1 for all tokens")
        require(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        require(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "in 0..1")
        seed = self.seed
        require(seed is None or (is_int(seed) and 0 <= seed < 2**63), "seed", seed, "None or an integer in 0..2^63 - 1")
        n, least = self.max_tokens, self.min_tokens
        require(is_int(n) and n >= 1, "max_tokens", n, "an integer of at least 1")
        require(is_int(least) and 0 <= least <= n, "min_tokens", least, f"an integer in 0..max_tokens, which is {n}")
        for text in self.stop:
            require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        for token in self.stop_token_ids:
            require(is_int(token) and token >= 0, "stop_token_ids", token, "token ids of at least 0")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def stop_tokens(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Every token that ends this request, for a model with these end-of-sequence ids."""
        return tuple(dict.fromkeys([*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids]))
