"""RoPE and KV writes of many tokens in one launch, for prefill, whose attention is a launch of its own."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import KVScales, encode_in_kernel, token_scales
from jspec.pallas.attention.paged import as_pools, flat_pools, in_slots
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.rope import apply_rope_in_kernel, load_rope_operands
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.triton import broadcast_columns, kernel_call, line_indices

_NUMBERS = 4096  # numbers of a head that a program instance rotates or copies
_WARPS = 4


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def rope_and_write_kv_kernel(
    qkv,
    rotation: Rotation | None,
    k_pool,
    v_pool,
    tokens: PagedQueries,
    scales: KVScales | None = None,
    *,
    interpret=False,
):
    """Rotated queries, and pools with the rotated keys and the values of T new tokens of each row.

    The kernel of ``PagedView.rope_and_write_kv`` (``jspec.models.kv_cache``), for queries and pools of which
    ``ROPE_AND_WRITE_KV`` (``jspec.pallas.attention.table``) serves them.

    Args:
      qkv: ``[B, T, N + 2G, H]``, queries, keys and values, not rotated.
      tokens: the new tokens.
      rotation, k_pool, v_pool, scales: as of ``decode_attention_kernel``.

    Returns:
      queries ``[B, T, N, H]``, the two pools, and scales if those are of tokens.
    """
    (B, T, heads, H), (G, _, P, _) = qkv.shape, k_pool.shape
    N, block = heads - 2 * G, min(_NUMBERS // H, pl.next_power_of_2(T))
    pools, slot = flat_pools(k_pool, v_pool), tokens.written_slots(P)
    angles, scales = rotation or (), in_slots(scales)
    updated = [*pools, *(scales if scales is not None and scales.of_tokens else ())]
    q, *written = kernel_call(
        _rope_and_write_kv,
        *(qkv.reshape(B, T * heads, H), angles, *pools, scales, tokens.table, slot),
        grid=(pl.cdiv(T, block), heads, B),
        out_shape=[
            jax.ShapeDtypeStruct((B, T * N, H), qkv.dtype),
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated),
        ],
        num_warps=_WARPS,
        interpret=interpret,
        aliases={len(angles) + 1 + i: 1 + i for i in range(len(updated))},
        num_heads=(N, G),
        page_size=P,
        block=block,
        T=T,
    )
    pools = as_pools(written, k_pool)
    return q.reshape(B, T, N, H), *pools


def _rope_and_write_kv(
    qkv_ref,
    angle_refs,
    _k_ref,
    _v_ref,
    scale_refs,
    table_ref,
    slot_ref,
    q_out_ref,
    k_out_ref,
    v_out_ref,
    *scale_out_refs,
    num_heads: tuple[int, int],
    page_size: int,
    block: int,
    T: int,
):
    """Handle one head of ``block`` tokens of a row: rotate a query, rotate and write a key, or write a value."""
    (N, G), H = num_heads, qkv_ref.shape[2]
    head, b = pl.program_id(1), pl.program_id(2)
    token = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    real = token < T
    all_rotated = bool(angle_refs) and 2 * angle_refs[0].shape[2] == H
    width = H // 2 if all_rotated else H  # a head is handled in two halves if all of it is rotated

    def load(ref, line, start):
        line, column = line_indices(line, width)
        return pltriton.load(ref.at[b, line, column + start], mask=broadcast_columns(real, width), other=0.0)

    def store(ref, before, line, mask, parts):
        line, column = line_indices(line, width)
        for start, x in zip(range(0, H, width), parts, strict=True):
            pltriton.store(ref.at[before, line, column + start], x, mask=broadcast_columns(mask, width))

    if all_rotated:
        parts = [load(qkv_ref, token * (N + 2 * G) + head, start) for start in (0, width)]
        cos, sin = (load(ref, token, 0) for ref in angle_refs)
        x, y = (part.astype(jnp.float32) for part in parts)
        rotated = (x * cos - y * sin).astype(qkv_ref.dtype), (y * cos + x * sin).astype(qkv_ref.dtype)
    else:
        loaded = load_rope_operands(qkv_ref, angle_refs, b, token * (N + 2 * G) + head, token, real)
        parts, rotated = [loaded.heads], (apply_rope_in_kernel(loaded),)
    store(q_out_ref, b, token * N + jnp.minimum(head, N - 1), real & (head < N), rotated)

    # An interpreted kernel writes masked elements back as they were; slot 0 and page 0 send those to the null page.
    slot = pltriton.load(slot_ref.at[b, token], mask=real, other=-1)
    place = jnp.maximum(slot, 0)
    page = pltriton.load(table_ref.at[b, jax.lax.div(place, jnp.int32(page_size))], mask=slot >= 0, other=0)
    at, has_page = page * page_size + jax.lax.rem(place, jnp.int32(page_size)), (slot >= 0) & (page != 0)
    g = jax.lax.rem(jnp.maximum(head - N, 0), jnp.int32(G))
    is_key, is_value = has_page & (head >= N) & (head < N + G), has_page & (head >= N + G)
    if scale_refs is not None:
        rotated, scale = _as_stored(rotated, parts, head >= N + G, scale_refs, g)
        parts = rotated
        for ref, mask in zip(scale_out_refs, (is_key, is_value), strict=False):  # none if heads have scales
            pltriton.store(ref.at[g, at], scale, mask=mask)
    store(k_out_ref, g, at, is_key, rotated)
    store(v_out_ref, g, at, is_value, parts)


def _as_stored(rotated, parts, is_value, scale_refs, g):
    """In a kernel: the bytes of a key ``rotated``, or of a value ``parts`` if ``is_value``, both in parts ``[block,
    width]``; and their scale, ``[block]`` if that is of tokens."""
    numbers = [jnp.where(jnp.full(x.shape, is_value), x, key) for key, x in zip(rotated, parts, strict=True)]
    if not scale_refs.of_tokens:
        scale = jnp.where(is_value, scale_refs.v[g], scale_refs.k[g])
        return [encode_in_kernel(part, scale) for part in numbers], scale
    scale = token_scales(*numbers)
    return [encode_in_kernel(part, jnp.broadcast_to(scale, part.shape)) for part in numbers], scale.reshape(-1)
