"""MLP speculators (Wertheimer et al., 2024): a state of inner width that reads one token a stage; nothing is cached."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.heads import MLPConfig
from jspec.models.layers import Linear, per_feature, project

EPS = 1e-6


class ScaledNorm(nnx.Module):
    """Root-mean-square norm with a weight and a bias."""

    def __init__(self, features: int, *, dtype):
        self.weight = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))

    def __call__(self, x):
        normed = unit_rms(x)
        return normed * per_feature(self.weight[...], x) + per_feature(self.bias[...], x)


class MLPSpeculator(nnx.Module):
    """Stage i: s = gelu(norm_i(proj_i s + ratio emb_i[token])), and the logits of the next token are head_i s.

    The state starts as the target's hidden state (after its final norm) at the newest position whose next token is
    known."""

    def __init__(self, config: MLPConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        V, D, W, n = config.vocab_size, config.hidden_size, config.inner_size, config.num_stages
        sets = 1 if config.tied else n
        widths = [D] + [W] * (min(n - 1, 1) if config.tied else n - 1)
        self.config = config
        init = lambda: nnx.Param(W**-0.5 * jax.random.normal(rngs.params(), (V, W), dtype))  # noqa: E731
        self.embeddings = nnx.List([init() for _ in range(sets)])
        self.projections = nnx.List([Linear(width, W, dtype=dtype, rngs=rngs) for width in widths])
        self.norms = nnx.List([ScaledNorm(W, dtype=dtype) for _ in range(sets)])
        self.heads = nnx.List([Linear(W, V, dtype=dtype, rngs=rngs) for _ in range(sets)])

    def prepare(self):
        """Ready to serve: nothing has to be done before."""
        return self

    def start(self, hidden):
        """The first state ``[..., D]`` of the target's hidden states ``[..., D]``."""
        return unit_rms(hidden) * 0.5**0.5 if self.config.scale_input else hidden

    def stage(self, i: int, state, tokens):
        """Read tokens int32 ``[B, T]`` in stage i: states ``[B, T, D or inner] -> [B, T, inner]``."""
        config, own = self.config, 0 if self.config.tied else i
        projection = self.projections[min(i, len(self.projections) - 1) if config.tied else i]
        embedded = self.embeddings[own][...][tokens]
        state = project(state, projection.weight[...]) + (self._ratio * embedded).astype(state.dtype)
        return jax.nn.gelu(self.norms[own](state), approximate=False)

    def logits(self, i: int, state):
        """``[..., inner] -> [..., V]`` of stage i."""
        return self.heads[0 if self.config.tied else i](state)

    @property
    def _ratio(self) -> float:
        """Weight of a token against the state: sqrt((1 - a^2) inner / 2) / a with a = 0.5^(0.5 / n)."""
        a = 0.5 ** (0.5 / self.config.num_stages)
        return math.sqrt((1 - a * a) * self.config.inner_size / 2) / a


def unit_rms(x):
    """x over its root mean square, in fp32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPS)).astype(x.dtype)
