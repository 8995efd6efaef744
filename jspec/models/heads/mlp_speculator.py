"""MLP speculators (Wertheimer et al., 2024): a recurrent state ``[W]`` that reads one token in each stage.

Nothing is cached.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config.heads import MLPConfig
from jspec.models.heads.draft_vocabulary import placeholder_ids, with_draft_tokens
from jspec.models.layers import Linear, looked_up
from jspec.pallas.matmul.reference import per_feature
from jspec.pallas.sums import row_sum

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
    """The stages of an MLP speculator.

    Stage i updates the state to s = gelu(norm_i(proj_i s + ratio emb_i[token])). The logits of the next token are head_i
    s. The first state is the target's hidden state, after its final norm, at the newest position whose next token is
    known.

    Attributes:
      draft_ids: as in ``jspec.models.heads.draft_vocabulary``; None if every token can be proposed.
    """

    def __init__(self, config: MLPConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        V, D, W, n = config.vocab_size, config.hidden_size, config.inner_size, config.num_stages
        sets = 1 if config.tied else n
        widths = [D] + [W] * (min(n - 1, 1) if config.tied else n - 1)
        self.config = config
        init = lambda: nnx.Param(W**-0.5 * jax.random.normal(rngs.params(), (V, W), dtype))  # noqa: E731
        self.embeddings = nnx.List([init() for _ in range(sets)])
        linear = functools.partial(Linear, quantization=config.quantization, dtype=dtype, rngs=rngs)
        self.projections = nnx.List([linear(width, W) for width in widths])
        self.norms = nnx.List([ScaledNorm(W, dtype=dtype) for _ in range(sets)])
        self.heads = nnx.List([linear(W, config.dimensions["Vd"]) for _ in range(sets)])
        self.draft_ids = placeholder_ids(config)
        self.draft_tokens = None  # before ``prepare``

    def prepare(self):
        """The module that serves, with the same arrays and the token of each logit."""
        return with_draft_tokens(self)

    def start(self, hidden):
        """The first state ``[..., D]``, made from the target's hidden state ``[..., D]``."""
        return unit_rms(hidden) * 0.5**0.5 if self.config.scale_input else hidden

    def stage(self, i: int, state, tokens):
        """Read int32 tokens ``[B, T]`` in stage i: states ``[B, T, W] -> [B, T, W]``. The first state is ``[B, T,
        D]``."""
        config, own_weights = self.config, 0 if self.config.tied else i
        projection = self.projections[min(i, len(self.projections) - 1) if config.tied else i]
        embedded = looked_up(self.embeddings[own_weights][...], tokens)
        state = projection(state) + (self._ratio * embedded).astype(state.dtype)
        return jax.nn.gelu(self.norms[own_weights](state), approximate=False)

    def logits(self, i: int, state):
        """Logits of stage i, over the draft vocabulary: ``[..., W] -> [..., Vd]``."""
        return self.heads[0 if self.config.tied else i](state)

    @property
    def _ratio(self) -> float:
        """The factor of a token's embedding: sqrt((1 - a^2) W / 2) / a with a = 0.5^(0.5 / num_stages)."""
        a = 0.5 ** (0.5 / self.config.num_stages)
        return math.sqrt((1 - a * a) * self.config.inner_size / 2) / a


def unit_rms(x):
    """x divided by its root mean square over the last axis, computed in fp32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(row_sum(x32 * x32) / x.shape[-1] + EPS)).astype(x.dtype)
