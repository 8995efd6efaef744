"""The one meaning of a distribution: stored logits, a temperature, and ONE cutoff for min-p, top-k and top-p together.

The distributions of the target, of the draft and of the bonus token are all made here, so the draw and the accept ratio
cannot disagree.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.pallas.sampling.sample import sample
from jspec.pallas.sampling.warped_logits import WarpedLogits
from jspec.sampling.draft_vocabulary import DraftVocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Warp:
    """Per-request settings that turn logits into a distribution, each ``[B]``.

    Attributes:
      temperature: float32, 0 is greedy.
      top_k: int32, 0 is off.
      top_p: float32, 1 is off.
      min_p: float32, 0 is off.

    Example::

        warp = Warp(  # two requests, the second of them greedy
            temperature=jnp.array([0.8, 0.0]),
            top_k=jnp.array([0, 0]),
            top_p=jnp.array([0.95, 1.0]),
            min_p=jnp.array([0.0, 0.0]),
        )
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @property
    def greedy(self) -> jax.Array:
        return self.temperature == 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Distribution:
    """J distributions for each of B requests: p(v) = exp(scale * logit[v] - lse) where logit[v] >= cutoff, else 0.

    Attributes:
      warped: logits ``[B, J, V]`` as stored, and scale, cutoff, lse float32 ``[B, J]``.
      greedy: bool ``[B]``; a greedy distribution is a point mass at its likeliest token.
      draft_ids: int32 ``[V]``, for each token the index of its logit, of distributions over a draft vocabulary of Vd tokens,
        whose logits are ``[B, J, Vd]``. A token of index -1 has probability 0. None if the index is the token.

    Example::

        warp = Warp(jnp.array([1.0]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))
        distribution, _ = make_distribution(jnp.zeros((1, 1, 16)), warp)
        assert jnp.allclose(jnp.exp(distribution.log_prob(jnp.array([[3]]))), 1 / 16)
    """

    warped: WarpedLogits
    greedy: jax.Array
    draft_ids: jax.Array | None = None

    @property
    def finite(self) -> jax.Array:
        """bool ``[B, J]``: the logits make a distribution, that is, none is NaN or +inf and at least one is finite."""
        return jnp.isfinite(self.warped.lse)

    @property
    def log_probs(self) -> jax.Array:
        """log p of every token, float32 ``[B, J, V]``; for greedy requests that of temperature 1."""
        width = self.warped.logits.shape[2] if self.draft_ids is None else self.draft_ids.shape[0]
        return self.warped.log_prob(width, self.draft_ids)

    def log_prob(self, tokens) -> jax.Array:
        """log p of tokens int32 ``[B, J]`` under the first J distributions of each row, float32 ``[B, J]``.

        For greedy requests it is that of temperature 1.
        """
        B, J = tokens.shape
        warped, width = self.warped, self.warped.logits.shape[2]
        index = tokens if self.draft_ids is None else self.draft_ids.at[tokens].get(mode="clip")
        row = jnp.arange(B, dtype=jnp.int32)[:, None] * warped.lse.shape[1] + jnp.arange(J, dtype=jnp.int32)[None]
        # One flat index: XLA makes a kernel of its own of an index of three coordinates.
        z = warped.logits.reshape(-1).at[row * width + index].get(mode="clip").astype(jnp.float32)
        if self.draft_ids is not None:
            z = jnp.where(index >= 0, z, -jnp.inf)
        return jnp.where(z >= warped.cutoff[:, :J], z * warped.scale[:, :J] - warped.lse[:, :J], -jnp.inf)


def make_distribution(
    logits, warp: Warp, key_data=None, vocabulary: DraftVocabulary | None = None
) -> tuple[Distribution, jax.Array]:
    """Distributions of logits ``[B, J, V]``, and a token of each, int32 ``[B, J]``.

    The token is drawn with ``key_data``, uint32 ``[B, J, 2]``; without keys it is -1. A greedy request gets the likeliest
    token in both cases, of equally likely ones that of the lowest index. With a draft vocabulary the logits are
    ``[B, J, Vd]``, an index is drawn, and the token is that of the index; keys have to be given.

    Example::

        greedy = Warp(jnp.array([0.0]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))
        _, token = make_distribution(jnp.arange(16.0).reshape(1, 1, 16), greedy)
        assert token.tolist() == [[15]]
    """
    # The distribution is that of the stored logits. Without the barrier XLA may keep bfloat16 logits in float32 for
    # some readers, and the cutoff, the draw and the ratio would then use different numbers.
    logits = jax.lax.optimization_barrier(logits)
    token, warped = sample(logits, warp.temperature, warp.top_k, warp.top_p, warp.min_p, key_data)
    if vocabulary is None:
        return Distribution(warped, warp.greedy), token
    token = vocabulary.tokens.at[token].get(mode="clip")
    return Distribution(warped, warp.greedy, vocabulary.ids), token


def leading(flags) -> jax.Array:
    """How many flags of each row are true before the first false one: bool ``[B, J]`` -> int32 ``[B]``."""
    J = flags.shape[1]
    failures = jnp.where(flags, J, jnp.arange(J, dtype=jnp.int32)[None])
    # Not jnp.min, whose initial value is a kernel of its own.
    return jax.lax.reduce(failures, np.int32(J), jax.lax.min, (1,))
