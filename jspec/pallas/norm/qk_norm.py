"""Norms of each head of queries and keys, and of values if need be, in one launch, as in Qwen3, Gemma 3 and Gemma 4
(Henry et al., "Query-Key Normalization for Transformers", 2020)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import differentiable
from jspec.pallas.norm.rms_norm import norm
from jspec.pallas.triton import broadcast_columns, kernel_call, line_indices

_WARP_NUMBERS, _LINE = 1024, 512  # of a head, for a warp; bytes of a token's that a warp has by itself among several
_FEW = 64  # tokens, up to which a program instance has one warp


def qk_norm(qkv, weights, biases, num_heads: tuple[int, int], eps: float, kind: str):
    """``qk_norm_reference``, and on an NVIDIA GPU the kernel, which is for heads whose size is a power of two."""
    args, H = (qkv, weights, biases), qkv.shape[-1]
    if pl.next_power_of_2(H) != H:
        return qk_norm_reference(*args, num_heads, eps, kind)
    return differentiable(qk_norm_kernel, qk_norm_reference, *args, num_heads=num_heads, eps=eps, kind=kind)


def qk_norm_reference(qkv, weights, biases, num_heads: tuple[int, int], eps: float, kind: str):
    """Queries, keys and values, with ``norm`` applied to every head of queries and keys, or of all three.

    Args:
      qkv: ``[B, T, N + 2G, H]``.
      weights: of the norm of queries, and of that of keys, ``[H]`` each; a third one if values are normed, too.
      biases: likewise for the kind ``layer``, None for the others.
      num_heads: (N, G).
      eps, kind: as ``norm`` has them.

    Returns:
      an array like ``qkv``.
    """
    N, G = num_heads
    parts = jnp.split(qkv, [N, N + G], axis=2)
    normed = [norm(x, w, b, eps, kind) for x, w, b in zip(parts, weights, biases, strict=False)]
    return jnp.concatenate([*normed, *parts[len(normed) :]], axis=2)


@functools.partial(jax.jit, static_argnames=("num_heads", "eps", "kind", "interpret"))  # layers share one trace
def qk_norm_kernel(
    qkv, weights, biases, num_heads: tuple[int, int], eps: float, kind: str, gates=None, *, interpret=False
) -> jax.Array:
    """``qk_norm_reference`` as a kernel; a program instance has one head of some tokens. A warp has equally many whatever
    their number is, because the order of a sum follows from that.

    Normed heads are written in place, so that others need not be moved. The last numbers of ``gates [B, T, ...]`` are those
    of heads, by which these are multiplied (``times_gate``); None for nothing."""
    (B, T, heads, H), (N, G) = qkv.shape, num_heads
    num_warps = 1 if B * T <= _FEW or H * qkv.dtype.itemsize > _LINE else 4
    block = max(num_warps * _WARP_NUMBERS // H, 1)
    flat: Any = kernel_call(
        _qk_norm,
        *(qkv.reshape(B * T * heads, H), weights, biases, None if gates is None else gates.reshape(B * T, -1)),
        grid=(pl.cdiv(B * T, block), N + (len(weights) - 1) * G),
        out_shape=jax.ShapeDtypeStruct((B * T * heads, H), qkv.dtype),
        num_warps=num_warps,
        interpret=interpret,
        aliases={0: 0},
        num_heads=num_heads,
        block=block,
        eps=eps,
        kind=kind,
    )
    return flat.reshape(qkv.shape)


def times_gate(x, z):
    """x times ``silu(z)``, computed in float32, in the dtype of x."""
    z = z.astype(jnp.float32)
    return (x.astype(jnp.float32) * (z * jax.nn.sigmoid(z))).astype(x.dtype)


def _qk_norm(x_ref, weight_refs, bias_refs, gates_ref, out_ref, *, num_heads, block: int, eps: float, kind: str):
    (N, G), H = num_heads, x_ref.shape[1]
    head, heads = pl.program_id(1), N + 2 * G
    token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    real = token < x_ref.shape[0] // heads
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    at, mask = line_indices(jnp.where(real, token * heads + head, x_ref.shape[0]), H), broadcast_columns(real, H)

    def of_head(refs):
        if refs[0] is None:
            return None
        of_keys = refs[1][...] if len(refs) == 2 else jnp.where(head < N + G, refs[1][...], refs[2][...])
        return jnp.where(head < N, refs[0][...], of_keys)

    weight, bias = of_head(weight_refs), of_head(bias_refs)
    x = pltriton.load(x_ref.at[at], mask=mask, other=0.0)
    normed = norm(x, weight, bias, eps, kind, sum_row=functools.partial(jnp.sum, axis=-1, keepdims=True))
    if gates_ref is not None:
        line, column = line_indices(token, H)
        first = gates_ref.shape[1] - (heads - head) * H
        normed = times_gate(normed, pltriton.load(gates_ref.at[line, first + column], mask=mask, other=0.0))
    pltriton.store(out_ref.at[at], normed, mask=mask)
