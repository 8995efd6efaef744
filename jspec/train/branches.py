"""Attention of a head that is trained on its own drafts: every position of a text branches off into a draft of its own.

A head that drafts after slot b reads text up to slot b, and then slots that it made up itself. Training does that at
all b at once. Slots of depth 0 are those of the text, ``0 .. n - 1``, causal. The branch at b has one slot a depth:
that of depth s stands at position b + s and sees text slots ``j <= b`` and the slots of its own branch at depths 1 to
s.

    cache = ((),) * L
    for depth, bases in enumerate(...):               # bases int32 [m]: the branches that go on
        view = Branches(bases, depth)
        hidden, cache = head(embedded, features, view.positions(B), cache, view)

One branch is exactly what the serving cache holds while a round drafts after slot b.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jspec.models.cache import LayerKV, View
from jspec.pallas.attention_reference import causal_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branches(View):
    """The slots of one depth, as a view (``jspec.models.cache``) that keeps a tuple of ``LayerKV``, one a depth, per
    layer.

    Attributes:
      bases: int32 ``[m]``, the slot at which each branch leaves the text. At depth 0 it is ``0 .. n - 1``, the text;
        the branches of depth s + 1 are the first so many of those of depth s, in the same order; those of depth 1 may
        be any.
      depth: s.
    """

    bases: jax.Array
    depth: int = dataclasses.field(metadata={"static": True})

    def positions(self, batch: int) -> jax.Array:
        """int32 ``[B, m]``."""
        return jnp.broadcast_to((self.bases + self.depth)[None], (batch, self.bases.shape[0]))

    def write(self, kv: tuple[LayerKV, ...], k, v) -> tuple[LayerKV, ...]:
        """Append keys and values ``[B, m, G, H]`` of this depth."""
        assert len(kv) == self.depth, (len(kv), self.depth)
        return (*kv, LayerKV(jnp.moveaxis(k, 2, 0), jnp.moveaxis(v, 2, 0)))  # [G, B, m, H]

    def attend(self, q, kv: tuple[LayerKV, ...], window: int | None) -> jax.Array:
        """Softmax attention in fp32 of q ``[B, m, N, H]`` over the text and the slot's own branch: ``[B, m, N, H]``."""
        m, N, H = q.shape[1:]
        text, branch = kv[0], kv[1:]
        if self.depth and window is not None:  # what is further back than W - 1 slots is out of sight
            branch = branch[-window:]
        n = text.k.shape[2]
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

        def product(equation, x, y):
            return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)

        def per_query_head(x, count):  # [G, B, .., H] -> [N, B, count, H]: without groups, no product is transposed
            return jnp.repeat(x[:, :, :count], N // x.shape[0], axis=0)

        q = jnp.moveaxis(q, 2, 0)
        scores = product("nbmh,nbsh->nbms", q, per_query_head(text.k, n)) * H**-0.5
        scores = jnp.where(self._text_mask(n, window)[None, None], scores, -jnp.inf)
        own = [product("nbmh,nbmh->nbm", q, per_query_head(layer.k, m)) * H**-0.5 for layer in branch]
        # One softmax over both, without joining them: the text's scores are large, a branch's are few.
        peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own, scores.max(axis=-1)))
        weights, own = jnp.exp(scores - peak[..., None]), [jnp.exp(score - peak) for score in own]
        attended = product("nbms,nbsh->nbmh", weights.astype(q.dtype), per_query_head(text.v, n))
        for weight, layer in zip(own, branch, strict=True):
            attended += weight[..., None] * per_query_head(layer.v, m).astype(jnp.float32)
        attended /= sum(own, weights.sum(axis=-1))[..., None]
        return jnp.moveaxis(attended.astype(q.dtype), 0, 2)

    def _text_mask(self, n: int, window: int | None) -> jax.Array:
        """bool ``[m, n]``: text slots up to the base, as far back as the window reaches from the slot itself."""
        slots = jnp.arange(n, dtype=jnp.int32)
        seen = slots[None] <= self.bases[:, None]
        return seen & causal_mask(self.positions(1), slots, window)[0]
