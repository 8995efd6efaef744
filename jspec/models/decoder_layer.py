"""A decoder layer, attention or what stands in its place, and MLP, around one residual stream, with the choices of
``ModelConfig``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.config.sharding import axis_of
from jspec.models.attention import Attention
from jspec.models.delta_net import GatedDeltaNet
from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS, Norm, linear_maps, times
from jspec.models.mla import LatentAttention
from jspec.models.moe import Mixture, MixtureBesideMLP
from jspec.models.per_layer import OwnInputs
from jspec.pallas import sums
from jspec.pallas.collectives.peers import Peers, reduce_with
from jspec.pallas.dispatch import wants_one_order
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.matmul.quantize_activations import activate_and_quantize


class MLP(nnx.Module):
    """``down(activation(gate x) * up x)`` (Shazeer, 2020), or ``down(activation(up x))`` without a gate.

    ``[B, T, D] -> [B, T, D]``, or ``PartialSums`` of that. The weights of gate and up are stacked in one ``[2F, D]``.
    With ``shards``, F is that of one shard. With ``shared`` it is the MLP of shared experts, whose width is Fs."""

    def __init__(
        self, config: ModelConfig, layer: int = 0, *, shared=False, shards: Shards | None = None, dtype, rngs: nnx.Rngs
    ):
        D, F, prefix = config.hidden_size, config.layer(layer).intermediate_size, f"layers.{layer}.mlp."
        if shared and config.experts is not None:
            F, prefix = config.experts.shared_width, f"{prefix}shared."
        linear = linear_maps(config, prefix, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.activation = config.activation
        self.gate_up: Any = linear("gate_up", D, 2 * F) if config.gated_mlp else None
        self.up: Any = None if config.gated_mlp else linear("up", D, F)
        self.down = linear("down", F, D, reduce_axis=axis_of(shards), allow_partial_sums=True)

    def __call__(self, x):
        activate = ACTIVATE[self.activation]
        if self.gate_up is None:
            return self.down(activate(self.up(x)))
        kind = self.down.quantize_inputs
        if kind is not None and self.activation in ACTIVATED_IN_KERNELS:
            return self.down(activate_and_quantize(self.gate_up(x), activate, kind, self.down.scale_axis))
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(activate(gate) * up)


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream. ``config.norm_placement`` says where norms are.

    The layer does not apply its own ``attention_norm``. The layer before it does, by way of ``after``, because one
    kernel then adds to the residual stream and norms the sum. ``norm=False`` makes a layer without ``attention_norm``.
    With ``shards``, ``config`` and the layer are those of one shard.

    Attributes:
      attention, delta_net: what mixes tokens: attention, or a gated delta net in its place; the other one is None.
      attention_norm, mlp_norm: the norms of the inputs of attention and MLP. None for placements that have none.
      attention_out_norm, mlp_out_norm: the norms of their outputs, or with ``norm_sums`` of the residual stream after
        they were added. None for placements that have none.
      beside: a mixture of experts beside the MLP; None without one.
      inputs: what the layer makes of per-layer inputs; None without them.
      scalar: ``[1]``, what the residual stream is multiplied by at the end; None for a layer that does not.
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
        how = {"shards": shards, "dtype": dtype, "rngs": rngs}
        recurrent = config.has_delta_net(layer)
        self.attention: Any = None if recurrent else attention(config, layer, **how)
        self.delta_net = GatedDeltaNet(config, layer, **how) if recurrent else None
        self.attention_out_norm, self.mlp_norm = normed("attention_out_norm"), normed("mlp_norm")
        experts = config.experts if config.has_experts(layer) else None
        beside = None
        if experts is None or experts.beside_mlp:
            self.mlp: Any = MLP(config, layer, **how)
            beside = None if experts is None else MixtureBesideMLP(config, layer, experts=experts, **how)
        else:
            shared = MLP(config, layer, shared=True, **how) if experts.shared_width else None
            self.mlp = Mixture(config, f"layers.{layer}.mlp.", shared, **how)
        self.beside = beside
        self.mlp_out_norm = normed("mlp_out_norm")
        self.inputs = None if config.per_layer_inputs is None else OwnInputs(config, dtype=dtype, rngs=rngs)
        self.scalar = nnx.Param(jnp.ones(1, dtype)) if config.layer_scalars else None

    def __call__(self, x, normed, positions, kv, view, after: Norm | None, own_inputs=None, peers: Peers | None = None):
        """Apply the layer.

        Args:
          x: the residual stream ``[B, T, D]``.
          normed: the same after this layer's ``attention_norm``, which the attention reads.
          positions: int32 ``[B, T]``.
          kv: the keys and values of this layer that ``view`` reads and writes, or its recurrent state.
          view: as for ``Decoder``.
          after: the next norm of the residual stream, such as that of the next layer, or None.
          own_inputs: ``[B, T, Wl]``, the per-layer inputs of this layer; None without them.
          peers: what adds up over GPUs where the layer is a shard; None for XLA's sums.

        Returns:
          the new residual stream ``[B, T, D]``, the same after ``after`` (or without a norm if that is None), and ``kv``
          with the new keys and values.
        """
        mix = self.attention if self.delta_net is None else self.delta_net
        attended, kv = mix(normed, positions, kv, view)
        add = functools.partial(self._add, peers=peers)
        x, normed = add(x, attended, self.attention_out_norm, self.mlp_norm)
        made = self.mlp(normed)
        made = made if self.beside is None else self.beside(x, made, peers)
        scale = None if self.scalar is None else self.scalar[...]
        if self.inputs is None:
            return *add(x, made, self.mlp_out_norm, after, scale), kv
        x, _ = add(x, made, self.mlp_out_norm, None)
        return *add(x, self.inputs(x, own_inputs), self.inputs.norm, after, scale), kv

    def _add(self, x, y, out_norm: Norm | None, after: Norm | None, scale=None, *, peers: Peers | None):
        """The residual stream with y added, and the same after ``after``; norms of y or of the sum included. y may be
        ``PartialSums``, which are added up in the launch that adds them where no other step is before it. The sum is
        multiplied by ``scale [1]``."""
        if self.multiplier != 1:
            y = times(reduce_with(peers, y, x.dtype), self.multiplier)
        if out_norm is not None and self.norm_sums:
            _, x = out_norm.after_adding(x, y, peers=peers)
            return x, x if after is None else after(x)
        if after is not None:
            return after.after_adding(x, y, out_norm, scale, peers)
        y = reduce_with(peers, y, x.dtype)
        total = sums.add(x, y if out_norm is None else out_norm(y))
        total = total if scale is None else total * scale[0]
        return total, total


def apply_layer(
    layer: Layer, x, normed, positions, kv, view, after: Norm | None, own_inputs=None, peers: Peers | None = None
):
    """``layer(x, normed, positions, kv, view, after, own_inputs, peers)``, as a call of a function that is traced and
    lowered once for all layers that differ in their weights alone. XLA compiles it as if the layer stood there."""
    graph, state = nnx.split((layer, after))
    return _merged_layer(graph, wants_one_order(), state, x, normed, positions, kv, view, own_inputs, peers)


@functools.partial(jax.jit, static_argnums=(0, 1))  # the order of sums chooses kernels
def _merged_layer(graph, ordered: bool, state, x, normed, positions, kv, view, own_inputs, peers):
    del ordered
    layer, after = nnx.merge(graph, state)
    return layer(x, normed, positions, kv, view, after, own_inputs, peers)


def add(x, y, after: Norm | None):
    """The residual stream ``x + y``, and the same after ``after``, its next norm, if there is one. y may be
    ``PartialSums``."""
    if after is not None:
        return after.after_adding(x, y)
    total = sums.add(x, reduce_partial_sums(y, x.dtype))
    return total, total
