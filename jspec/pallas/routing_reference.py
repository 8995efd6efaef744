"""The definition of routing: which experts a token goes to (Shazeer et al., 2017), and the tokens of each expert side by
side."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routed(NamedTuple):
    """The Y experts of each of M tokens, and the A = M Y assignments of tokens to experts, those of the first expert first.

    Assignment a is choice a % Y of token a // Y.

    Attributes:
      expert: int32 ``[M, Y]``, the likeliest first.
      weight: float32 ``[M, Y]``, what each expert's output is multiplied by.
      sizes: int32 ``[X]``, how many assignments each expert has.
      order: int32 ``[A]``, the assignments; those of an expert are in ascending order.
    """

    expert: jax.Array
    weight: jax.Array
    sizes: jax.Array
    order: jax.Array


def route_reference(logits, bias, count: int, renormalise: bool) -> Routed:
    """Where tokens go.

    Args:
      logits: float32 ``[M, X]``, of the router.
      bias: ``[X]``, added to them, or None.
      count: Y.
      renormalise: whether the weights of a token add up to 1. Otherwise they are probabilities among all experts.
    """
    expert, weight = choose_reference(logits, bias, count, renormalise)
    return Routed(expert, weight, *group_reference(expert, logits.shape[1]))


def choose_reference(logits, bias, count: int, renormalise: bool) -> tuple[jax.Array, jax.Array]:
    """``expert`` and ``weight`` of ``Routed``. Of equally likely experts, those with lower numbers go first."""
    logits = logits if bias is None else logits + bias.astype(jnp.float32)[None]
    equal_zeros = jnp.where(logits == 0, 0.0, logits)  # top_k puts 0 before -0
    logit, expert = jax.lax.top_k(equal_zeros, count)
    weight = jnp.exp(logit - logit[:, :1])
    over = weight if renormalise else jnp.exp(logits - logit[:, :1])
    return expert.astype(jnp.int32), weight / jnp.sum(over, axis=1, keepdims=True)


def group_reference(expert, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """``sizes`` and ``order`` of ``Routed``, from its ``expert``, among ``num_experts`` X."""
    flat = expert.reshape(-1)
    every = jnp.arange(num_experts, dtype=jnp.int32)
    sizes = jnp.sum(flat[:, None] == every[None], axis=0, dtype=jnp.int32)
    return sizes, jnp.argsort(flat, stable=True).astype(jnp.int32)
