"""Norms of each head of queries and keys, in one launch, as Qwen3 and Gemma 3 have them (Henry et al., "Query-Key
Normalization for Transformers", 2020)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import each, rows
from jspec.pallas.dispatch import by_platform
from jspec.pallas.norm.rms_norm import norm
from jspec.pallas.triton import kernel_call

_NUMBERS = 4096  # of a head's that a program norms
_WARP_NUMBERS = 1024  # of them that one warp has


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def norm_heads(qkv, weights, biases, num_heads: tuple[int, int], eps: float, kind: str):
    """``norm_heads_reference``, and on an NVIDIA GPU the kernel, which is for heads whose size is a power of two."""
    kernel, reference = (
        functools.partial(f, num_heads=num_heads, eps=eps, kind=kind) for f in (norm_heads_kernel, norm_heads_reference)
    )
    H = qkv.shape[-1]
    if pl.next_power_of_2(H) != H:
        return reference(qkv, weights, biases)
    return by_platform(kernel, reference, qkv, weights, biases)


@norm_heads.defjvp
def _(num_heads, eps, kind, primals, tangents):
    reference = functools.partial(norm_heads_reference, num_heads=num_heads, eps=eps, kind=kind)
    return jax.jvp(reference, primals, tangents)


def norm_heads_reference(qkv, weights, biases, num_heads: tuple[int, int], eps: float, kind: str):
    """Queries, keys and values, of which every head of queries and keys went through ``norm``.

    Args:
      qkv: ``[B, T, N + 2G, H]``.
      weights: of the norm of queries, and of that of keys, ``[H]`` each.
      biases: likewise for the kind ``layer``, (None, None) for the others.
      num_heads: (N, G).
      eps, kind: as ``norm`` has them.

    Returns:
      an array like ``qkv``.
    """
    N, G = num_heads
    q, k, v = jnp.split(qkv, [N, N + G], axis=2)
    q, k = (norm(x, w, b, eps, kind) for x, w, b in zip((q, k), weights, biases, strict=True))
    return jnp.concatenate([q, k, v], axis=2)


@functools.partial(jax.jit, static_argnames=("num_heads", "eps", "kind", "interpret"))  # layers share one trace
def norm_heads_kernel(
    qkv, weights, biases, num_heads: tuple[int, int], eps: float, kind: str, *, interpret=False
) -> jax.Array:
    """``norm_heads_reference`` as a kernel; each of its programs has one head of some tokens.

    Queries and keys are written where they were, so that values need not be moved."""
    (B, T, heads, H), (N, G) = qkv.shape, num_heads
    block = min(max(_NUMBERS // H, 1), pl.next_power_of_2(B * T))
    flat: Any = kernel_call(
        _norm_heads,
        *(qkv.reshape(B * T * heads, H), weights, biases),
        grid=(pl.cdiv(B * T, block), N + G),
        out_shape=jax.ShapeDtypeStruct((B * T * heads, H), qkv.dtype),
        num_warps=max(1, block * H // _WARP_NUMBERS),
        interpret=interpret,
        aliases={0: 0},
        num_heads=num_heads,
        block=block,
        eps=eps,
        kind=kind,
    )
    return flat.reshape(qkv.shape)


def _norm_heads(x_ref, weight_refs, bias_refs, out_ref, *, num_heads, block: int, eps: float, kind: str):
    (N, G), H = num_heads, x_ref.shape[1]
    head, heads = pl.program_id(1), N + 2 * G
    token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    real = token < x_ref.shape[0] // heads
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    at, mask = rows(jnp.where(real, token * heads + head, x_ref.shape[0]), H), each(real, H)

    weight, bias = (None if q is None else jnp.where(head < N, q[...], k[...]) for q, k in (weight_refs, bias_refs))
    x = pltriton.load(x_ref.at[at], mask=mask, other=0.0)
    pltriton.store(out_ref.at[at], norm(x, weight, bias, eps, kind), mask=mask)
