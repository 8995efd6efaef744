"""The router: ``route_reference`` as one kernel for few tokens (``jspec.pallas.moe.router_small_batch``), and as two for
any number, behind that of the logits. A token's experts and their weights have the same bits in any number of tokens."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.config import Experts
from jspec.pallas.dispatch import by_platform, wants_one_order
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.moe.choice import choose_experts
from jspec.pallas.moe.router_logits import router_logits_kernel
from jspec.pallas.moe.router_reference import Routed, route_reference
from jspec.pallas.moe.router_small_batch import MOST_TOKENS, route_small_batch_kernel
from jspec.pallas.triton import block_ids, block_size, kernel_call

_BLOCK = 4096  # assignments that a program instance reads together


def route(x, weight, bias, routing: Experts) -> Routed:
    """``route_reference`` of the logits of tokens ``x [M, D]``, a product with ``weight [X, D]``, and on an NVIDIA GPU the
    kernels; that of the logits where there is to be one order of sums."""
    logits_of = router_logits_kernel if wants_one_order() else functools.partial(matmul_reference, dtype=jnp.float32)

    def kernel(x, weight, bias):
        return route_kernel(logits_of(x, weight), bias, routing)

    def reference(x, weight, bias):
        return route_reference(matmul_reference(x, weight, jnp.float32), bias, routing)

    return by_platform(kernel, reference, x, weight, bias)


def route_kernel(logits, bias, routing: Experts, *, interpret=False) -> Routed:
    """``route_reference`` as one or two kernels. Logits may be in parts, those of ``router_logits_kernel``."""
    M, X = logits.shape[-2:]
    if M <= MOST_TOKENS:
        return route_small_batch_kernel(logits, bias, routing, interpret=interpret)
    expert, weight = choose_kernel(logits, bias, routing, interpret=interpret)
    return Routed(expert, weight, *group_kernel(expert, X + routing.shared, interpret=interpret))


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))  # layers share one trace
def choose_kernel(logits, bias, routing: Experts, *, interpret=False) -> tuple[jax.Array, jax.Array]:
    """``choose_reference`` as a kernel; a program instance has one token."""
    shape = logits.shape[-2], routing.per_token
    expert, weight = kernel_call(
        _choose,
        logits,
        bias,
        grid=(shape[0],),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        num_warps=1,
        interpret=interpret,
        routing=routing,
    )
    return expert, weight


def _choose(logits_ref, bias_ref, expert_ref, weight_ref, *, routing: Experts):
    token = jnp.full(1, pl.program_id(0), jnp.int32)
    choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, routing)


@functools.partial(jax.jit, static_argnames=("num_experts", "interpret"))
def group_kernel(expert, num_experts: int, *, interpret=False) -> tuple[jax.Array, jax.Array]:
    """``group_reference`` as a kernel; a program instance has one expert, and reads all assignments."""
    A = expert.size
    size = block_size(A, _BLOCK)
    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (num_experts, A)]
    sizes, order = kernel_call(
        _group,
        expert.reshape(A),
        grid=(num_experts,),
        out_shape=shapes,
        num_warps=4 if size <= 1024 else 8,
        interpret=interpret,
        size=size,
    )
    return sizes, order


def _group(expert_ref, count_ref, order_ref, *, size: int):
    e, A = pl.program_id(0), expert_ref.shape[0]
    no_expert = count_ref.shape[0]  # stands behind the last assignment

    def load(block):
        ids = block_ids(block, size)
        return ids, pltriton.load(expert_ref.at[ids], mask=ids < A, other=no_expert)

    def look(block, counts):  # each thread counts on its own
        _, expert = load(block)
        earlier, own = counts
        return earlier + (expert < e).astype(jnp.int32), own + (expert == e).astype(jnp.int32)

    def place(block, at):
        ids, expert = load(block)
        own = (expert == e).astype(jnp.int32)
        rank = jnp.cumsum(own)  # 1 for the first
        # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
        to = jnp.where(own == 1, at + rank - 1, A)
        pltriton.store(order_ref.at[to], ids, mask=own == 1)
        return at + jnp.sum(own)

    blocks, none = pl.cdiv(A, size), jnp.zeros(size, jnp.int32)
    earlier, own = jax.lax.fori_loop(0, blocks, look, (none, none))
    count_ref[e] = jnp.sum(own)
    jax.lax.fori_loop(0, blocks, place, jnp.sum(earlier))
