"""Acceptance of a draft head on texts of the target, without the engine: EAGLE-3, P-EAGLE and block drafters.

The target has generated the texts greedily. So a draft is accepted exactly if it, and every draft before it in its round,
is the text's next token. One pass of the draft head over a text gives that for every round that could begin in it. Only the
draft head runs, so many settings of one head can be compared at little cost.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config.heads import BlockConfig, Eagle3Config
from jspec.models import build_head
from jspec.models.flatten import flatten
from jspec.models.heads.draft_vocabulary import tokens_of
from jspec.models.kv_cache import CausalView
from jspec.outputs import Stats
from jspec.train.block_attention import Anchored
from jspec.train.ttt_attention import Branches

TriedConfig = Eagle3Config | BlockConfig  # heads with alternative settings


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and its completion by the target: the first ``prompt_length`` of ``tokens`` are the prompt."""

    tokens: tuple[int, ...]
    prompt_length: int


class Trials:
    """Texts with the target's hidden states at each of their tokens, on which draft heads are tried.

    Args:
      target: the target's module.
      texts: texts that the target has completed greedily.
      aux_layers: every layer after which a head reads auxiliary hidden states; k means after k layers. If it is (), heads
        read the hidden state after the final norm.
    """

    def __init__(self, target: Any, texts: Sequence[Text], aux_layers: Sequence[int]):
        self._texts, self._aux_layers = texts, tuple(sorted(set(aux_layers)))
        self._leaves, self._merge = flatten(target)
        self._width = target.config.hidden_size
        length = 1 << (max(len(text.tokens) for text in texts) - 1).bit_length()  # one shape for all texts
        self._tokens = [np.pad(np.array(text.tokens, np.int32), (0, length - len(text.tokens))) for text in texts]

        @jax.jit
        def features(leaves, tokens):
            model, positions = self._merge(leaves), jnp.arange(length, dtype=jnp.int32)[None]
            cache = (None,) * model.config.num_layers
            return model.with_auxiliary(tokens[None], positions, cache, CausalView(positions), self._aux_layers)[1]

        self._programs: dict[TriedConfig, Any] = {}
        self._rounds = max(len(text.tokens) - max(text.prompt_length, 2) for text in texts)
        self._features = [features(self._leaves, tokens) for tokens in self._tokens]

    def accepted(
        self,
        config: TriedConfig,
        params: Mapping[str, Any],
        aux_layers: tuple[int, ...],
        K: int,
        dtype: str,
    ) -> list[np.ndarray]:
        """How many drafts each possible round accepts: one array for each text.

        Entry i is the round that begins when the text has prompt_length + i tokens. The last entry is the round with
        one token to go. (A prompt of one token counts as one of two, because no draft head drafts after a single token.)

        Args:
          config, params: the draft head, with the settings of its checkpoint or with others.
          aux_layers: the layers after which this head reads hidden states.
          K: the drafts of a round.
          dtype: ``bfloat16`` or ``float32``.
        """
        leaves, merge = flatten(build_head(config, params, dtype))
        kind: TriedConfig = config
        if isinstance(config, Eagle3Config):
            kind = dataclasses.replace(config, aux_layers=None)  # the program does not depend on them
        correct_of = _correct if isinstance(kind, Eagle3Config) else _correct_in_blocks
        if kind not in self._programs:

            def correct(leaves, target_leaves, tokens, features, slots):
                return correct_of(kind, merge(leaves), self._merge(target_leaves), tokens, features, slots, K)

            self._programs[kind] = jax.jit(correct)
        width = self._width
        columns = [slice(i * width, (i + 1) * width) for i in map(self._aux_layers.index, aux_layers)]
        counts = []
        for text, tokens, features in zip(self._texts, self._tokens, self._features, strict=True):
            if aux_layers:
                features = jnp.concatenate([features[..., part] for part in columns], axis=-1)
            end, first = len(text.tokens), max(text.prompt_length, 2)
            slots = np.minimum(
                first - 2 + np.arange(self._rounds), len(tokens) - 2
            )  # those before the last tokens of rounds
            right = np.asarray(self._programs[kind](leaves, self._leaves, tokens, features, slots))  # [K, rounds]
            is_within = np.arange(K)[:, None] + np.arange(first, end)[None] < end
            run = np.cumprod(right[:, : end - first] & is_within, axis=0)
            counts.append(run.sum(axis=0))
        return counts

    def stats(self, accepted: Sequence[np.ndarray], K: int) -> Stats:
        """The statistics of the rounds with which an engine would generate the texts, from the result of ``accepted``."""
        drafted, taken = [], []
        for text, counts in zip(self._texts, accepted, strict=True):
            first, end = max(text.prompt_length, 2), len(text.tokens)
            n = first
            while n < end:
                drafted.append(K)
                taken.append(int(counts[n - first]))
                n += taken[-1] + 1
        return Stats.of(K, drafted, taken)


def _correct(config: Any, head, target, tokens, features, wanted, K: int) -> jax.Array:
    """bool ``[K, R]``: entry (d, r) says whether the head's draft d after slot t is token t + 2 + d of ``tokens`` int32
    ``[S]``, where t is entry r of ``wanted`` int32 ``[R]``. It is meaningful where the drafts before d are right too."""
    S = tokens.shape[0]
    slots, cache = jnp.arange(S, dtype=jnp.int32), ((),) * config.layers.num_layers
    fused, mask = head.fuse(features), config.mask_token_id
    masked = fused if mask is None else head.fuse(head.mask_hidden[...].reshape(1, 1, -1))
    right = []
    for depth in range(K):
        view, following = Branches(slots, depth), jnp.roll(tokens, -depth - 1)[None]
        if depth and mask is not None:
            following, fused = jnp.full_like(following, mask), jnp.broadcast_to(masked, fused.shape)
        hidden, cache = head(head.embed(following, target), fused, view.positions(1), cache, view)
        drafts = _likeliest(config, head, head.logits(hidden, target))[0]
        right.append(drafts == jnp.roll(tokens, -depth - 2))
        fused = head.recycle(hidden)
    return jnp.stack(right)[:, wanted]


def _correct_in_blocks(config: Any, head, target, tokens, features, wanted, K: int) -> jax.Array:
    """As ``_correct``, of a block drafter: slot t stands for the block whose anchor is token t + 1."""
    S, R, n, first = tokens.shape[0], wanted.shape[0], config.block_size, 0 if config.anchor_first else 1
    anchors = wanted[None].astype(jnp.int32) + 1
    view = Anchored(anchors, n)
    blocks = jnp.full((1, R, n), config.mask_token_id, jnp.int32).at[:, :, 0].set(tokens[anchors])
    embedded, cache = head.embed(blocks.reshape(1, -1), target), (None,) * config.layers.num_layers
    hidden, _ = head(head.fuse(features), embedded, view.positions(S), cache, view)
    hidden = hidden.reshape(1, R, n, -1)
    state = None if head.markov is None else head.markov.no_state(R).reshape(1, R, -1)
    right = []
    for depth in range(K):
        draft_hidden, previous = hidden[:, :, first + depth], jnp.roll(tokens, -depth)[anchors]
        logits = head.draft_logits(draft_hidden, target)
        if head.markov is not None:
            added, state = head.markov(draft_hidden, previous, state)
            logits = logits + added
        drafts = _likeliest(config, head, logits)[0]
        right.append(drafts == jnp.roll(tokens, -depth - 1)[anchors[0]])
    return jnp.stack(right)


def _likeliest(config: TriedConfig, head, logits) -> jax.Array:
    """The draft at temperature 0, a token: ``[..., Vd] -> [...]``."""
    index = jnp.argmax(logits, axis=-1)
    return tokens_of(head.draft_ids[...], config.draft_vocab_size)[index] if config.reduced else index
