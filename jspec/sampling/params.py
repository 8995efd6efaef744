"""Sampling parameters of a request."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np

from jspec._validation import LARGEST_INT, LARGEST_NUMBER, is_int, is_number, is_one_of, named_arguments, require
from jspec.config import MAX_POSITIONS
from jspec.config.engine import LOGPROBS_MODES
from jspec.sampling.structured import StructuredOutputsParams
from jspec.sampling.thinking import ThinkingBudget

# Below this a temperature is greedy: dividing logits by it would leave fp32's range of meaning.
GREEDY_BELOW = 1e-5
SMALLEST_TOP_P = 2.0**-126  # fp32 has nothing above 0 below it
MAX_STOP_TOKENS = 128  # room per row on the device, the model's end-of-sequence ids included
MAX_LOGPROBS = 20  # likeliest tokens whose log-probabilities a request may ask for
MAX_COPIES = 1024


@named_arguments(max_new_tokens="max_tokens")
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names, meaning and defaults are vLLM's.

    The distribution of a token is made from the target's logits in this order: tokens that are not allowed, and bad words,
    are taken out; ``logit_bias`` is added; the repetition penalty multiplies or divides; the frequency and presence
    penalties are subtracted; then it is the softmax of logits / temperature, cut by min-p, then top-k, then top-p (each
    over what the one before left, ties at a cutoff remain), renormalised. Drafts are drawn from the drafter's logits in
    the same way, and a drafted token counts as text for the tokens after it.

    Args:
      temperature: 0 is greedy, exactly; so is anything below 1e-5.
      top_k: keep the k most likely tokens; 0 or -1 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p; 1 keeps all.
      min_p: keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
      seed: one seed, one text: None draws a fresh one, and so does -1, as in vLLM.
      max_tokens: most new tokens; None, as any number that is too large, goes on to the end of the context (``max_len``
        of ``load``). Alias ``max_new_tokens``.
      min_tokens: no end-of-sequence or stop token, and no stop string, before this many new tokens.
      stop: text that ends the completion and is cut from it.
      stop_token_ids: tokens that end the completion.
      ignore_eos: do not end at the model's own end-of-sequence tokens.
      repetition_penalty: for tokens that the prompt or the completion has, positive logits are divided by it and
        negative ones multiplied; above 0, and 1 is off.
      frequency_penalty: subtracted from a token's logit as often as the completion has the token; in -2..2.
      presence_penalty: subtracted once if the completion has the token; in -2..2.
      logit_bias: token id -> a number that is added to its logit, in -100..100; None is nothing.
      allowed_token_ids: the only tokens that may be sampled; None allows all.
      bad_words: words that the completion must not have. The last token of each is taken out where the completion ends
        with the tokens before it. A word is also meant with a space in front.
      n: how many completions. They share the prompt's pages, and completion i has the seed ``seed + i``.
      logprobs: with each token, give its log-probability and those of so many of the likeliest tokens, 0 to 20; None
        gives none.
      logprobs_mode: which distribution they are of: ``raw_logprobs``, the target's own, before everything above, or
        ``processed_logprobs``, the one that tokens are drawn from; at temperature 0 that of temperature 1 without min-p,
        top-k and top-p. None takes the mode that the model was loaded with.
      prompt_logprobs: what ``logprobs`` is, for the tokens of the prompt, and of the target's own distribution in any mode.
        Such a prompt is prefilled completely, in batches of up to 512 tokens, and not found in the prefix cache.
      max_drafts: most drafts of a round that are verified for this request; 0 takes none, and None, as any number
        beyond K, as many as the engine makes. The distribution of the text is the same for each.
      detokenize: whether results have text. Stop strings need it.
      skip_special_tokens: whether special tokens are left out of the text.
      include_stop_str_in_output: whether the text ends with the stop string, or the stop token's text, that ended it.
      structured_outputs: the form that the completion has, JSON of a schema for example; ``StructuredOutputsParams``, or a
        dictionary of its fields.
      thinking_budget: the most tokens of reasoning; a number, ``ThinkingBudget``, or a dictionary of its fields.
      truncate_prompt_tokens: keep so many tokens of the prompt, its last ones; -1 keeps as many as leave room for one
        new token; None keeps all, and a prompt that is too long is an error.

    Raises:
      ValueError: a value out of range; the message names field, value and what would be right.
      TypeError: an unknown argument, with what it may have meant, or ``max_tokens`` together with its alias.

    Example::

        params = jspec.SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop="class", seed=0)
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
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = dataclasses.field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_drafts: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_budget: ThinkingBudget | None = None
    logprobs_mode: str | None = None

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
        ok = seed is None or (is_int(seed) and -(2**63) <= seed < 2**63)
        require(ok, "seed", seed, "None or an integer in -2^63..2^63 - 1")
        if seed == -1:
            object.__setattr__(self, "seed", None)
        n, least = self.max_tokens, self.min_tokens
        require(n is None or (is_int(n) and n >= 1), "max_tokens", n, "an integer of at least 1, or None")
        most, why = (MAX_POSITIONS, "") if n is None or n > MAX_POSITIONS else (n, ", which is max_tokens")
        require(is_int(least) and 0 <= least <= most, "min_tokens", least, f"an integer in 0..{most}{why}")
        for text in self.stop:
            require(isinstance(text, str) and text != "", "stop", text, "non-empty strings")
        self._check_ids("stop_token_ids")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        require(self.detokenize or not self.stop, "stop", self.stop, "no stop strings with detokenize=False")
        self._check_logits()
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        object.__setattr__(self, "thinking_budget", ThinkingBudget.of(self.thinking_budget))
        ok = self.structured_outputs is None or least == 0
        require(ok, "min_tokens", least, "0 beside structured_outputs, whose form says where the text may end")
        n, length = self.n, self.truncate_prompt_tokens
        require(is_int(n) and 1 <= n <= MAX_COPIES, "n", n, f"an integer in 1..{MAX_COPIES}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            ok = count is None or (is_int(count) and 0 <= count <= MAX_LOGPROBS)
            require(ok, name, count, f"None or an integer in 0..{MAX_LOGPROBS}")
        mode = self.logprobs_mode
        ok = mode is None or is_one_of(mode, LOGPROBS_MODES)
        require(ok, "logprobs_mode", mode, f"None or one of {', '.join(map(repr, LOGPROBS_MODES))}")
        drafts = self.max_drafts
        ok = drafts is None or (is_int(drafts) and 0 <= drafts <= LARGEST_INT)
        require(ok, "max_drafts", drafts, "None or an integer of at least 0 and below 2^31; 0 takes no drafts")
        ok = length is None or (is_int(length) and (length == -1 or 1 <= length <= LARGEST_INT))
        require(ok, "truncate_prompt_tokens", length, "None, an integer of at least 1, or -1")

    def _check_logits(self):
        """Check the parameters that change logits before the temperature."""
        r = self.repetition_penalty
        ok = is_number(r) and 1 / LARGEST_NUMBER <= r <= LARGEST_NUMBER
        require(ok, "repetition_penalty", r, "a number above 0; 1 is off")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            require(is_number(value) and -2 <= value <= 2, name, value, "a number in -2..2")
        bias = {} if self.logit_bias is None else self.logit_bias
        require(isinstance(bias, Mapping), "logit_bias", bias, "a mapping from token ids to numbers, or None")
        for token, value in bias.items():
            ok = is_int(token) and 0 <= token <= LARGEST_INT
            require(ok, "logit_bias", token, "token ids of at least 0 and below 2^31, as integers")
            ok = is_number(value) and -100 <= value <= 100
            require(ok, f"logit_bias[{token}]", value, "a number in -100..100")
        object.__setattr__(self, "logit_bias", dict(bias) or None)
        if self.allowed_token_ids is not None:
            self._make_tuple("allowed_token_ids", "a list of token ids, or None")
            require(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "at least one token, or None for all")
            self._check_ids("allowed_token_ids")
        self._make_tuple("bad_words", "a string or a list of strings")
        for word in self.bad_words:
            require(isinstance(word, str) and word.strip() != "", "bad_words", word, "strings that are not blank")

    def _check_ids(self, name: str):
        ids = getattr(self, name)
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= LARGEST_INT:
            return  # fast even for as many ids as the vocabulary has
        for token in ids:
            ok = is_int(token) and 0 <= token <= LARGEST_INT
            require(ok, name, token, "token ids of at least 0 and below 2^31")

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

    @property
    def processes_logits(self) -> bool:
        """Whether logits are changed before the temperature, apart from stop tokens that come too early."""
        penalties = self.repetition_penalty != 1, self.frequency_penalty != 0, self.presence_penalty != 0
        return any(penalties) or self.allowed_token_ids is not None or bool(self.logit_bias or self.bad_words)

    @property
    def needs_processing(self) -> bool:
        """Whether rounds have to process logits for this request, or to compute log-probabilities."""
        return self.processes_logits or self.logprobs is not None

    def copies(self) -> list["SamplingParams"]:
        """The n requests of these parameters, each with n = 1 and a seed of its own, if there is a seed."""
        if self.n == 1:
            return [self]
        # Copies are not built anew, because that would repeat the checks for each.
        copies: list[SamplingParams] = [copy.copy(self) for _ in range(self.n)]
        for i, params in enumerate(copies):
            object.__setattr__(params, "n", 1)
            object.__setattr__(params, "seed", None if self.seed is None else _following(self.seed, i))
        return copies

    def most_tokens(self, room: int) -> int:
        """Most new tokens, where the context has room for ``room``."""
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def stop_tokens(self, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Every token that ends this request, for a model with these end-of-sequence ids."""
        return tuple(dict.fromkeys([*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids]))


def _following(seed: int, count: int) -> int:
    """The seed so many behind this one; 0 follows the largest."""
    following = int(seed) + count
    return following if following < 2**63 else following - 2**63
