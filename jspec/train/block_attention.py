"""Attention for training a block drafter: blocks at many anchors of a text are filled in one pass.

When a block drafter serves, the block of a round whose newest token is at position a has that token, the anchor, in its
first slot. Its n slots stand at positions a to a + n - 1, and attend to

* the context, which is what the target computed for the tokens at positions 0 to a - 1, and
* the slots of the block itself, all of them, or up to the own if the layer is causal.

Training does this for A anchors of each text at once. For example, the block of the anchor 9 sees the context of tokens 0
to 8, neither that of token 9 nor any slot of the block of the anchor 4.

    view = Anchored(anchors, n)
    hidden, _ = head(context, embedded, view.positions(context.shape[1]), cache, view)   # [B, A n, D]
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import View
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec
from jspec.train.ttt_attention import product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Anchored(View):
    """The attention view (``jspec.models.kv_cache``) of a call that reads the context of S tokens and A blocks behind
    it.

    Nothing is cached: the keys and values of a layer are those of the call, ``[G, B, S + A n, H]``.

    Attributes:
      anchors: int32 ``[B, A]``, the position of the first slot of each block.
      block: n, the slots of a block.
      causal, from_anchor: as of ``jspec.models.heads.block.BlockView``.
    """

    anchors: jax.Array
    block: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(default=False, metadata={"static": True})
    from_anchor: bool = dataclasses.field(default=False, metadata={"static": True})

    def positions(self, context: int) -> jax.Array:
        """Positions of the tokens of the context and of all slots behind them, int32 ``[B, S + A n]``."""
        B = len(self.anchors)
        before = jnp.broadcast_to(jnp.arange(context, dtype=jnp.int32)[None], (B, context))
        slots = self.anchors[:, :, None] + jnp.arange(self.block, dtype=jnp.int32)[None, None]
        return jnp.concatenate([before, slots.reshape(B, -1)], axis=1)

    def write(self, kv, k, v) -> LayerKV:
        del kv
        return LayerKV(jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0))

    def extend(self, qkv, rotation: Rotation | None, kv, num_kv_heads: int, spec: AttentionSpec):
        """As ``View.extend``, with the attention of the blocks alone, ``[B, A n, N, H]``; the softmax is in fp32.

        With a window W, as ``jspec.models.heads.block.BlockView`` has it: with ``from_anchor`` a slot sees the W newest
        tokens of the context, else what of the context is among the W newest slots up to its own. Of the block it sees all
        slots, or up to its own if the block is causal, and without ``from_anchor`` W at most."""
        slots = self.anchors.shape[1] * self.block
        q, kv = self.rope_and_write_kv(qkv, rotation, kv, num_kv_heads)
        return self._attend(q[:, -slots:], kv, spec), kv

    def _attend(self, q, kv: LayerKV, spec: AttentionSpec) -> jax.Array:
        """Attention of queries ``[B, A n, N, H]`` over the context and the block of each; the same shape.

        The scores of a block with all others are never computed, which are most of the products of slots with slots."""
        (B, A), n, (N, H), G = self.anchors.shape, self.block, q.shape[2:], kv.k.shape[0]
        window, moves = spec.window, not self.from_anchor
        S = kv.k.shape[2] - A * n
        assert kv.v is not None  # no draft head keeps latents
        q = q.reshape(B, A, n, G, N // G, H)
        k, v = (x[:, :, S:].reshape(G, B, A, n, H) for x in (kv.k, kv.v))
        before = spec.scores(product("bamgrh,gbsh->bgrams", q, kv.k[:, :, :S]), H)  # [B, G, N / G, A, n, S]
        within = spec.scores(product("bamgrh,gbakh->bgramk", q, k), H)  # [B, G, N / G, A, n, n]
        key, anchor = jnp.arange(S, dtype=jnp.int32)[None, None, None], self.anchors[:, :, None, None]
        slot = jnp.arange(n, dtype=jnp.int32)
        known = jnp.broadcast_to(key < anchor, (B, A, n, S))
        if window is not None:
            furthest = slot.reshape(1, 1, n, 1) - window + 1 if moves else -window  # the oldest that is seen
            known = known & (key >= anchor + furthest)
        before = jnp.where(known[:, None, None], before, -jnp.inf)
        if self.causal:
            behind = slot[:, None] - slot[None]
            seen = (behind >= 0) & (behind < (window if window is not None and moves else n))
            within = jnp.where(seen[None, None, None, None], within, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([before, within], axis=-1), axis=-1).astype(v.dtype)
        attended = product("bgrams,gbsh->bamgrh", weights[..., :S], kv.v[:, :, :S])
        attended += product("bgramk,gbakh->bamgrh", weights[..., S:], v)
        return attended.astype(q.dtype).reshape(B, A * n, N, H)
