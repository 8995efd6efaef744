"""The definition of routing: the experts of each token (Shazeer et al., 2017), and the assignments sorted by expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import Experts
from jspec.pallas.sums import row_sum

TINY = 1e-20  # added to sums of sigmoids, which may all be 0


class Routed(NamedTuple):
    """The Y experts of each of M tokens, and the A = M Y assignments of tokens to experts, sorted by expert.

    Assignment a is choice a % Y of token a // Y.

    Attributes:
      expert: int32 ``[M, Y]``, the likeliest first, and after the chosen ones those that are shared.
      weight: float32 ``[M, Y]``, the factor of each expert's output.
      sizes: int32 ``[X]``, how many assignments each expert has; X includes the shared experts here.
      order: int32 ``[A]``, the assignments; those of an expert are in ascending order.
    """

    expert: jax.Array
    weight: jax.Array
    sizes: jax.Array
    order: jax.Array


def route_reference(logits, bias, routing: Experts) -> Routed:
    """The experts of each token, and the assignments sorted by expert.

    Args:
      logits: float32 ``[M, X]``, of the router.
      bias: ``[X]``, of the router, or None.
      routing: the config of the mixture, which says how experts are chosen, and to what the bias is added.
    """
    expert, weight = choose_reference(logits, bias, routing)
    return Routed(expert, weight, *group_reference(expert, logits.shape[1] + routing.shared))


def choose_reference(logits, bias, routing: Experts) -> tuple[jax.Array, jax.Array]:
    """``expert`` and ``weight`` of ``Routed``. Of equally likely experts or groups, those with lower numbers go
    first."""
    M, X = logits.shape
    added = jnp.zeros((1, X), jnp.float32) if bias is None else bias.astype(jnp.float32)[None]
    probability = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else None
    choice = (logits if probability is None else probability) + added
    allowed = choice if routing.groups == 1 else jnp.where(_in_best_groups(choice, routing), choice, -jnp.inf)
    equal_zeros = jnp.where(allowed == 0, 0.0, allowed)  # top_k puts 0 before -0
    best, expert = jax.lax.top_k(equal_zeros, routing.chosen)
    if probability is None:
        weight = jnp.exp(best - best[:, :1])
        summands = weight if routing.renormalise else jnp.exp(choice - best[:, :1])
        weight /= row_sum(summands)
    else:
        weight = jnp.take_along_axis(probability, expert, axis=1)
        if routing.renormalise:
            weight /= row_sum(weight) + TINY
    # A NaN whose sign bit is set is the last for top_k, and those of a CPU have it set.
    weight = jnp.where(jnp.any(jnp.isnan(choice), axis=1, keepdims=True), jnp.nan, weight)
    shared = jnp.broadcast_to(X + jnp.arange(routing.shared, dtype=jnp.int32)[None], (M, routing.shared))
    weight = jnp.concatenate([weight * routing.scale, jnp.ones(shared.shape, jnp.float32)], axis=1)
    return jnp.concatenate([expert.astype(jnp.int32), shared], axis=1), weight


def _in_best_groups(choice, routing: Experts) -> jax.Array:
    """Which experts a token may choose, bool ``[M, X]``."""
    M, X = choice.shape
    sums = jnp.sum(jax.lax.top_k(choice.reshape(M, routing.groups, -1), 2)[0], axis=2)
    _, best = jax.lax.top_k(sums, routing.chosen_groups)
    group = jnp.arange(X, dtype=jnp.int32) // (X // routing.groups)
    return jnp.any(best[:, :, None] == group[None, None], axis=1)


def group_reference(expert, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """``sizes`` and ``order`` of ``Routed``, from its ``expert``, among ``num_experts`` X."""
    flat = expert.reshape(-1)
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    sizes = jnp.sum(flat[:, None] == ids[None], axis=0, dtype=jnp.int32)
    return sizes, jnp.argsort(flat, stable=True).astype(jnp.int32)
