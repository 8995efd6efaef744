"""A mixture of experts in place of the MLP of a layer."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import Experts, ModelConfig, Shards
from jspec.config.param_specs import in_eight_bits
from jspec.config.sharding import axis_of
from jspec.models.layers import Linear, added_up, wide_project
from jspec.pallas.moe.grouped_mlp import experts
from jspec.pallas.moe.router import route
from jspec.pallas.moe.router_reference import Routed, Routing
from jspec.pallas.moe.tiles import Stacked
from jspec.pallas.norm.rms_norm import whole
from jspec.quantization import mxfp4


class FourBitWeight(nnx.Module):
    """The weight of a linear map in MXFP4 (``jspec.quantization.mxfp4``), which only a mixture of experts multiplies
    with.

    Attributes:
      weight: uint8 ``[pairs, out, 32]``, the codes of two input features in each byte.
      scale: uint32 ``[pairs, out]``, the factors that groups of 32 input features share, two in each number.
      bias: ``[out]`` of ``dtype``, or None.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype, rngs: nnx.Rngs):
        pairs = mxfp4.num_pairs(in_features), out_features
        self.weight = nnx.Param(jax.random.bits(rngs.params(), (*pairs, mxfp4.GROUP), jnp.uint8))
        self.scale = nnx.Param(jnp.full(pairs, mxfp4.factors_of_random_codes(in_features), jnp.uint32))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None


class Mixture(nnx.Module):
    """Each token goes through the few experts that the router gives the highest logits. See ``jspec.config.Experts``.

    Attributes:
      router: the linear map ``[count, D]``, which is not quantised; logits are computed and compared in fp32.
      gate_up: the experts' maps ``[2Fe, D]`` one after another, ``[X 2Fe, D]``; gate before up. X counts all experts,
        and the shared ones are the last.
      down: the experts' maps ``[D, Fe]`` one after another, ``[X D, Fe]``.
      correction: float32 ``[count]``, what is added to the probabilities of experts to choose among them, or None.

    Router and experts have biases if the config says so. A call gives what the Y experts of each token make, ``[B, T, Y,
    D]`` for ``[B, T, D]``: the sum over Y is left to the norm that follows (``jspec.pallas.norm.rms_norm``). With
    ``shards``, which have a part of each expert or some of the experts, it gives the sum over Y and over the shards,
    ``[B, T, D]``.
    """

    def __init__(self, config: ModelConfig, *, experts: Experts, shards: Shards | None = None, dtype, rngs: nnx.Rngs):
        D, X, Fe = config.hidden_size, experts.all, experts.width
        if shards is not None and shards.splits_experts(experts):
            X //= shards.count
        bias, make = experts.biases, functools.partial(Linear, quantization=in_eight_bits(config.quantization))
        linear = functools.partial(FourBitWeight if experts.stored else make, bias=bias, dtype=dtype, rngs=rngs)
        self.experts, self.over, self.held = experts, axis_of(shards), X
        self.routing = Routing(
            experts.chosen,
            experts.renormalise,
            experts.scores,
            experts.groups,
            experts.chosen_groups,
            experts.scale,
            experts.shared,
        )
        self.router = Linear(D, experts.count, bias=bias, dtype=dtype, rngs=rngs)
        self.correction = nnx.Param(jnp.zeros(experts.count, jnp.float32)) if experts.corrected else None
        self.gate_up, self.down = linear(D, X * 2 * Fe), linear(Fe, X * D)

    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        added = self.router.bias if self.correction is None else self.correction
        bias = None if added is None else added[...]
        logits = wide_project(tokens, self.router.weight[...])
        routed, mine = route(logits, bias, self.routing), None
        if self.over is not None and self.held < self.experts.all:
            routed, mine = self._held_here(routed, jax.lax.axis_index(self.over) * self.held)
        made = experts(tokens, routed, self._stacked(self.gate_up), self._stacked(self.down), self.experts.clamp)
        if mine is not None:  # the others were not computed, and may be anything
            made = jnp.where(mine[:, :, None], made, jnp.zeros((), made.dtype))
        made = made.reshape(*x.shape[:-1], *made.shape[1:])
        return made if self.over is None else added_up(whole(made, x), self.over)

    def _held_here(self, routed: Routed, first) -> tuple[Routed, jax.Array]:
        """The routing to the experts ``first`` to ``first + held - 1``, counted from 0, and which choices of each token are
        among them, bool ``[M, Y]``. The assignments to others come behind those to these, and count to no expert."""
        ids = jnp.arange(routed.sizes.shape[0], dtype=jnp.int32)
        before = jnp.sum(jnp.where(ids < first, routed.sizes, 0))
        sizes = jax.lax.dynamic_slice_in_dim(routed.sizes, first, self.held)
        expert = routed.expert - first
        mine = (expert >= 0) & (expert < self.held)
        own = Routed(jnp.clip(expert, 0, self.held - 1), routed.weight, sizes, jnp.roll(routed.order, -before))
        return own, mine

    def _stacked(self, linear: Linear | FourBitWeight) -> Stacked:
        X, scale, bias = self.held, linear.scale, linear.bias
        outputs = 0 if isinstance(linear, Linear) else 1

        def by_expert(array, axis=outputs):
            before, width, after = array.shape[:axis], array.shape[axis], array.shape[axis + 1 :]
            return array.reshape(*before, X, width // X, *after)

        return Stacked(
            by_expert(linear.weight[...]),
            None if scale is None else by_expert(scale[...]),
            None if bias is None else by_expert(bias[...], 0),
        )
