"""The router's logits: a product with few outputs, whose sums have one order for any number of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.triton import block_ids, dot, kernel_call, load_tile, tile_indices, tile_mask

_PARTS = (
    4  # sums of an output, which are added up side by side: a single chain would take as long as reading its inputs
)
_LINE = 128  # bytes of a token that are added to one of them before it is the next one's turn


@dataclasses.dataclass(frozen=True)
class LogitsTiling:
    """How the work is cut, which changes no sum.

    Attributes:
      experts, tokens: of a program instance.
      num_warps: warps of 32 threads that run one instance.
      num_stages: how many trips of its loop have their loads under way at once.
      apart: whether an instance has one of the ``_PARTS`` sums. What reads the logits adds them up then.
    """

    experts: int
    tokens: int
    num_warps: int
    num_stages: int
    apart: bool = False


def logits_tiling(M: int) -> LogitsTiling:
    """The tiling for M tokens."""
    if M <= 512:
        tokens = 16 if M <= 16 else 32
        return LogitsTiling(16, tokens, tokens // 8, 4, apart=M <= 128)
    return LogitsTiling(64, 32, 4, 3)


def router_logits(x, weight) -> jax.Array:
    """The linear map ``[M, in], [out, in] -> float32 [M, out]``; ``matmul_reference``, and on an NVIDIA GPU the kernel."""

    def kernel(x, weight):
        return in_pairs(list(router_logits_kernel(x, weight)))

    return by_platform(kernel, functools.partial(matmul_reference, dtype=jnp.float32), x, weight)


def in_pairs(parts: list):
    """The sum of a power of two of arrays: of the first two, of the next two, and so on, and then of these."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def router_logits_kernel(x, weight, *, tiling: LogitsTiling | None = None, interpret=False) -> jax.Array:
    """Arrays ``[parts, M, out]`` whose sum ``in_pairs`` is ``matmul_reference`` in float32. Inputs are dealt to ``_PARTS``
    sums, ``_LINE`` bytes at a time."""
    (M, _), X = x.shape, weight.shape[0]
    tiling = tiling or logits_tiling(M)
    parts = _PARTS if tiling.apart else 1
    return kernel_call(
        _router_logits,
        *(x, weight),
        grid=(pl.cdiv(X, tiling.experts), pl.cdiv(M, tiling.tokens), parts),
        out_shape=jax.ShapeDtypeStruct((parts, M, X), jnp.float32),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )


def _router_logits(x_ref, weight_ref, logits_ref, *, tiling: LogitsTiling):
    (M, inputs), X, which = x_ref.shape, weight_ref.shape[0], pl.program_id(2)
    expert, token = block_ids(pl.program_id(0), tiling.experts), block_ids(pl.program_id(1), tiling.tokens)
    width, parts = _LINE // x_ref.dtype.itemsize, (which,) if tiling.apart else range(_PARTS)

    def add(i, sums):
        def load(ref, line, part):
            return load_tile(ref, line, block_ids(_PARTS * i + part, width), _PARTS * width)

        pairs = ((load(weight_ref, expert, part), load(x_ref, token, part)) for part in parts)
        return tuple(total + dot(*pair, trans_b=True) for total, pair in zip(sums, pairs, strict=True))

    zeros = jnp.zeros((tiling.experts, tiling.tokens), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(inputs, _PARTS * width), add, (zeros,) * len(parts))
    at = (jnp.broadcast_to(which, (tiling.tokens, tiling.experts)), *tile_indices(token, expert))
    pltriton.store(logits_ref.at[at], in_pairs(list(sums)).T, mask=tile_mask(token, M, expert, X))
