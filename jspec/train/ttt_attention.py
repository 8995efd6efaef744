"""Attention for training a draft head: a round of drafts starts at every slot of a text, and all run in one pass.

When a draft head serves, a round that starts at slot b first has slots 0 to b, for which the target computed features.
Then come slots for which there are none yet: the head fills them with its own hidden states (training-time test,
EAGLE-3) or with a mask (P-EAGLE). Training does this for every b. The slots of depth 0 are the text itself, slots 0 to
n - 1, with causal attention. From each slot b of the text leaves a *branch*, the further slots of the round that starts
there, one per depth. Its slot of depth s stands at position b + s, and attends to

* the text slots 0 to b, and
* the slots of its own branch at depths 1 to s.

This is exactly what the KV cache holds when the head serves. For example, in the branch at b = 4 the slot of depth 2
stands at position 6. It sees text slots 0 to 4 and the branch's own slots at positions 5 and 6, but neither text slots 5
and 6 nor any other branch.

The depths are computed one after the other:

    cache = ((),) * L
    for depth, bases in enumerate(...):               # bases int32 [m]: the text slots that this depth's branches leave
        view = Branches(bases, depth)
        hidden, cache = head(embedded, features, view.positions(B), cache, view)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import View
from jspec.pallas.attention.reference import causal_mask
from jspec.pallas.attention.spec import AttentionSpec


def product(equation: str, x, y) -> jax.Array:
    """An einsum of two operands of one dtype, float32; of float32 in full."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches(View):
    """The attention view (``jspec.models.kv_cache``) for the m slots of one depth.

    The cache of a layer is a tuple of ``LayerKV``, one per depth, with keys and values ``[G, B, m, H]`` of its m slots.

    Attributes:
      bases: int32 ``[m]``, the text slot at which each branch leaves the text. At depth 0 the slots are those of the
        text, so this is 0 to n - 1. At depth 1 it may be any m text slots in any order. A deeper depth may drop
        branches, but only from the end: its ``bases`` are the first entries of the ``bases`` one depth above.
      depth: s, 0 for the text.
    """

    bases: jax.Array
    depth: int = dataclasses.field(metadata={"static": True})

    def positions(self, batch: int) -> jax.Array:
        """The positions of the slots, int32 ``[B, m]``: each branch's base plus the depth."""
        return jnp.broadcast_to((self.bases + self.depth)[None], (batch, self.bases.shape[0]))

    def write(self, kv: tuple[LayerKV, ...], k, v) -> tuple[LayerKV, ...]:
        """Append this depth's keys and values, ``[B, m, G, H]`` each, to the depths before it."""
        assert len(kv) == self.depth, (len(kv), self.depth)
        return (*kv, LayerKV(jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0)))  # [G, B, m, H]

    def attend(self, q, kv: tuple[LayerKV, ...], spec: AttentionSpec) -> jax.Array:
        """Attention of queries ``[B, m, N, H]`` over the text and each slot's own branch; the softmax is in fp32.

        Args:
          q: rotated queries ``[B, m, N, H]``.
          kv: keys and values of depths 0 to s, this depth's included.
          spec: how they attend.

        Returns:
          ``[B, m, N, H]`` in q's dtype.
        """
        (m, N, H), window = q.shape[1:], spec.window
        text, branch = kv[0], kv[1:]
        if self.depth and window is not None:  # a branch's slots are consecutive, so the window holds its last W
            branch = branch[-window:]
        n = text.k.shape[2]

        def per_attention_head(x, count):
            """``[G, B, slots, H] -> [N, B, count, H]``: KV heads repeated, so that no product needs a transpose."""
            return jnp.repeat(x[:, :, :count], N // x.shape[0], axis=0)

        q = jnp.moveaxis(q, 2, 0)
        text_scores = spec.scores(product("nbmh,nbsh->nbms", q, per_attention_head(text.k, n)), H)
        text_scores = jnp.where(self._text_mask(n, window)[None, None], text_scores, -jnp.inf)
        branch_scores = [spec.scores(product("nbmh,nbmh->nbm", q, per_attention_head(at.k, m)), H) for at in branch]
        sinks = [] if spec.sinks is None else [spec.sinks.astype(jnp.float32)[:, None, None]]
        # One softmax over the text's scores [N, B, m, n], the branch's, [N, B, m] per depth, and sinks [N, 1, 1]. They
        # are not concatenated: that would copy the large array to append a few numbers.
        peak = functools.reduce(jnp.maximum, [*branch_scores, *sinks], text_scores.max(axis=-1))
        peak = jax.lax.stop_gradient(peak)
        weights = jnp.exp(text_scores - peak[..., None])
        branch_weights = [jnp.exp(score - peak) for score in branch_scores]
        attended = product("nbms,nbsh->nbmh", weights.astype(q.dtype), per_attention_head(text.v, n))
        for weight, at in zip(branch_weights, branch, strict=True):
            attended += weight[..., None] * per_attention_head(at.v, m).astype(jnp.float32)
        sink_weights = [jnp.exp(sink - peak) for sink in sinks]
        attended /= sum([*branch_weights, *sink_weights], weights.sum(axis=-1))[..., None]
        return jnp.moveaxis(attended.astype(q.dtype), 0, 2)

    def _text_mask(self, n: int, window: int | None) -> jax.Array:
        """Which of the n text slots each slot sees, bool ``[m, n]``.

        These are the slots up to the branch's base. The window counts back from the slot's own position, base + depth.
        """
        slots = jnp.arange(n, dtype=jnp.int32)
        up_to_base = slots[None] <= self.bases[:, None]
        return up_to_base & causal_mask(self.positions(1), slots, window)[0]
