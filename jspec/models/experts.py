"""A mixture of experts in place of the MLP of a layer."""

import functools

from flax import nnx

from jspec.config import Experts, ModelConfig
from jspec.models.layers import Linear, wide_project
from jspec.pallas.experts import Stacked, experts
from jspec.pallas.routing import choose


class Mixture(nnx.Module):
    """Each token goes through the few experts that the router gives the highest logits. See ``jspec.config.Experts``.

    Attributes:
      router: the linear map ``[X, D]``, which is not quantised; logits are computed and compared in fp32.
      gate_up: the experts' maps ``[2Fe, D]`` one after another, ``[X 2Fe, D]``; gate before up.
      down: the experts' maps ``[D, Fe]`` one after another, ``[X D, Fe]``.
    """

    def __init__(self, config: ModelConfig, *, experts: Experts, dtype, rngs: nnx.Rngs):
        D, X, Fe = config.hidden_size, experts.count, experts.width
        linear = functools.partial(Linear, dtype=dtype, rngs=rngs)
        self.experts = experts
        self.router = linear(D, X)
        self.gate_up = linear(D, X * 2 * Fe, quantization=config.quantization)
        self.down = linear(Fe, X * D, quantization=config.quantization)

    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        logits = wide_project(tokens, self.router.weight[...])
        chosen = choose(logits, self.experts.chosen, self.experts.renormalise)
        return experts(tokens, chosen, self._stacked(self.gate_up), self._stacked(self.down)).reshape(x.shape)

    def _stacked(self, linear: Linear) -> Stacked:
        X, (rows, inputs) = self.experts.count, linear.weight.shape
        scale = None if linear.scale is None else linear.scale[...].reshape(X, rows // X)
        return Stacked(linear.weight[...].reshape(X, rows // X, inputs), scale)
