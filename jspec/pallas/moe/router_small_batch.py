"""The router for few tokens, in one launch: a single program instance chooses the experts of all tokens, at once if they
are few enough, and sorts the assignments by expert."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.config import Experts
from jspec.pallas.moe.choice import choose_experts
from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.triton import kernel_call

MOST_TOKENS = 4  # for more, two kernels are faster
# Comparisons of an instance, of all pairs of experts of each token: what four warps have in registers, and eight. With four
# times as many the compiler takes minutes.
_OF_FOUR_WARPS, _OF_EIGHT_WARPS = 2**14, 2**16


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))  # layers share one trace
def route_small_batch_kernel(logits, bias, routing: Experts, *, interpret=False) -> Routed:
    """``route_reference`` as a kernel, for at most ``MOST_TOKENS`` tokens. Logits may be in parts, as for
    ``choose_experts``."""
    M, X = logits.shape[-2:]
    assert M <= MOST_TOKENS, M
    Y, shared = routing.per_token, routing.shared
    comparisons = pl.next_power_of_2(M) * pl.next_power_of_2(X) ** 2
    shapes = ((M, Y), jnp.int32), ((M, Y), jnp.float32), ((X + shared,), jnp.int32), ((M * Y,), jnp.int32)
    return Routed(
        *kernel_call(
            _route_small_batch,
            logits,
            bias,
            grid=(1,),
            out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
            num_warps=8 if _OF_FOUR_WARPS < comparisons <= _OF_EIGHT_WARPS else 4,
            interpret=interpret,
            routing=routing,
            at_once=comparisons <= _OF_EIGHT_WARPS,
        )
    )


def _route_small_batch(
    logits_ref, bias_ref, expert_ref, weight_ref, sizes_ref, order_ref, *, routing: Experts, at_once: bool
):
    (M, Y), X = expert_ref.shape, sizes_ref.shape[0]
    token = jnp.arange(pl.next_power_of_2(M), dtype=jnp.int32)
    expert = choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, routing, at_once=at_once)
    choice = jax.lax.broadcasted_iota(jnp.int32, expert.shape, 1)
    real = (token < M)[:, None] & (choice < Y)
    expert = jnp.where(real, expert, X).reshape(-1)  # X stands behind the last expert

    ids = jnp.arange(pl.next_power_of_2(X), dtype=jnp.int32)
    sizes = jnp.sum((expert[:, None] == ids[None, :]).astype(jnp.int32), axis=0)
    pltriton.store(sizes_ref.at[ids], sizes, mask=ids < X)
    # An assignment stands behind those of earlier experts, and behind the earlier ones of its own expert. A token has an
    # expert twice only if its logits are no numbers.
    a = jnp.arange(expert.shape[0], dtype=jnp.int32)
    other, own = expert[:, None], expert[None, :]
    place = jnp.sum(((other < own) | (other == own) & (a[:, None] < a[None, :])).astype(jnp.int32), axis=0)
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    real = real.reshape(-1)
    pltriton.store(order_ref.at[jnp.where(real, place, M * Y)], (token[:, None] * Y + choice).reshape(-1), mask=real)
