"""Writes the latent KV of new tokens in one launch: norms, the rotated key, and the write into the pages of the KV cache
(DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import KVScales, encode_in_kernel, token_scales
from jspec.pallas.attention.paged import in_slots
from jspec.pallas.attention.reference import Rotation, apply_rope
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.norm.rms_norm import norm
from jspec.pallas.triton import block_ids, block_size, kernel_call

_WARPS = 4


def norm_rope_latents(
    compressed, query_weight, latent_weight, eps: float, rotation: Rotation
) -> tuple[jax.Array, jax.Array]:
    """The compressed queries after their norm, and what is cached of each token.

    Args:
      compressed: ``[B, T, Cq + Ck + Hr]``, the compressed query of each token, its latent, and its key, not rotated.
      query_weight: ``[Cq]``, of the norm of compressed queries, or None if they have no norm.
      latent_weight: ``[Ck]``, of the norm of latents.
      eps: of both norms.
      rotation: the rotary embedding of the tokens' positions, for keys of Hr numbers.

    Returns:
      ``[B, T, Cq]``, and the normed latent and the rotated key of each token, ``[B, T, Ck + Hr]``.
    """
    key_start = compressed.shape[-1] - 2 * rotation.cos.shape[-1]
    q, latent, key = jnp.split(compressed, [key_start - latent_weight.shape[0], key_start], axis=-1)
    q = q if query_weight is None else norm(q, query_weight, None, eps, "rms")
    key = apply_rope(key[:, :, None], rotation)[:, :, 0]
    return q, jnp.concatenate([norm(latent, latent_weight, None, eps, "rms"), key], axis=-1)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # layers share one trace
def norm_rope_write_kv_kernel(
    compressed,
    query_weight,
    latent_weight,
    eps: float,
    rotation: Rotation,
    pool,
    tokens: PagedQueries,
    scales: KVScales | None = None,
    *,
    interpret=False,
):
    """``norm_rope_latents``, written into the pages of their rows, as a kernel; a program instance has one token.

    Args:
      compressed, query_weight, latent_weight, eps, rotation: as for ``norm_rope_latents``. The sizes of latents and of
        keys are powers of two.
      pool: ``[1, pages, P, Ck + Hr]``, in the dtype of ``compressed``, or bytes with ``scales``; updated in place.
      tokens: the new tokens.
      scales: of latents, or of the tokens in the pool, which are updated too (``jspec.pallas.attention.fp8``).

    Returns:
      the compressed queries ``[B, T, Cq]``, the pool, and scales if those are of tokens.
    """
    (B, T, width), (_, pages, P, cached) = compressed.shape, pool.shape
    Cq, start = width - cached, compressed.reshape(B * T, width)
    slot = tokens.written_slots(P)
    angles = [angle.reshape(B * T, -1) for angle in rotation]
    normed = [] if query_weight is None else [jax.ShapeDtypeStruct((B * T, Cq), compressed.dtype)]
    flat, scales = pool.reshape(pages * P, cached), in_slots(scales)
    updated = [flat, *([scales.k] if scales is not None and scales.of_tokens else [])]
    before = len(jax.tree.leaves((start, query_weight, latent_weight, angles)))
    written = kernel_call(
        _norm_rope_write_kv,
        *(start, query_weight, latent_weight, angles, flat, scales, tokens.table, slot.reshape(B * T)),
        grid=(B * T,),
        out_shape=[*(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated), *normed],
        num_warps=_WARPS,
        interpret=interpret,
        aliases={before + i: i for i in range(len(updated))},
        eps=eps,
        T=T,
        page_size=P,
    )
    q = written[-1].reshape(B, T, Cq) if normed else compressed[..., :Cq]
    of_tokens = (KVScales(scale.reshape(pool.shape[:3]), None) for scale in written[1 : len(updated)])
    return q, written[0].reshape(pool.shape), *of_tokens


def _norm_rope_write_kv(
    start_ref,
    query_weight_ref,
    latent_weight_ref,
    angle_refs,
    _pool_ref,
    scale_refs,
    table_ref,
    slot_ref,
    pool_out_ref,
    *out_refs,
    eps: float,
    T: int,
    page_size: int,
):
    i, rank, half = pl.program_id(0), latent_weight_ref.shape[0], angle_refs[0].shape[1]
    Cq = start_ref.shape[1] - rank - 2 * half

    def load(ref, columns, mask=None):
        return pltriton.load(
            ref.at[jnp.full(columns.shape, i), columns], mask=mask, other=None if mask is None else 0.0
        )

    def normed(x, size: int, weight):
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt(jnp.sum(x32 * x32) / size + eps)
        return x32.astype(x.dtype) * weight

    if query_weight_ref is not None:
        ids = block_ids(0, block_size(Cq, 1 << 30))
        mask = ids < Cq
        weight = pltriton.load(query_weight_ref.at[ids], mask=mask, other=0.0)
        x = normed(load(start_ref, ids, mask), Cq, weight)
        pltriton.store(out_refs[-1].at[jnp.full(ids.shape, i), ids], x, mask=mask)

    # An interpreted kernel writes masked elements back as they were; slot 0 and page 0 send those to the null page.
    slot = slot_ref[i]
    place = jnp.maximum(slot, 0)
    page = table_ref[jax.lax.div(i, jnp.int32(T)), jax.lax.div(place, jnp.int32(page_size))]
    has_page = (slot >= 0) & (page != 0)
    at = jnp.where(has_page, page, 0) * page_size + jax.lax.rem(place, jnp.int32(page_size))

    ids, pair = block_ids(0, rank), block_ids(0, half)
    latent = normed(load(start_ref, Cq + ids), rank, pltriton.load(latent_weight_ref.at[ids]))
    a, b = (load(start_ref, Cq + rank + offset + pair).astype(jnp.float32) for offset in (0, half))
    cos, sin = (load(ref, pair) for ref in angle_refs)
    parts = [part.astype(start_ref.dtype) for part in (latent, a * cos - b * sin, b * cos + a * sin)]
    if scale_refs is not None:
        of_tokens = scale_refs.of_tokens
        scale = token_scales(*parts) if of_tokens else scale_refs.k[jnp.full(1, 0)]
        parts = [encode_in_kernel(part, jnp.broadcast_to(scale, part.shape)) for part in parts]
        if of_tokens:
            mask = jnp.broadcast_to(has_page, scale.shape)
            pltriton.store(out_refs[0].at[0, jnp.full(scale.shape, at)], scale, mask=mask)
    for columns, part in zip((ids, rank + pair, rank + half + pair), parts, strict=True):
        where = pool_out_ref.at[jnp.full(columns.shape, at), columns]
        pltriton.store(where, part, mask=jnp.broadcast_to(has_page, columns.shape))
