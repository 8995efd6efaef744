"""Changes of a request's logits before the temperature: allowed tokens, bad words, biases, penalties, early stops.

All of it is computed from the text alone, committed tokens and drafts, so there is no state to save, or to roll back
when a draft is rejected. Order and meaning are vLLM's.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.sampling.draft_vocabulary import DraftVocabulary
from jspec.sampling.params import SamplingParams
from jspec.sampling.stops import forbid_early_stops

MAX_BIASES = 1024  # entries of ``logit_bias``
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 16  # bad words of several tokens, and the tokens of one
_NO_TOKEN = -1
_WORD = 32  # bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processors:
    """Changes of each row's logits, with an axis of rows in front; on the host, those of one request without it.

    All numbers have four bytes, so that they can be packed with others.

    Attributes:
      active: int32 ``[B]``, 1 if the row changes its logits, 0 if all other fields are without effect.
      prompt_length: int32 ``[B]``, how many tokens of the text are the prompt.
      repetition, frequency, presence: float32 ``[B]``, the penalties.
      biased: int32 ``[B, MAX_BIASES]``, the tokens that ``bias`` is for, padded with -1.
      bias: float32 ``[B, MAX_BIASES]``, the numbers that are added to their logits.
      allowed: uint32 ``[B, ceil(V / 32)]``; bit v % 32 of word v // 32 is set if token v may come.
      bad_words: int32 ``[B, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]``, words of two tokens or more, each at the end of its
        line and padded with -1 in front. Words of one token are not in ``allowed``.
    """

    active: Any
    prompt_length: Any
    repetition: Any
    frequency: Any
    presence: Any
    biased: Any
    bias: Any
    allowed: Any
    bad_words: Any

    @staticmethod
    def of(
        params: SamplingParams, prompt_length: int, vocab_size: int, bad_words: Sequence[Sequence[int]] = ()
    ) -> "Processors":
        """The processors of one request, in arrays on the host. ``check`` has passed its values.

        Args:
          params: the request's parameters.
          prompt_length: how many tokens its prompt has.
          vocab_size: V of the target.
          bad_words: the tokens of each bad word.
        """
        if not params.processes_logits:
            return _inactive(vocab_size)
        return _of(params, prompt_length, vocab_size, bad_words)

    @staticmethod
    def none(rows: int, vocab_size: int) -> "Processors":
        """Processors of inactive rows, on the device."""
        inactive = Processors.of(SamplingParams(), 0, vocab_size)
        return jax.tree.map(lambda x: jnp.tile(jnp.asarray(x)[None], (rows, *[1] * np.ndim(x))), inactive)

    def process(self, logits, tokens, length, drafts=None, first=0) -> jax.Array:
        """The logits as the requests want them, ``[B, J, V]`` in their dtype; entry j is of position length + first + j.

        A row that is not active gets its own back, bit for bit.

        Args:
          logits: ``[B, J, V']``, where a drafter may have fewer tokens than V.
          tokens: int32 ``[B, S]``, the committed tokens; entries at ``length`` and later mean nothing.
          length: int32 ``[B]``.
          drafts: int32 ``[B, n]``, the tokens behind them; entry j depends on the first ``first + j``. None if they are
            not known.
          first: an integer, of Python's or int32 ``[]``.
        """
        B, J, V = logits.shape
        drafts = jnp.zeros((B, 0), jnp.int32) if drafts is None else drafts
        in_text = jnp.arange(drafts.shape[1])[None] < first + jnp.arange(J)[:, None]  # [J, n]: draft i precedes entry j
        x = logits.astype(jnp.float32)
        x = jnp.where(_unpacked(self.allowed, V)[:, None], x, -jnp.inf)
        x = self._without_bad_words(x, tokens, length, drafts, first)
        x = jax.vmap(lambda row, at, add: row.at[:, at].add(add, mode="drop"))(
            x, jnp.where(self.biased >= 0, self.biased, V), self.bias
        )
        x = self._penalised(x, tokens, length, drafts, in_text)
        return jnp.where(self.active[:, None, None] > 0, x.astype(logits.dtype), logits)

    def _without_bad_words(self, x, tokens, length, drafts, first) -> jax.Array:
        """Take out the last token of each bad word where the completion ends with the tokens before it."""
        B, J, V = x.shape
        most, J_index = self.bad_words.shape[-1] - 1, jnp.arange(J)
        text = _with_drafts(tokens, length, drafts)
        # The tokens before each position, [B, J, most]; -2 is before the completion, and equals no token of a word.
        at = length[:, None, None] + first + J_index[None, :, None] - most + jnp.arange(most)[None, None]
        before = jnp.take_along_axis(text, jnp.clip(at, 0, text.shape[1] - 1).reshape(B, -1), axis=1).reshape(at.shape)
        before = jnp.where(at >= self.prompt_length[:, None, None], before, -2)
        prefix, last = self.bad_words[:, None, :, :-1], self.bad_words[:, None, :, -1]
        ends = jnp.all((prefix == _NO_TOKEN) | (prefix == before[:, :, None]), axis=-1) & (last >= 0)  # [B, J, words]
        row, column = jnp.arange(B)[:, None, None], J_index[None, :, None]
        return x.at[row, column, jnp.where(ends, last, V)].set(-jnp.inf, mode="drop")

    def _penalised(self, x, tokens, length, drafts, in_text) -> jax.Array:
        B, J, V = x.shape
        place, rows = jnp.arange(tokens.shape[1])[None], jnp.arange(B)[:, None]
        in_prompt = place < self.prompt_length[:, None]
        in_completion = ~in_prompt & (place < length[:, None])
        counts = jnp.zeros((B, V), jnp.int32).at[rows, tokens].add(in_completion.astype(jnp.int32), mode="drop")
        present = jnp.zeros((B, V), bool).at[rows, tokens].max(in_prompt, mode="drop")
        counts = jnp.broadcast_to(counts[:, None], (B, J, V))
        vocabulary = jnp.arange(V, dtype=jnp.int32)[None, None]
        for i in range(drafts.shape[1]):  # fused into the kernel that reads the counts
            counts += (drafts[:, i, None, None] == vocabulary) & in_text[None, :, i, None]
        repetition, frequency, presence = (
            penalty[:, None, None] for penalty in (self.repetition, self.frequency, self.presence)
        )
        repeated = jnp.where((counts > 0) | present[:, None], repetition, 1.0)
        x = jnp.where(x > 0, x / repeated, x * repeated)
        return x - frequency * counts - presence * (counts > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processing:
    """The processing of logits in a round: processors of its rows, and their texts.

    Attributes:
      processors: None if no row has any; then only stop tokens that come too early are taken out.
      stop_tokens: int32 ``[B, E]``, padded with -1.
      min_length: int32 ``[B]``, the position before which stop tokens are forbidden.
      tokens: int32 ``[B, S]``, the committed tokens.
      length: int32 ``[B]``, how many there are.
      grammar: uint32 ``[B, T, ceil(V / 32)]``, the tokens that a grammar allows at each of T positions from ``length`` on,
        as in ``Processors.allowed``. It depends on the drafts before the position. None allows all.
    """

    processors: Processors | None
    stop_tokens: jax.Array
    min_length: jax.Array
    tokens: jax.Array
    length: jax.Array
    grammar: jax.Array | None = None

    def apply(self, logits, drafts=None, first=0, vocabulary: DraftVocabulary | None = None) -> jax.Array:
        """The logits as the requests want them. Arguments as for ``Processors.process``.

        With a draft vocabulary they are ``[B, J, Vd]``, before and after. Processors are by token, so the logits are
        widened to all tokens in between; early stops are taken out of the narrow logits.
        """
        stop_tokens = self.stop_tokens
        if vocabulary is None:
            logits = self._processed(logits, drafts, first)
        else:
            stop_tokens = vocabulary.indices(stop_tokens)
            if self.processors is not None or self.grammar is not None:
                logits = vocabulary.narrowed(self._processed(vocabulary.widened(logits), drafts, first))
        positions = self.length[:, None] + first + jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        return forbid_early_stops(logits, positions, stop_tokens, self.min_length)

    def apply_to_tree(self, logits, offsets, chain, first: int = 0) -> jax.Array:
        """The logits behind drafts of a tree as the requests want them, of which those that change them have a chain.

        Args:
          logits: ``[B, J, V]``.
          offsets: int32 ``[B, J]``, how many drafts each entry is behind.
          chain: int32 ``[B, n]``, the drafts of a row with a chain. Its entries are the first ones, behind ``first``,
            ``first + 1``, .., n drafts.
          first: an integer.
        """
        if self.processors is not None or self.grammar is not None:
            count = chain.shape[1] + 1 - first
            logits = jnp.concatenate([self._processed(logits[:, :count], chain, first), logits[:, count:]], axis=1)
        return forbid_early_stops(logits, self.length[:, None] + offsets, self.stop_tokens, self.min_length)

    def _processed(self, logits, drafts, first) -> jax.Array:
        """The logits that ``apply`` returns, with stop tokens as they are."""
        if self.processors is not None:
            logits = self.processors.process(logits, self.tokens, self.length, drafts, first)
        if self.grammar is not None:
            allowed = _unpacked(self.grammar[:, : logits.shape[1]], logits.shape[2])
            logits = jnp.where(allowed, logits, -jnp.inf)
        return logits


def num_words(vocab_size: int) -> int:
    """How many words of 32 bits have a bit for each token."""
    return -(-vocab_size // _WORD)


def check(params: SamplingParams, vocab_size: int, bad_words: Sequence[Sequence[int]], what: str):
    """Raise a ValueError if ``Processors`` has no room for a request's values, or the vocabulary lacks one of its tokens.

    Args:
      params: the request's parameters.
      vocab_size: V of the target.
      bad_words: the tokens of each bad word.
      what: the request, for the message.
    """
    for name in ("logit_bias", "allowed_token_ids"):
        largest = max(getattr(params, name) or (), default=0)
        if largest >= vocab_size:
            raise ValueError(f"{what}: {name} has token {largest}: expected token ids in 0..{vocab_size - 1}")
    if len(params.logit_bias or ()) > MAX_BIASES:
        raise ValueError(
            f"{what}: logit_bias has {len(params.logit_bias or ())} entries: expected at most {MAX_BIASES}"
        )
    several = [word for word in bad_words if len(word) > 1]
    if len(several) > MAX_BAD_WORDS:
        raise ValueError(
            f"{what}: bad_words are {len(several)} sequences of several tokens, a word counting once more with a space in "
            f"front: expected at most {MAX_BAD_WORDS}"
        )
    longest = max(map(len, several), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise ValueError(f"{what}: bad_words has one of {longest} tokens: expected at most {MAX_BAD_WORD_TOKENS}")


@functools.lru_cache(maxsize=8)
def _inactive(vocab_size: int) -> Processors:
    """The processors of every request without any, made once: most have none."""
    return _of(SamplingParams(), 0, vocab_size, ())


def _of(params: SamplingParams, prompt_length: int, vocab_size: int, bad_words: Sequence[Sequence[int]]) -> Processors:
    """``Processors.of`` of a request with processors."""
    biased, bias = np.full(MAX_BIASES, _NO_TOKEN, np.int32), np.zeros(MAX_BIASES, np.float32)
    if params.logit_bias:
        biased[: len(params.logit_bias)] = list(params.logit_bias)
        bias[: len(params.logit_bias)] = list(params.logit_bias.values())
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), _NO_TOKEN, np.int32)
    for i, word in enumerate(word for word in bad_words if len(word) > 1):
        words[i, MAX_BAD_WORD_TOKENS - len(word) :] = word
    return Processors(
        active=np.int32(params.processes_logits),
        prompt_length=np.int32(prompt_length),
        repetition=np.float32(params.repetition_penalty),
        frequency=np.float32(params.frequency_penalty),
        presence=np.float32(params.presence_penalty),
        biased=biased,
        bias=bias,
        allowed=_bits(params.allowed_token_ids, [word[0] for word in bad_words if len(word) == 1], vocab_size),
        bad_words=words,
    )


def _bits(allowed: Sequence[int] | None, bad: Sequence[int], vocab_size: int) -> np.ndarray:
    """The allowed tokens as bits, uint32 ``[ceil(V / 32)]``."""
    flags = np.full(num_words(vocab_size) * _WORD, allowed is None)
    if allowed is not None:
        flags[list(allowed)] = True
    flags[list(bad)] = False
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _unpacked(flags, V: int) -> jax.Array:
    """bool ``[..., V]`` of uint32 ``[..., ceil(V / 32)]``."""
    bits = flags[..., None] >> jax.lax.broadcasted_iota(jnp.uint32, (*flags.shape, _WORD), flags.ndim) & 1
    return bits.reshape(*flags.shape[:-1], -1)[..., :V] > 0


def _with_drafts(tokens, length, drafts) -> jax.Array:
    """The text with the drafts behind it, int32 ``[B, S]``."""
    rows, at = jnp.arange(len(length))[:, None], length[:, None] + jnp.arange(drafts.shape[1])[None]
    return tokens.at[rows, at].set(drafts, mode="drop")
