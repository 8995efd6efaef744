"""Gated delta nets (Yang et al., 2024) as layers of a decoder, in the place of attention; ``jspec.pallas.delta_net`` says
what they compute."""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig, Shards
from jspec.config.sharding import axis_of
from jspec.models.layers import Linear, Norm, linear_maps
from jspec.pallas.delta_net.projections import DeltaHeads, decay_and_beta
from jspec.pallas.delta_net.recur import DeltaInputs
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.norm.gated_norm import gated_norm


class GatedDeltaNet(nnx.Module):
    """A gated delta net. With ``shards``, config and heads are those of one shard.

    Attributes:
      qkvz: the linear maps to queries, keys, values and the gates of outputs, one after another,
        ``[2 Nk Dk + 2 Nv Dv, D]``.
      ba: the linear maps to betas and to decays, ``[2 Nv, D]``.
      convolution: ``[2 Nk Dk + Nv Dv, 1, W]``, the weights of the convolution as checkpoints have them.
      decay: float32 ``[Nv]``, the logarithm of the rate of decay (``A_log``).
      bias: float32 ``[Nv]``, what is added to decays before their softplus (``dt_bias``).
      norm: the norm of each value head's outputs, ``[Dv]``.
      out: ``[D, Nv Dv]``.
    """

    def __init__(self, config: ModelConfig, layer: int, *, shards: Shards | None = None, dtype, rngs: nnx.Rngs):
        nets, D = config.delta_nets, config.hidden_size
        assert nets is not None
        self.heads = DeltaHeads(nets.key_heads, nets.value_heads, nets.key_size, nets.value_size)
        values = nets.value_heads * nets.value_size
        linear = linear_maps(config, f"layers.{layer}.delta_net.", dtype=dtype, rngs=rngs)
        self.qkvz = linear("qkvz", D, nets.channels + values)
        self.ba = Linear(D, 2 * nets.value_heads, allow_partial_sums=True, dtype=dtype, rngs=rngs)
        taps = jax.random.normal(rngs.params(), (nets.channels, 1, nets.taps), dtype)
        self.convolution = nnx.Param(taps * nets.taps**-0.5)
        self.decay = nnx.Param(jnp.zeros(nets.value_heads, jnp.float32))
        self.bias = nnx.Param(jnp.ones(nets.value_heads, jnp.float32))
        self.norm = Norm(nets.value_size, config.rms_norm_eps, dtype=dtype)
        self.out = linear("out", values, D, reduce_axis=axis_of(shards), allow_partial_sums=True)

    def __call__(self, x, positions, state, view):
        """``[B, T, D] -> [B, T, D]``, and the layer's state after the tokens; the first may be ``PartialSums``.

        Positions say nothing to this layer: which tokens come before is in its state, and ``view`` knows the rows."""
        del positions
        B, T, _ = x.shape
        qkvz = self.qkvz(x)
        b, a = jnp.split(reduce_partial_sums(self.ba(x), x.dtype), 2, axis=-1)
        g, beta = decay_and_beta(a, b, self.decay[...], self.bias[...])
        inputs = DeltaInputs(qkvz, g, beta, self.convolution[...][:, 0].T, self.heads)
        o, state = view.recur(inputs, state)
        gated = gated_norm(o, qkvz, self.norm.weight[...], self.norm.eps)
        return self.out(gated.reshape(B, T, -1)), state
