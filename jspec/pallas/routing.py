"""Which experts a token goes to (Shazeer et al., 2017), and the tokens of each expert side by side."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import block_ids, block_size, kernel_call, load_block

_BLOCK = 1024  # assignments that a program looks at together


class Chosen(NamedTuple):
    """The Y experts of each of M tokens, the likeliest first.

    Attributes:
      expert: int32 ``[M, Y]``.
      weight: float32 ``[M, Y]``, what each expert's output is multiplied by.
    """

    expert: jax.Array
    weight: jax.Array


class Grouped(NamedTuple):
    """The A = M Y assignments of tokens to experts, those of the first expert first.

    Assignment a is choice a % Y of token a // Y.

    Attributes:
      sizes: int32 ``[X]``, how many assignments each expert has.
      order: int32 ``[A]``, the assignments; those of an expert are in ascending order.
    """

    sizes: jax.Array
    order: jax.Array


def choose(logits, count: int, renormalise: bool) -> Chosen:
    """``choose_reference``, and on an NVIDIA GPU the kernel."""
    options = {"count": count, "renormalise": renormalise}
    return by_platform(
        functools.partial(choose_kernel, **options), functools.partial(choose_reference, **options), logits
    )


def choose_reference(logits, count: int, renormalise: bool) -> Chosen:
    """The likeliest experts of each token. Of equally likely ones, those with lower numbers go first.

    Args:
      logits: float32 ``[M, X]``, of the router.
      count: Y.
      renormalise: whether the weights of a token add up to 1. Otherwise they are probabilities among all experts.
    """
    equal_zeros = jnp.where(logits == 0, 0.0, logits)  # top_k puts 0 before -0
    logit, expert = jax.lax.top_k(equal_zeros, count)
    weight = jnp.exp(logit - logit[:, :1])
    over = weight if renormalise else jnp.exp(logits - logit[:, :1])
    return Chosen(expert.astype(jnp.int32), weight / jnp.sum(over, axis=1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("count", "renormalise", "interpret"))  # layers share one trace
def choose_kernel(logits, count: int, renormalise: bool, *, interpret=False) -> Chosen:
    """``choose_reference`` as a kernel; each of its programs has one token."""
    shape = logits.shape[0], count
    return Chosen(
        *kernel_call(
            _choose,
            logits,
            grid=(shape[0],),
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)],
            num_warps=1,
            interpret=interpret,
            renormalise=renormalise,
        )
    )


def _choose(logits_ref, expert_ref, weight_ref, *, renormalise: bool):
    m, (X, Y) = pl.program_id(0), (logits_ref.shape[1], expert_ref.shape[1])
    ids = block_ids(0, pl.next_power_of_2(X))
    left = load_block(logits_ref, (m,), 0, ids, X)
    peak = jnp.max(left)
    everything, chosen, weights = jnp.sum(jnp.exp(left - peak)), [], []
    for _ in range(Y):
        best = jnp.max(left)
        expert = jnp.minimum(jnp.min(jnp.where(left == best, ids, X)), X - 1)  # no id is there if a logit is NaN
        chosen.append(expert)
        weights.append(jnp.exp(best - peak))
        left = jnp.where(ids == expert, -jnp.inf, left)
    total = functools.reduce(jnp.add, weights) if renormalise else everything
    for c, (expert, weight) in enumerate(zip(chosen, weights, strict=True)):
        at = m, jnp.minimum(m, 0) + c  # a literal index does not trace in interpret mode of jax 0.10
        expert_ref[at], weight_ref[at] = expert, weight / total


def group_reference(expert, num_experts: int) -> Grouped:
    """The assignments by expert.

    Args:
      expert: int32 ``[M, Y]``.
      num_experts: X.
    """
    flat = expert.reshape(-1)
    every = jnp.arange(num_experts, dtype=jnp.int32)
    count = jnp.sum(flat[:, None] == every[None], axis=0, dtype=jnp.int32)
    return Grouped(count, jnp.argsort(flat, stable=True).astype(jnp.int32))


@functools.partial(jax.jit, static_argnames=("num_experts", "interpret"))
def group_kernel(expert, num_experts: int, *, interpret=False) -> Grouped:
    """``group_reference`` as a kernel; each of its programs has one expert, and looks at all assignments."""
    A = expert.size
    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_experts, A)]
    return Grouped(
        *kernel_call(
            _group,
            expert.reshape(A),
            grid=(num_experts,),
            out_shape=shapes,
            num_warps=4,
            interpret=interpret,
            size=block_size(A, _BLOCK),
        )
    )


def _group(expert_ref, count_ref, order_ref, *, size: int):
    e, A = pl.program_id(0), expert_ref.shape[0]
    nobody = count_ref.shape[0]  # stands behind the last assignment

    def load(block):
        ids = block_ids(block, size)
        return ids, pltriton.load(expert_ref.at[ids], mask=ids < A, other=nobody)

    def look(block, found):
        _, expert = load(block)
        earlier, mine = found
        return earlier + jnp.sum((expert < e).astype(jnp.int32)), mine + jnp.sum((expert == e).astype(jnp.int32))

    def place(block, at):
        ids, expert = load(block)
        mine = (expert == e).astype(jnp.int32)
        rank = jnp.cumsum(mine)  # 1 for the first
        # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
        to = jnp.where(mine == 1, at + rank - 1, A)
        pltriton.store(order_ref.at[to], ids, mask=mine == 1)
        return at + jnp.sum(mine)

    blocks, none = pl.cdiv(A, size), jnp.int32(0)
    earlier, mine = jax.lax.fori_loop(0, blocks, look, (none, none))
    count_ref[e] = mine
    jax.lax.fori_loop(0, blocks, place, earlier)
