"""The router's logits: a product with few outputs, whose sums have one order for any number of tokens."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform, wants_one_order
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.triton import block_ids, dot, kernel_call, load_tile, tile_indices, tile_mask

_PARTS = 4  # sums of an output, added up side by side: a single chain would take as long as reading its inputs
_INPUTS = 64  # that are added to one of them before it is the next one's turn


def logits_tiling(M: int) -> MatmulTiling:
    """The tiling for M tokens, which changes no sum: an instance has all ``_PARTS`` sums of an output, or a split each."""
    if M > 512:
        return MatmulTiling(64, 32, _INPUTS, 4, 3)
    tokens = 16 if M <= 16 else 32
    return MatmulTiling(16, tokens, _INPUTS, tokens // 8, 4, num_splits=_PARTS if M <= 128 else 1)


def router_logits(x, weight) -> jax.Array:
    """The linear map ``[M, in], [out, in] -> float32 [M, out]``; ``matmul_reference``, and on an NVIDIA GPU the kernel where
    there is to be one order of sums."""
    reference = functools.partial(matmul_reference, dtype=jnp.float32)
    if not wants_one_order():
        return reference(x, weight)

    def kernel(x, weight):
        return in_pairs(list(router_logits_kernel(x, weight)))

    return by_platform(kernel, reference, x, weight)


def in_pairs(parts: list):
    """The sum of a power of two of arrays: of the first two, of the next two, and so on, and then of these."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def router_logits_kernel(x, weight, *, tiling: MatmulTiling | None = None, interpret=False) -> jax.Array:
    """Arrays ``[parts, M, out]`` whose sum ``in_pairs`` is ``matmul_reference`` in float32. Inputs are dealt to ``_PARTS``
    sums, ``_INPUTS`` at a time."""
    (M, _), X = x.shape, weight.shape[0]
    tiling = tiling or logits_tiling(M)
    return kernel_call(
        _router_logits,
        *(x, weight),
        grid=tiling.grid(M, X),
        out_shape=jax.ShapeDtypeStruct((tiling.num_splits, M, X), jnp.float32),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages if x.dtype == jnp.bfloat16 else 1,  # shared memory has room for no more
        interpret=interpret,
        tiling=tiling,
    )


def _router_logits(x_ref, weight_ref, logits_ref, *, tiling: MatmulTiling):
    (M, inputs), X, split = x_ref.shape, weight_ref.shape[0], pl.program_id(2)
    token, expert = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    parts = (split,) if tiling.num_splits > 1 else range(_PARTS)

    def add(i, sums):
        def load(ref, line, part):
            return load_tile(ref, line, block_ids(_PARTS * i + part, _INPUTS), _PARTS * _INPUTS)

        pairs = ((load(weight_ref, expert, part), load(x_ref, token, part)) for part in parts)
        return tuple(total + dot(*pair, trans_b=True) for total, pair in zip(sums, pairs, strict=True))

    zeros = jnp.zeros((tiling.outputs, tiling.tokens), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(inputs, _PARTS * _INPUTS), add, (zeros,) * len(parts))
    at = (jnp.broadcast_to(split, (tiling.tokens, tiling.outputs)), *tile_indices(token, expert))
    pltriton.store(logits_ref.at[at], in_pairs(list(sums)).T, mask=tile_mask(token, M, expert, X))
