"""A decoder layer, attention and MLP around one residual stream, with the choices of ``ModelConfig``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.config.sharding import axis_of
from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS, Linear, Norm, query_scale_at, rotation_at, times
from jspec.models.mla import LatentAttention
from jspec.models.moe import Mixture
from jspec.pallas.attention.reference import apply_rope
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.matmul.quantize_activations import activate_and_quantize
from jspec.pallas.norm.qk_norm import qk_norm


class Attention(nnx.Module):
    """Grouped-query attention. The weights of queries, keys and values are stacked in one ``[(N + 2G) H, in_features]``.

    ``in_features`` is the width of the input. None means D, the width of the model. With ``shards``, config and heads
    are those of one shard.

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
        N, G, H, D = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = N, G, H
        self.rope, self.window = config.rope_of(layer), config.windows[layer]
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.qkv = linear(in_features or D, (N + 2 * G) * H, bias=config.qkv_bias)
        self.out = linear(N * H, D, bias=config.output_bias, reduce_axis=axis_of(shards), allow_partial_sums=True)
        self.norm_projection = config.qk_norm_over == "projection"
        self.norm_after_rope = config.qk_norm_after_rope
        sizes = (N * H, G * H) if self.norm_projection else (H, H)
        reduce_axis = axis_of(shards) if self.norm_projection else None
        make = functools.partial(Norm, eps=config.rms_norm_eps, kind=config.norm, reduce_axis=reduce_axis, dtype=dtype)
        self.q_norm, self.k_norm = (make(size) for size in sizes) if config.qk_norm else (None, None)
        self.sinks = nnx.Param(jnp.zeros(N, dtype)) if config.attention_sinks else None

    def __call__(self, x, positions, kv, view):
        """``[B, T, in_features] -> [B, T, D]``, of those tokens alone that ``view`` has attend, and ``kv`` with new
        ones.

        The first may be ``PartialSums``."""
        qkv, rotation = self._queries_keys_values(x, positions)
        sinks = None if self.sinks is None else self.sinks[...]
        spec = AttentionSpec(self.window, self.scale, self.softcap, sinks)
        attended, kv = view.extend(qkv, rotation, kv, self.num_kv_heads, spec)
        return self.out(attended.reshape(x.shape[0], -1, self.num_heads * self.head_dim)), kv

    def write_kv(self, x, positions, kv, view):
        """``kv`` with keys and values of tokens ``x [B, T, in_features]``, which do not attend."""
        return view.rope_and_write_kv(*self._queries_keys_values(x, positions), kv, self.num_kv_heads)[1]

    def _queries_keys_values(self, x, positions):
        """``[B, T, N + 2G, H]``, queries and keys normed, and the rotation that they have yet to get, or None."""
        B, T, _ = x.shape
        N, G, rotation = self.num_heads, self.num_kv_heads, rotation_at(positions, self.rope, self.head_dim)
        qkv = self.qkv(x).reshape(B, T, N + 2 * G, self.head_dim)
        if self.norm_after_rope:
            rotated = apply_rope(qkv[:, :, : N + G], rotation)
            qkv, rotation = jnp.concatenate([rotated, qkv[:, :, N + G :]], axis=2), None
        if self.q_norm is not None and self.k_norm is not None:
            qkv = self._normed(qkv, self.q_norm, self.k_norm)
        if self.rope is not None and self.rope.query_growth:  # a rotation leaves lengths alone, so it may come later
            scale = query_scale_at(positions, self.rope)[:, :, None, None]
            queries = (qkv[:, :, :N].astype(jnp.float32) * scale).astype(qkv.dtype)
            qkv = jnp.concatenate([queries, qkv[:, :, N:]], axis=2)
        return qkv, rotation

    def _normed(self, qkv, q_norm: Norm, k_norm: Norm):
        """``[B, T, N + 2G, H]`` with norms of queries and keys, over each head or over all heads of a token."""
        N, G = self.num_heads, self.num_kv_heads
        if self.norm_projection:
            q, k, v = jnp.split(qkv, [N, N + G], axis=2)
            q, k = (norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape) for norm, x in ((q_norm, q), (k_norm, k)))
            return jnp.concatenate([q, k, v], axis=2)
        weights = q_norm.weight[...], k_norm.weight[...]
        biases = tuple(None if norm.bias is None else norm.bias[...] for norm in (q_norm, k_norm))
        return qk_norm(qkv, weights, biases, (N, G), q_norm.eps, q_norm.kind)


class MLP(nnx.Module):
    """``down(activation(gate x) * up x)`` (Shazeer, 2020), or ``down(activation(up x))`` without a gate.

    ``[B, T, D] -> [B, T, D]``, or ``PartialSums`` of that. The weights of gate and up are stacked in one ``[2F, D]``.
    With ``shards``, F is that of one shard."""

    def __init__(self, config: ModelConfig, *, shards: Shards | None = None, dtype, rngs: nnx.Rngs):
        D, F = config.hidden_size, config.intermediate_size
        linear = functools.partial(
            Linear, bias=config.mlp_bias, quantization=config.quantization, dtype=dtype, rngs=rngs
        )
        self.activation = config.activation
        self.gate_up: Any = linear(D, 2 * F) if config.gated_mlp else None
        self.up: Any = None if config.gated_mlp else linear(D, F)
        self.down = linear(F, D, reduce_axis=axis_of(shards), allow_partial_sums=True)

    def __call__(self, x):
        activate = ACTIVATE[self.activation]
        if self.gate_up is None:
            return self.down(activate(self.up(x)))
        if self.down.quantize_inputs and self.activation in ACTIVATED_IN_KERNELS:
            return self.down(activate_and_quantize(self.gate_up(x), activate))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activate(gate) * up)


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream. ``config.norm_placement`` says where norms are.

    The layer does not apply its own ``attention_norm``. The layer before it does, by way of ``after``, because one
    kernel then adds to the residual stream and norms the sum. ``norm=False`` makes a layer without ``attention_norm``.
    With ``shards``, ``config`` and the layer are those of one shard.

    Attributes:
      attention_norm, mlp_norm: the norms of the inputs of attention and MLP. None for placements that have none.
      attention_out_norm, mlp_out_norm: the norms of their outputs, or with ``norm_sums`` of the residual stream after
        they were added. None for placements that have none.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        norm: bool = True,
        *,
        shards: Shards | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        def normed(name: str) -> Norm | None:
            present = name in config.layer_norms
            return Norm(config.hidden_size, config.rms_norm_eps, config.norm, dtype=dtype) if present else None

        self.norm_sums, self.multiplier = config.norm_placement == "after_sum", config.residual_multiplier
        self.attention_norm = normed("attention_norm") if norm else None
        attention = Attention if config.latent is None else LatentAttention
        self.attention: Any = attention(config, layer, shards=shards, dtype=dtype, rngs=rngs)
        self.attention_out_norm, self.mlp_norm = normed("attention_out_norm"), normed("mlp_norm")
        experts = config.experts if config.has_experts(layer) else None
        make = MLP if experts is None else functools.partial(Mixture, experts=experts)
        self.mlp: Any = make(config, shards=shards, dtype=dtype, rngs=rngs)
        self.mlp_out_norm = normed("mlp_out_norm")

    def __call__(self, x, normed, positions, kv, view, after: Norm | None):
        """Apply the layer.

        Args:
          x: the residual stream ``[B, T, D]``.
          normed: the same after this layer's ``attention_norm``, which the attention reads.
          positions: int32 ``[B, T]``.
          kv: the keys and values of this layer that ``view`` reads and writes.
          view: as for ``Decoder``.
          after: the next norm of the residual stream, such as that of the next layer, or None.

        Returns:
          the new residual stream ``[B, T, D]``, the same after ``after`` (or without a norm if that is None), and ``kv``
          with the new keys and values.
        """
        attended, kv = self.attention(normed, positions, kv, view)
        x, normed = self._add(x, attended, self.attention_out_norm, self.mlp_norm)
        return *self._add(x, self.mlp(normed), self.mlp_out_norm, after), kv

    def _add(self, x, y, out_norm: Norm | None, after: Norm | None):
        """The residual stream with y added, and the same after ``after``; norms of y or of the sum included. y may be
        ``PartialSums``, which are added up in the launch that adds them where no other step is before it."""
        if self.multiplier != 1:
            y = times(reduce_partial_sums(y, x.dtype), self.multiplier)
        if out_norm is None:
            return add(x, y, after)
        if not self.norm_sums:
            return add(x, out_norm(reduce_partial_sums(y, x.dtype)), after)
        _, x = out_norm.after_adding(x, y)
        return x, x if after is None else after(x)


def apply_layer(layer: Layer, x, normed, positions, kv, view, after: Norm | None):
    """``layer(x, normed, positions, kv, view, after)``, as a call of a function that is traced and lowered once for all
    layers that differ in their weights alone. XLA compiles it as if the layer stood there."""
    graph, state = nnx.split((layer, after))
    return _merged_layer(graph, state, x, normed, positions, kv, view)


@functools.partial(jax.jit, static_argnums=0)
def _merged_layer(graph, state, x, normed, positions, kv, view):
    layer, after = nnx.merge(graph, state)
    return layer(x, normed, positions, kv, view, after)


def add(x, y, after: Norm | None):
    """The residual stream ``x + y``, and the same after ``after``, its next norm, if there is one. y may be
    ``PartialSums``."""
    if after is not None:
        return after.after_adding(x, y)
    total = x + reduce_partial_sums(y, x.dtype)
    return total, total
