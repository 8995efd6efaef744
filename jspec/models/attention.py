"""Grouped-query attention (Ainslie et al., 2023) of a decoder layer, with the choices of ``ModelConfig``."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.config.decoder_params import values_apart
from jspec.config.sharding import axis_of
from jspec.models.layers import Norm, linear_maps, query_scale_at, rotation_at
from jspec.pallas.attention.reference import apply_rope
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.norm.qk_norm import qk_norm


class Attention(nnx.Module):
    """Grouped-query attention. The weights of queries, keys and values are stacked in one ``[(N + 2G) H, in_features]``.

    ``in_features`` is the width of the input. None means D, the width of the model. With ``shards``, config and heads
    are those of one shard. A layer whose keys are its values too has ``[(N + G) H, in_features]``, and one that reads the
    cache of another ``[N H, in_features]`` (``LayerConfig``). With gates (``ModelConfig.attention_gate``), those of N heads
    stand behind all others.

    Attributes:
      sinks: ``[N]``, the sink of each attention head, one more score in its softmaxes (``AttentionSpec``), or None.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        in_features: int | None = None,
        *,
        shards: Shards | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        own, N, D = config.layer(layer), config.num_heads, config.hidden_size
        G, H = own.num_kv_heads, own.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim, self.projections = N, G, H, own.projections
        self.rope, self.window = config.rope_of(layer), config.windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        linear = linear_maps(config, f"layers.{layer}.attention.", dtype=dtype, rngs=rngs)
        self.gated = config.attention_gate
        heads = (2 if self.gated else 1) * N + own.projections * G
        apart = values_apart(config, layer)
        self.qkv = linear("qkv", in_features or D, (heads - apart * G) * H, bias=config.qkv_bias)
        self.values = linear("values", in_features or D, G * H, bias=config.qkv_bias) if apart else None
        reduced = {"reduce_axis": axis_of(shards), "allow_partial_sums": True}
        self.out = linear("out", N * H, D, bias=config.output_bias, **reduced)
        self.norm_projection, self.norm_after_rope = config.qk_norm_over == "projection", config.qk_norm_after_rope
        sizes = (N * H, G * H) if self.norm_projection else (H, H)
        reduce_axis = axis_of(shards) if self.norm_projection else None
        make = functools.partial(Norm, eps=config.rms_norm_eps, kind=config.norm, reduce_axis=reduce_axis, dtype=dtype)
        self.q_norm = make(sizes[0]) if config.qk_norm else None
        self.k_norm = make(sizes[1]) if config.qk_norm and own.projections else None
        self.value_norm = config.value_norm and own.projections > 0
        self.sinks = nnx.Param(jnp.zeros(N, dtype)) if config.attention_sinks else None

    def __call__(self, x, positions, kv, view):
        """``[B, T, in_features] -> [B, T, D]``, of those tokens alone that ``view`` has attend, and ``kv`` with new
        ones. A layer that reads the cache of another leaves ``kv``, which is that layer's, as it is.

        The first may be ``PartialSums``."""
        qkv, gate, rotation = self._projected(x, positions)
        sinks = None if self.sinks is None else self.sinks[...]
        spec = AttentionSpec(self.window, self.scale, self.softcap, sinks)
        if self.projections:
            attended, kv = view.extend(qkv, rotation, kv, self.num_kv_heads, spec)
        else:
            attended = view.attend_cached(qkv, rotation, kv, spec)
        if gate is not None:
            attended = attended * jax.nn.sigmoid(gate[:, -attended.shape[1] :])
        return self.out(attended.reshape(x.shape[0], -1, self.num_heads * self.head_dim)), kv

    def write_kv(self, x, positions, kv, view):
        """``kv`` with keys and values of tokens ``x [B, T, in_features]``, which do not attend."""
        qkv, _, rotation = self._projected(x, positions)
        return view.rope_and_write_kv(qkv, rotation, kv, self.num_kv_heads)[1]

    def _projected(self, x, positions):
        """Queries, keys and values ``[B, T, N + 2G, H]`` after their norms, of a layer that reads the cache of another
        queries ``[B, T, N, H]`` alone; the gates ``[B, T, N, H]`` before their sigmoid, or None; and the rotation that
        queries and keys have yet to get, or None."""
        N, G, H, gate = self.num_heads, self.num_kv_heads, self.head_dim, None
        rotation, turned = rotation_at(positions, self.rope, H), N + G if self.projections else N
        qkv = self.qkv(x).reshape(*x.shape[:2], -1, H)
        if self.values is not None:
            values = self.values(x).reshape(*x.shape[:2], -1, H)
            qkv = jnp.concatenate([qkv[:, :, : N + G], values, qkv[:, :, N + G :]], axis=2)
        if self.gated:
            qkv, gate = jnp.split(qkv, [qkv.shape[2] - N], axis=2)
        if self.projections == 1:
            qkv = jnp.concatenate([qkv, qkv[:, :, N:]], axis=2)
        if self.norm_after_rope:
            qkv, rotation = _of_heads(qkv, 0, turned, lambda x: apply_rope(x, rotation)), None
        qkv = self._normed(qkv)
        if self.rope is not None and self.rope.query_growth:  # a rotation leaves lengths alone, so it may come later
            scale = query_scale_at(positions, self.rope)[:, :, None, None]
            qkv = _of_heads(qkv, 0, N, lambda x: (x.astype(jnp.float32) * scale).astype(x.dtype))
        return qkv, gate, rotation

    def _normed(self, qkv):
        """The same with norms of queries and keys, over each head or over all heads of a token, and of values."""
        N, G, q_norm, k_norm = self.num_heads, self.num_kv_heads, self.q_norm, self.k_norm
        if q_norm is None:
            return qkv
        if self.norm_projection:
            qkv = _of_heads(qkv, 0, N, lambda x: _over_all_heads(q_norm, x))
            return qkv if k_norm is None else _of_heads(qkv, N, N + G, lambda x: _over_all_heads(k_norm, x))
        if k_norm is None:
            k_norm, G = q_norm, 0
        norms, plain = (q_norm, k_norm), (jnp.ones(self.head_dim, qkv.dtype),) * self.value_norm
        biases = tuple(None if norm.bias is None else norm.bias[...] for norm in norms)
        weights = *(norm.weight[...] for norm in norms), *plain
        return qk_norm(qkv, weights, (*biases, *(None for _ in plain)), (N, G), q_norm.eps, q_norm.kind)


def _over_all_heads(norm: Norm, x):
    """Heads ``[B, T, heads, H]`` after a norm over all numbers of a token."""
    return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def _of_heads(x, start: int, stop: int, function):
    """Heads ``[B, T, heads, H]`` with ``function`` of those from ``start`` up to ``stop`` in their place."""
    parts = x[:, :, :start], function(x[:, :, start:stop]), x[:, :, stop:]
    return jnp.concatenate([part for part in parts if part.shape[2]], axis=2)
