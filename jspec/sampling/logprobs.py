"""Log-probabilities of tokens, and of the likeliest tokens beside them."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import wants_one_order
from jspec.pallas.sampling.sample import sample
from jspec.sampling.params import MAX_LOGPROBS

_GROUP = 256  # tokens; the likeliest tokens are in the groups that have the largest logits
PACKED = 2 + 2 * MAX_LOGPROBS  # numbers for each token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of tokens ``[...]``, one of each distribution.

    Attributes:
      chosen: float32 ``[...]``, the natural logarithm of the token's probability.
      rank: int32 ``[...]``, 1 for the likeliest token, and one more for each token that is likelier.
      tokens: int32 ``[..., MAX_LOGPROBS]``, the likeliest tokens, the likeliest first, of equal ones the lower first; -1
        where the vocabulary has no more.
      values: float32 ``[..., MAX_LOGPROBS]``, the logarithms of their probabilities.
    """

    chosen: Any
    rank: Any
    tokens: Any
    values: Any

    def packed(self) -> jax.Array:
        """All fields in one array, int32 ``[..., PACKED]``."""
        as_int = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)  # noqa: E731
        parts = as_int(self.chosen)[..., None], self.rank[..., None], self.tokens, as_int(self.values)
        return jnp.concatenate(parts, axis=-1)

    @staticmethod
    def unpacked(packed) -> "TokenLogprobs":
        """The inverse of ``packed``, on the host."""
        tokens, values = packed[..., 2 : 2 + MAX_LOGPROBS], packed[..., 2 + MAX_LOGPROBS :]
        return TokenLogprobs(packed[..., 0].view("f4"), packed[..., 1], tokens, values.view("f4"))


def as_float32(logits) -> jax.Array:
    """The stored logits in float32. Without the barrier XLA may skip the rounding to the stored dtype."""
    return jax.lax.optimization_barrier(logits).astype(jnp.float32)


def _ordered_logsumexp(logits) -> jax.Array:
    """The normaliser of ``sample``, whose sum has one order for any number of tokens: those of XLA follow from it."""
    count = math.prod(logits.shape[:-1])
    ones, zeros = jnp.ones(count, jnp.float32), jnp.zeros(count, jnp.float32)
    _, distribution = sample(logits.reshape(count, 1, -1), ones, zeros.astype(jnp.int32), ones, zeros)
    return distribution.lse.reshape(logits.shape[:-1])


def token_logprobs(logits, tokens) -> TokenLogprobs:
    """Log-probabilities of tokens int32 ``[..., J]`` under logits ``[..., J, V]`` at temperature 1."""
    logits = logits.astype(jnp.float32)
    normalizer = _ordered_logsumexp(logits) if wants_one_order() else jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1, mode="clip")
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    values, likeliest_tokens = likeliest(logits)
    return TokenLogprobs(chosen[..., 0] - normalizer, rank, likeliest_tokens, values - normalizer[..., None])


def likeliest(logits) -> tuple[jax.Array, jax.Array]:
    """The largest of logits float32 ``[..., V]`` and their tokens, both ``[..., MAX_LOGPROBS]``, in descending order.

    The vocabulary is not sorted: the n largest logits are in the n groups with the largest maxima.
    """
    V, n = logits.shape[-1], MAX_LOGPROBS
    groups = jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, -V % _GROUP)], constant_values=-jnp.inf)
    groups = groups.reshape(*logits.shape[:-1], -1, _GROUP)
    _, best = jax.lax.top_k(jnp.max(groups, axis=-1), min(n, groups.shape[-2]))
    best = jnp.sort(best, axis=-1)  # so that of equal logits the lower token comes first
    candidates = jnp.take_along_axis(groups, best[..., None], axis=-2)
    values, place = jax.lax.top_k(candidates.reshape(*candidates.shape[:-2], -1), n)
    tokens = jnp.take_along_axis(best, place // _GROUP, axis=-1) * _GROUP + place % _GROUP
    return values, jnp.where(tokens < V, tokens, -1)
