"""The one meaning of a distribution: stored logits, a temperature, and ONE threshold that min-p, top-k and top-p agree on.

Target rows, draft rows and the bonus row are all made here, so drawing and the accept ratio cannot disagree.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.pallas.draw import draw
from jspec.pallas.rows import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Warp:
    """Per-request settings that turn logits into a law, each ``[B]``.

    Attributes:
      temperature: float32, 0 is greedy.
      top_k: int32, 0 is off.
      top_p: float32, 1 is off.
      min_p: float32, 0 is off.
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
class Law:
    """J laws for each of B requests: p(v) = exp(scale * logit[v] - lse) where logit[v] >= threshold, else 0.

    Attributes:
      rows: logits ``[B, J, V]`` as stored, and scale, threshold, lse float32 ``[B, J]``.
      greedy: bool ``[B]``; a greedy law is a point mass at its likeliest token.
    """

    rows: Rows
    greedy: jax.Array

    @property
    def finite(self) -> jax.Array:
        """bool ``[B, J]``: the row is a law, that is, no logit is NaN or +inf and one is finite."""
        return jnp.isfinite(self.rows.lse)

    def log_prob(self, tokens) -> jax.Array:
        """float32 ``[B, J]``: log p of int32 tokens ``[B, J]`` in the first J rows, as if no row were greedy."""
        B, J = tokens.shape
        rows, V = self.rows, self.rows.logits.shape[2]
        row = jnp.arange(B, dtype=jnp.int32)[:, None] * rows.lse.shape[1] + jnp.arange(J, dtype=jnp.int32)[None]
        # One flat index: XLA makes a kernel of its own of an index of three coordinates.
        z = rows.logits.reshape(-1).at[row * V + tokens].get(mode="clip").astype(jnp.float32)
        return jnp.where(z >= rows.threshold[:, :J], z * rows.scale[:, :J] - rows.lse[:, :J], -jnp.inf)


def make_law(logits, warp: Warp, key_data=None) -> tuple[Law, jax.Array]:
    """Laws of logits ``[B, J, V]``, and a token of each, int32 ``[B, J]``.

    The token is drawn with ``key_data``, uint32 ``[B, J, 2]``, and -1 without; greedy rows take the likeliest.
    """
    # The law is that of the stored logits. Without the barrier XLA may keep bfloat16 logits in float32 for some readers,
    # and the threshold, the draw and the ratio would then speak of different numbers.
    logits = jax.lax.optimization_barrier(logits)
    token, rows = draw(logits, warp.temperature, warp.top_k, warp.top_p, warp.min_p, key_data)
    return Law(rows, warp.greedy), token


def leading(flags) -> jax.Array:
    """How many flags of each row hold before the first that does not: bool ``[B, J]`` -> int32 ``[B]``."""
    J = flags.shape[1]
    failures = jnp.where(flags, J, jnp.arange(J, dtype=jnp.int32)[None])
    # In place of jnp.min, whose initial value is a kernel of its own.
    return jax.lax.reduce(failures, np.int32(J), jax.lax.min, (1,))
