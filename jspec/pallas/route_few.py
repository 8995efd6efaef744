"""Routing of few tokens in one launch: a single program chooses the experts of all tokens and puts the tokens in order."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.routing_reference import Routed
from jspec.pallas.triton import kernel_call

MOST_TOKENS = 16  # every token is compared with every other


@functools.partial(jax.jit, static_argnames=("count", "renormalise", "interpret"))  # layers share one trace
def route_few_kernel(logits, bias, count: int, renormalise: bool, *, interpret=False) -> Routed:
    """``route_reference`` as a kernel, for at most ``MOST_TOKENS`` tokens."""
    M, X = logits.shape
    assert M <= MOST_TOKENS, M
    shapes = ((M, count), jnp.int32), ((M, count), jnp.float32), ((X,), jnp.int32), ((M * count,), jnp.int32)
    return Routed(
        *kernel_call(
            _route_few,
            logits,
            bias,
            grid=(1,),
            out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
            num_warps=4,
            interpret=interpret,
            renormalise=renormalise,
        )
    )


def _route_few(logits_ref, bias_ref, expert_ref, weight_ref, sizes_ref, order_ref, *, renormalise: bool):
    (M, X), Y = logits_ref.shape, expert_ref.shape[1]
    token, ids = (jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32) for n in (M, X))
    here = token < M
    experts = choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, renormalise)
    experts = [jnp.where(here, expert, X) for expert in experts]  # X stands behind the last expert

    everyone = jnp.broadcast_to(ids[None, :], (token.shape[0], ids.shape[0]))
    sizes = jnp.sum(sum((expert[:, None] == everyone).astype(jnp.int32) for expert in experts), axis=0)
    pltriton.store(sizes_ref.at[ids], sizes, mask=ids < X)
    # An assignment stands behind those of earlier experts, and behind the earlier ones of its own expert. A token has an
    # expert twice only if its logits are no numbers.
    earlier, not_later = (compare(token[None, :], token[:, None]) for compare in (jnp.less, jnp.less_equal))
    for c, expert in enumerate(experts):
        before = jnp.zeros(earlier.shape, jnp.int32)
        for other_c, other in enumerate(experts):
            same = (other[None, :] == expert[:, None]) & (not_later if other_c < c else earlier)
            before += ((other[None, :] < expert[:, None]) | same).astype(jnp.int32)
        # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
        place = jnp.where(here, jnp.sum(before, axis=1), M * Y)
        pltriton.store(order_ref.at[place], token * Y + c, mask=here)


def choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, renormalise: bool) -> list[jax.Array]:
    """In a kernel: write the experts of some tokens and their weights.

    Args:
      token: int32 ``[m]``, a power of two of them; those past the last token are none.
      logits_ref, bias_ref: as ``route_reference`` has them.
      expert_ref, weight_ref: of ``Routed``.

    Returns:
      the Y experts of each token, int32 ``[m]`` each.
    """
    (M, X), Y = logits_ref.shape, expert_ref.shape[1]
    real, shape = token < M, (token.shape[0], pl.next_power_of_2(X))
    row, ids = jnp.broadcast_to(token[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    left = pltriton.load(logits_ref.at[row, ids], mask=real[:, None] & (ids < X), other=-jnp.inf)
    if bias_ref is not None:
        left = left + pltriton.load(bias_ref.at[ids], mask=ids < X, other=0.0).astype(jnp.float32)
    logits, experts, found = left, [], []
    for _ in range(Y):
        best = jnp.max(left, axis=1)
        expert = jnp.min(jnp.where(left == best[:, None], ids, X), axis=1)
        expert = jnp.minimum(expert, X - 1)  # no id is there if a logit is NaN
        experts.append(expert)
        found.append(best)
        left = jnp.where(ids == expert[:, None], -jnp.inf, left)

    weights = [jnp.exp(best - found[0]) for best in found]
    total = functools.reduce(jnp.add, weights) if renormalise else jnp.sum(jnp.exp(logits - found[0][:, None]), axis=1)
    for c, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
        at = token, jnp.full(token.shape, c, jnp.int32)
        pltriton.store(expert_ref.at[at], expert, mask=real)
        pltriton.store(weight_ref.at[at], weight / total, mask=real)
    return experts
