"""Multi-head latent attention (DeepSeek-V2, 2024), over latents or over up-projected keys and values of every head.

The key of head n at a token is ``[keys[n] @ latent | rotated key]``, its value ``values[n] @ latent``. Its score with a
query ``[q | rotated query]`` is therefore ``(q @ keys[n]) @ latent + rotated query @ rotated key``. With a cache, the
absorbed query ``q @ keys[n]`` is computed once, and all heads attend to the same latents as to keys and values of a
single KV head; the weighted sum of latents then becomes one of values. Without a cache, and in prefill on some GPUs,
keys and values of all heads are computed, because there are half as many products for each pair of a query and a key."""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.config.sharding import axis_of
from jspec.models.layers import Norm, linear_maps, rotation_at
from jspec.pallas.attention.reference import apply_rope
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.mla.absorb_queries import absorb_queries
from jspec.pallas.mla.norm_rope_write_kv import norm_rope_latents
from jspec.pallas.mla.project_values import project_values
from jspec.pallas.weights.head_maps import HeadMaps


class LatentAttention(nnx.Module):
    """Multi-head latent attention; see ``jspec.config.Latent`` for the letters.

    Attributes:
      compress: the linear maps to the compressed query ``[Cq, D]``, or to the queries themselves ``[N H, D]``, and to
        the latent and the key that is rotated ``[Ck + Hr, D]``, one after the other.
      query_norm, queries: the norm of the compressed query, and its map ``[N H, Cq]`` to queries; or None.
      latent_norm: the norm of latents.
      keys: ``[N Hn, Ck]``, the up-projection to the unrotated parts of all keys.
      values: ``[N Hv, Ck]``, the up-projection to all values.
      out: ``[D, N Hv]``.
    """

    def __init__(self, config: ModelConfig, layer: int, *, shards: Shards | None = None, dtype, rngs: nnx.Rngs):
        latent = config.latent
        assert latent is not None
        N, H, D, Cq = config.num_heads, config.head_dim, config.hidden_size, latent.query_rank
        self.num_heads, self.head_dim, self.latent, self.rope = N, H, latent, config.rope
        self.scale = H**-0.5 if config.attention_scale is None else config.attention_scale
        prefix = f"layers.{layer}.attention."
        linear = linear_maps(config, prefix, dtype=dtype, rngs=rngs)
        self.compress = linear("compress", D, (Cq or N * H) + latent.cached, bias=config.qkv_bias)
        self.query_norm = None if Cq is None else Norm(Cq, latent.norm_eps, dtype=dtype)
        self.queries = None if Cq is None else linear("queries", Cq, N * H)
        self.latent_norm = Norm(latent.rank, latent.norm_eps, dtype=dtype)
        self.keys = linear("keys", latent.rank, N * (H - latent.rotated))
        self.values = linear("values", latent.rank, N * latent.value_dim)
        reduced = {"reduce_axis": axis_of(shards), "allow_partial_sums": True}
        self.out = linear("out", N * latent.value_dim, D, bias=config.output_bias, **reduced)

    def __call__(self, x, positions, kv, view):
        rotation = rotation_at(positions, self.rope, self.latent.rotated)
        attend = self._from_latents if view.caches_latents else self._from_heads
        attended, kv = attend(self.compress(x), rotation, kv, view)
        return self.out(attended.reshape(*x.shape[:2], -1)), kv

    def _from_latents(self, compressed, rotation, kv, view):
        """Attention ``[B, T, N, Hv]`` over the latents that ``view`` caches, and ``kv`` with the new ones."""
        q, kv = view.write_latent_kv(compressed, *self._norms, rotation, kv)
        q = self._queries(q)
        maps = HeadMaps(*(linear.stored.split(self.num_heads) for linear in (self.keys, self.values)))
        if view.up_projects(q, kv, maps):
            return view.attend_up_projected(self._apply_rope(q, rotation), kv, maps, self.scale), kv
        q = absorb_queries(q, maps.keys, rotation)
        attended = view.attend_latents(q, kv, self.latent.rank, self.scale)
        return project_values(attended, maps.values), kv

    def _from_heads(self, compressed, rotation, kv, view):
        """The same over keys and values of all heads."""
        q, latents = norm_rope_latents(compressed, *self._norms, rotation)
        latents, shared = jnp.split(view.round_latents(latents, kv), [self.latent.rank], axis=-1)
        q, key = self._queries(q), shared[:, :, None]
        B, T, N, _ = q.shape
        k = self.keys(latents).reshape(B, T, N, -1)
        k = jnp.concatenate([k, jnp.broadcast_to(key, (B, T, N, key.shape[-1]))], axis=-1)
        kv = view.write(kv, k, self.values(latents).reshape(B, T, N, -1))
        return view.attend(self._apply_rope(q, rotation), kv, AttentionSpec(scale=self.scale)), kv

    @property
    def _norms(self) -> tuple[jax.Array | None, jax.Array, float]:
        """The weights of the norms of compressed queries and of latents, and their epsilon."""
        query = None if self.query_norm is None else self.query_norm.weight[...]
        return query, self.latent_norm.weight[...], self.latent_norm.eps

    def _queries(self, vectors):
        """The queries ``[B, T, N, Hn + Hr]``, of which the last Hr numbers are to be rotated."""
        q = vectors if self.queries is None else self.queries(vectors)
        return q.reshape(*vectors.shape[:2], self.num_heads, self.head_dim)

    def _apply_rope(self, q, rotation):
        """The queries with their last Hr numbers rotated."""
        q, rotary = jnp.split(q, [self.head_dim - self.latent.rotated], axis=-1)
        return jnp.concatenate([q, apply_rope(rotary, rotation)], axis=-1)
