"""A mixture of experts in place of the MLP of a layer."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import Experts, ModelConfig, Shards
from jspec.config.param_specs import of_experts
from jspec.config.sharding import axis_of
from jspec.models.layers import Linear, Norm, times
from jspec.pallas.collectives.peers import Peers, reduce_with
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.moe.grouped_mlp import grouped_mlp
from jspec.pallas.moe.router import route
from jspec.pallas.moe.router_logits import router_logits
from jspec.pallas.moe.tiles import ExpertMap
from jspec.pallas.sums import add


class Mixture(nnx.Module):
    """A mixture of experts: each token goes through the few experts to which the router gives the highest logits. See
    ``jspec.config.Experts``.

    Attributes:
      router: the linear map ``[count, D]``, which is not quantised; logits are computed and compared in fp32.
      gate_up: the experts' maps ``[2Fe, D]`` one after another, ``[X 2Fe, D]``; gate before up. X counts all experts,
        and the shared ones are the last.
      down: the experts' maps ``[D, Fe]`` one after another, ``[X D, Fe]``.
      shared: the MLP of all shared experts, whose width or format is another one; None if there is none.
      shared_gate: the linear map ``[1, D]`` whose sigmoid the outputs of shared experts are multiplied by, or None.
      correction: float32 ``[count]``, added to the probabilities of experts to choose among them, or None.

    ``prefix`` is what stands before the names of its maps in the params. Router and experts have biases if the config
    says so. A call gives the outputs of the Y experts of each token as ``PartialSums`` of ``[B, T, D]``, or with ``shared``
    their sum. With ``shards`` they are to be added up over these: each has a part of each expert, or some of the experts.
    """

    def __init__(
        self, config: ModelConfig, prefix: str, shared=None, *, shards: Shards | None = None, dtype, rngs: nnx.Rngs
    ):
        experts = config.experts
        assert experts is not None
        D, X, Fe = config.hidden_size, experts.all, experts.width
        if shards is not None and shards.splits_experts(experts):
            X //= shards.count
        bias = experts.biases
        self.experts, self.reduce_axis, self.num_local_experts = experts, axis_of(shards), X
        self.activation, self.shared = config.activation, shared
        self.router = Linear(D, experts.count, bias=bias, dtype=dtype, rngs=rngs)
        self.correction = nnx.Param(jnp.zeros(experts.count, jnp.float32)) if experts.corrected else None
        self.shared_gate = Linear(D, 1, dtype=dtype, rngs=rngs) if experts.shared_gate else None

        def stacked(name: str, in_features: int, out_features: int) -> Linear:
            kind = "mxfp4_pairs" if experts.stored else of_experts(config.quantization_of(prefix + name))
            return Linear(in_features, out_features, quantization=kind, bias=bias, dtype=dtype, rngs=rngs)

        self.gate_up, self.down = stacked("gate_up", D, X * 2 * Fe), stacked("down", Fe, X * D)

    def __call__(self, x, routed_by=None, expert_scale=None):
        """Arguments: the inputs of the experts ``[B, T, D]``; those of the router, None for the same; and factors of the
        experts' weights ``[count]``, None for ones."""
        tokens = x.reshape(-1, x.shape[-1])
        routed_by = tokens if routed_by is None else routed_by.reshape(tokens.shape)
        added = self.router.bias if self.correction is None else self.correction
        bias = None if added is None else added[...]
        routed, gate = route(routed_by, self.router.weight[...], bias, self.experts), None
        if self.shared_gate is not None:
            gate = jax.nn.sigmoid(router_logits(tokens, self.shared_gate.weight[...]))
        if gate is not None and self.shared is None:
            chosen = jnp.arange(self.experts.per_token, dtype=jnp.int32)[None] < self.experts.chosen
            routed = routed._replace(weight=jnp.where(chosen, routed.weight, gate))
        if expert_scale is not None:
            routed = routed._replace(weight=routed.weight * expert_scale.astype(jnp.float32)[routed.expert])
        first = None
        if self.reduce_axis is not None and self.num_local_experts < self.experts.all:
            first = (jax.lax.axis_index(self.reduce_axis) * self.num_local_experts).reshape(1)
        maps = self._by_expert(self.gate_up), self._by_expert(self.down)
        outputs = grouped_mlp(tokens, routed, *maps, first, clamp=self.experts.clamp, activation=self.activation)
        if self.shared is not None:
            outputs = _with_shared(outputs, self.shared(tokens), gate)
        return PartialSums(outputs.reshape(*x.shape[:-1], *outputs.shape[1:]), reduce_axis=self.reduce_axis)

    def _by_expert(self, linear: Linear) -> ExpertMap:
        X = self.num_local_experts
        return ExpertMap(linear.stored.split(X), None if linear.bias is None else linear.bias[...].reshape(X, -1))


def _with_shared(outputs, shared, gate):
    """The sum of all outputs of experts, ``[M, 1, D]``, in the dtype of ``outputs``; added up in float32, one after another.

    Args:
      outputs: of the chosen experts, ``[M, Y, D]``.
      shared: of the MLP of shared experts, ``[M, D]``, or ``PartialSums`` of that.
      gate: float32 ``[M, 1]``, what these are multiplied by; None for nothing.
    """
    parts = shared.summands if isinstance(shared, PartialSums) else shared[:, None]
    chosen, own = (
        functools.reduce(add, [of[:, i].astype(jnp.float32) for i in range(of.shape[1])]) for of in (outputs, parts)
    )
    return add(chosen, own if gate is None else own * gate).astype(outputs.dtype)[:, None]


class MixtureBesideMLP(nnx.Module):
    """A mixture of experts beside the MLP of a layer (Gemma 4, 2026): ``mlp_norm(mlp(...)) + out_norm(mixture(norm(x)))``.

    Attributes:
      mixture: the experts. Its router reads the residual stream x after ``router_norm``, divided by ``sqrt(D)``.
      mlp_norm, norm, out_norm: over D; of the output of the MLP, of the inputs of the experts, and of their outputs.
      router_norm: over D, which rounds before it multiplies.
      expert_scale: ``[count]``, the factor of each expert's weight.
    """

    def __init__(
        self, config: ModelConfig, layer: int, *, experts: Experts, shards: Shards | None = None, dtype, rngs: nnx.Rngs
    ):
        D, make = config.hidden_size, functools.partial(Norm, eps=config.rms_norm_eps, dtype=dtype)
        prefix = f"layers.{layer}.beside.mixture."
        self.mixture = Mixture(config, prefix, shards=shards, dtype=dtype, rngs=rngs)
        self.mlp_norm, self.norm, self.out_norm = (make(D, kind=config.norm) for _ in range(3))
        self.router_norm = make(D, kind="rms")
        self.expert_scale = nnx.Param(jnp.ones(experts.count, dtype))

    def __call__(self, x, mlp, peers: Peers | None = None):
        """``[B, T, D]``, from the residual stream x before the MLP, and the MLP's output, which may be ``PartialSums``.
        ``peers`` as for ``Layer``."""
        routed_by = times(self.router_norm(x), x.shape[-1] ** -0.5)
        made = self.mixture(self.norm(x), routed_by, self.expert_scale[...])
        mlp, made = (reduce_with(peers, y, x.dtype) for y in (mlp, made))
        return add(self.mlp_norm(mlp), self.out_norm(made))
