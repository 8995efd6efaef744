"""What an EAGLE-3 or P-EAGLE head would have drafted in texts that the target has written.

A text that the target continued greedily is what it would accept, so a draft is accepted exactly if it and those before it
are the text's own next tokens. One pass over a text tells that for every round that could begin in it, and since only
the head runs, many settings of one head can be compared."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.heads import Eagle3Config
from jspec.models import build_head
from jspec.models.branches import Branches
from jspec.models.cache import CausalView
from jspec.models.split import split
from jspec.results import Stats


@dataclasses.dataclass(frozen=True)
class Text:
    """A prompt and how the target went on: ``tokens`` of both, the first ``prompt_length`` of them the prompt."""

    tokens: tuple[int, ...]
    prompt_length: int


class Trials:
    """Texts, and what the target knew at each of their tokens.

    Args:
      target: the target's module.
      texts: what it has written, greedily.
      streams: every residual stream that a head is to be tried with; () is the hidden state after the final norm.
    """

    def __init__(self, target: Any, texts: Sequence[Text], streams: Sequence[int]):
        self._texts, self._streams = texts, tuple(sorted(set(streams)))
        self._leaves, self._merge = split(target)
        self._width = target.config.hidden_size
        length = 1 << (max(len(text.tokens) for text in texts) - 1).bit_length()  # one shape for all texts
        self._tokens = [np.pad(np.array(text.tokens, np.int32), (0, length - len(text.tokens))) for text in texts]

        @jax.jit
        def features(leaves, tokens):
            model, positions = self._merge(leaves), jnp.arange(length, dtype=jnp.int32)[None]
            cache = (None,) * model.config.num_layers
            return model.with_auxiliary(tokens[None], positions, cache, CausalView(positions), self._streams)[1]

        self._programs: dict[Eagle3Config, Any] = {}
        self._features = [features(self._leaves, tokens) for tokens in self._tokens]

    def accepted(
        self,
        config: Eagle3Config,
        params: Mapping[str, Any],
        streams: tuple[int, ...],
        K: int,
        dtype: str,
    ) -> list[np.ndarray]:
        """Drafts accepted in a round that begins after the first n tokens, n = prompt .. end - 1 of each text.

        Args:
          config, params: the head, as it is on disk or with some settings changed.
          streams: the residual streams that it reads.
          K: drafts of a round.
          dtype: ``bfloat16`` or ``float32``.
        """
        leaves, merge = split(build_head(config, params, dtype))
        kind = dataclasses.replace(config, aux_layers=None)  # whichever streams it reads, the program is the same
        if kind not in self._programs:

            def correct(leaves, target_leaves, tokens, features):
                return _correct(kind, merge(leaves), self._merge(target_leaves), tokens, features, K)

            self._programs[kind] = jax.jit(correct)
        width = self._width
        columns = [slice(i * width, (i + 1) * width) for i in map(self._streams.index, streams)]
        found = []
        for text, tokens, features in zip(self._texts, self._tokens, self._features, strict=True):
            if streams:
                features = jnp.concatenate([features[..., part] for part in columns], axis=-1)
            right = np.asarray(self._programs[kind](leaves, self._leaves, tokens, features))  # [K, S], by slot
            end, first = len(text.tokens), max(text.prompt_length, 2)
            known = np.arange(K)[:, None] + np.arange(first, end)[None] < end
            run = np.cumprod(right[:, first - 2 : end - 2] & known, axis=0)
            found.append(run.sum(axis=0))
        return found

    def stats(self, accepted: Sequence[np.ndarray], K: int) -> Stats:
        """The rounds that an engine would make of each text, one after the other, given ``accepted``."""
        drafted, taken = [], []
        for text, counts in zip(self._texts, accepted, strict=True):
            first, end = max(text.prompt_length, 2), len(text.tokens)
            n = first
            while n < end:
                drafted.append(K)
                taken.append(int(counts[n - first]))
                n += taken[-1] + 1
        return Stats.of(K, drafted, taken)


def _correct(config: Eagle3Config, head, target, tokens, features, K: int) -> jax.Array:
    """bool ``[K, S]``: whether draft d after slot t is token t + 2 + d of int32 ``[S]``, if those before it are."""
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
        drafts = jnp.argmax(head.logits(hidden, target), axis=-1)[0]
        right.append(drafts == jnp.roll(tokens, -depth - 2))
        fused = head.recycle(hidden)
    return jnp.stack(right)
