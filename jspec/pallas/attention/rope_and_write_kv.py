"""RoPE and KV writes of many tokens in one launch, for prefill, whose attention is a launch of its own."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.rope import apply_rope_in_kernel, load_rope_operands
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.triton import broadcast_columns, kernel_call, line_indices

_NUMBERS = 4096  # numbers of a head that a program instance rotates or copies
_WARPS = 4


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def rope_and_write_kv_kernel(qkv, rotation: Rotation | None, k_pool, v_pool, tokens: PagedQueries, *, interpret=False):
    """Rotated queries, and pools with the rotated keys and the values of T new tokens of each row.

    The kernel of ``PagedView.rope_and_write_kv`` (``jspec.models.kv_cache``), for queries and pools of which
    ``paged.has_kernel`` is true.

    Args:
      qkv: ``[B, T, N + 2G, H]``, queries, keys and values, not rotated.
      rotation: the rotary embedding of the tokens' positions, None if nothing is rotated.
      k_pool, v_pool: ``[G, pages, P, H]``, in the dtype of qkv; updated in place.
      tokens: the new tokens.

    Returns:
      queries ``[B, T, N, H]``, and the two pools.
    """
    (B, T, heads, H), (G, pages, P, _) = qkv.shape, k_pool.shape
    N, block = heads - 2 * G, min(_NUMBERS // H, pl.next_power_of_2(T))
    pools = [pool.reshape(G, pages * P, H) for pool in (k_pool, v_pool)]
    slot = tokens.written_slots(P)
    angles = rotation or ()
    shapes = [(B, T * N, H), *(pool.shape for pool in pools)]
    q, *pools = kernel_call(
        _rope_and_write_kv,
        *(qkv.reshape(B, T * heads, H), *angles, *pools, tokens.table, slot),
        grid=(pl.cdiv(T, block), heads, B),
        out_shape=[jax.ShapeDtypeStruct(shape, qkv.dtype) for shape in shapes],
        num_warps=_WARPS,
        interpret=interpret,
        aliases={len(angles) + 1: 1, len(angles) + 2: 2},
        num_heads=(N, G),
        page_size=P,
        block=block,
        T=T,
    )
    return q.reshape(B, T, N, H), *(pool.reshape(k_pool.shape) for pool in pools)


def _rope_and_write_kv(qkv_ref, *refs, num_heads: tuple[int, int], page_size: int, block: int, T: int):
    """Handle one head of ``block`` tokens of a row: rotate a query, rotate and write a key, or write a value."""
    angle_refs, (_k_ref, _v_ref, table_ref, slot_ref, q_out_ref, k_out_ref, v_out_ref) = refs[:-7], refs[-7:]
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
    store(k_out_ref, g, at, has_page & (head >= N) & (head < N + G), rotated)
    store(v_out_ref, g, at, has_page & (head >= N + G), parts)
