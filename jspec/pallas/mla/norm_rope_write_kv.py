"""What latent attention makes of the compressed vectors of new tokens, in one launch: norms, the rotated key, and the write
into the pages of the KV cache (DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.paged import last_slots
from jspec.pallas.attention.reference import Rotation, rotated
from jspec.pallas.norm.rms_norm import norm
from jspec.pallas.triton import block_ids, block_size, kernel_call

_WARPS = 4


def kept_latents(
    compressed, query_weight, latent_weight, eps: float, rotation: Rotation
) -> tuple[jax.Array, jax.Array]:
    """The vectors of queries after their norm, and what is cached of each token.

    Args:
      compressed: ``[B, T, Cq + Ck + Hr]``, the vector of queries of each token, its latent, and its key, not rotated.
      query_weight: ``[Cq]``, of the norm of vectors of queries, or None if they have no norm.
      latent_weight: ``[Ck]``, of the norm of latents.
      eps: of both norms.
      rotation: the rotary embedding of the tokens' positions, for keys of Hr numbers.

    Returns:
      ``[B, T, Cq]``, and the normed latent and the rotated key of each token, ``[B, T, Ck + Hr]``.
    """
    key_start = compressed.shape[-1] - 2 * rotation.cos.shape[-1]
    q, latent, key = jnp.split(compressed, [key_start - latent_weight.shape[0], key_start], axis=-1)
    q = q if query_weight is None else norm(q, query_weight, None, eps, "rms")
    key = rotated(key[:, :, None], rotation)[:, :, 0]
    return q, jnp.concatenate([norm(latent, latent_weight, None, eps, "rms"), key], axis=-1)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # layers share one trace
def keep_latents_kernel(
    compressed,
    query_weight,
    latent_weight,
    eps: float,
    rotation: Rotation,
    pool,
    table,
    positions,
    valid,
    *,
    interpret=False,
):
    """``kept_latents``, written into the pages of their rows, as a kernel; each of its programs has one token.

    Args:
      compressed, query_weight, latent_weight, eps, rotation: as for ``kept_latents``. The sizes of latents and of keys are
        powers of two.
      pool: ``[1, pages, P, Ck + Hr]``, in the dtype of ``compressed``; updated in place.
      table, positions, valid: as in ``PagedView``.

    Returns:
      the vectors of queries ``[B, T, Cq]``, and the pool.
    """
    (B, T, width), (_, pages, P, cached) = compressed.shape, pool.shape
    Cq, start = width - cached, compressed.reshape(B * T, width)
    slot = jnp.where(positions >= 0, last_slots(table, positions, valid, P), -1)
    angles = [angle.reshape(B * T, -1) for angle in rotation]
    normed = [] if query_weight is None else [jax.ShapeDtypeStruct((B * T, Cq), compressed.dtype)]
    flat = pool.reshape(pages * P, cached)
    flat, *q = kernel_call(
        _keep_latents,
        *(start, query_weight, latent_weight, angles, flat, table, slot.reshape(B * T)),
        grid=(B * T,),
        out_shape=[jax.ShapeDtypeStruct(flat.shape, flat.dtype), *normed],
        num_warps=_WARPS,
        interpret=interpret,
        aliases={len(jax.tree.leaves((start, query_weight, latent_weight, angles))): 0},  # the pool
        eps=eps,
        tokens=T,
        page_size=P,
    )
    q = q[0].reshape(B, T, Cq) if q else compressed[..., :Cq]
    return q, flat.reshape(pool.shape)


def _keep_latents(
    start_ref,
    query_weight_ref,
    latent_weight_ref,
    angle_refs,
    _pool_ref,
    table_ref,
    slot_ref,
    pool_out_ref,
    *q_out_ref,
    eps: float,
    tokens: int,
    page_size: int,
):
    i, rank, half = pl.program_id(0), latent_weight_ref.shape[0], angle_refs[0].shape[1]
    Cq = start_ref.shape[1] - rank - 2 * half

    def load(ref, columns, mask=None):
        return pltriton.load(
            ref.at[jnp.full(columns.shape, i), columns], mask=mask, other=None if mask is None else 0.0
        )

    def normed(x, size: int, weight):
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.sum(wide * wide) / size + eps)
        return wide.astype(x.dtype) * weight

    if query_weight_ref is not None:
        ids = block_ids(0, block_size(Cq, 1 << 30))
        inside = ids < Cq
        weight = pltriton.load(query_weight_ref.at[ids], mask=inside, other=0.0)
        x = normed(load(start_ref, ids, inside), Cq, weight)
        pltriton.store(q_out_ref[0].at[jnp.full(ids.shape, i), ids], x, mask=inside)

    # An interpreted kernel writes masked elements back as they were; slot 0 and page 0 send those to the null page.
    slot = slot_ref[i]
    place = jnp.maximum(slot, 0)
    page = table_ref[jax.lax.div(i, jnp.int32(tokens)), jax.lax.div(place, jnp.int32(page_size))]
    kept = (slot >= 0) & (page != 0)
    at = jnp.where(kept, page, 0) * page_size + jax.lax.rem(place, jnp.int32(page_size))

    def store(columns, x):
        where = pool_out_ref.at[jnp.full(columns.shape, at), columns]
        pltriton.store(where, x.astype(pool_out_ref.dtype), mask=jnp.broadcast_to(kept, columns.shape))

    ids, pair = block_ids(0, rank), block_ids(0, half)
    store(ids, normed(load(start_ref, Cq + ids), rank, pltriton.load(latent_weight_ref.at[ids])))
    a, b = (load(start_ref, Cq + rank + offset + pair).astype(jnp.float32) for offset in (0, half))
    cos, sin = (load(ref, pair) for ref in angle_refs)
    store(rank + pair, a * cos - b * sin)
    store(rank + half + pair, b * cos + a * sin)
