"""The up-projection of multi-head latent attention: keys and values of all heads from latents in pages (DeepSeek-V2,
2024).

The work grows with the number of listed pages, not with the length of the list: a program instance without listed slots
ends at once."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import KVScales, decode, decode_in_kernel, decode_latents
from jspec.pallas.attention.paged import in_slots
from jspec.pallas.triton import MMA_SIZE, block_ids, broadcast_columns, dot, kernel_call, tile_indices
from jspec.pallas.weights.head_maps import HeadMaps, multiply_latents
from jspec.pallas.weights.tiles import (
    flat,
    group_width,
    has_factors,
    load_factors,
    load_numbers,
    places_of,
    shrink_of,
    tile_width,
)
from jspec.quantization.weight import Weight

_SLOTS, _COLUMNS, _DEPTH = 128, 128, 64  # of a tile of the product: slots, numbers of heads, numbers to be summed
_WARPS, _STAGES = 8, 3


def up_project_reference(
    pool, numbers, count, maps: HeadMaps, scales: KVScales | None = None, *, dtype
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the slots of the listed pages.

    Args:
      pool: ``[1, pages, P, Ck + Hr]``, latents and rotated keys, of ``dtype``, or bytes with ``scales``.
      numbers, count: as of ``jspec.pallas.attention.widened.widen_kernel``.
      maps: the up-projection.
      scales: of latents, or of the tokens in the pool (``jspec.pallas.attention.fp8``).
      dtype: of keys and values.

    Returns:
      keys ``[U, P, N, Hn + Hr]``, of which the last numbers are the rotated key, the same for all heads; and values
      ``[U, P, N, Hv]``. Sums are in float32, are multiplied by the scales of latents, and are rounded to ``dtype``.
    """
    scale = None if scales is None else scales.k[0, numbers] if scales.of_tokens else scales.k
    found = keys_and_values(pool[0, numbers], maps, scale, dtype)
    k, v = (jnp.where(count <= numbers.shape[0], part, jnp.nan) for part in found)
    return k, v


def keys_and_values(latents, maps: HeadMaps, scale, dtype) -> tuple[jax.Array, jax.Array]:
    """Keys ``[..., N, Hn + Hr]`` and values ``[..., N, Hv]`` of ``dtype``, from latents and rotated keys ``[..., Ck + Hr]``.

    These are bytes if there is a ``scale``, float32, of a shape which broadcasts to ``[...]``."""
    latents, rotated = jnp.split(latents, [maps.keys.inputs], axis=-1)
    if scale is not None:
        scale = jnp.broadcast_to(scale, latents.shape[:-1])
        latents, rotated = decode(latents, dtype), decode_latents(rotated, scale, dtype)
    k, v = (multiply_latents(latents, of, False, scale) for of in maps)
    rotated = jnp.broadcast_to(rotated[..., None, :], (*k.shape[:-1], rotated.shape[-1]))
    return jnp.concatenate([k, rotated], axis=-1), v


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))  # layers share one trace
def up_project_kernel(pool, numbers, count, maps: HeadMaps, scales: KVScales | None = None, *, dtype, interpret=False):
    """``up_project_reference`` as a kernel: a launch for keys, and one for values."""
    (_, pages, P, size), [U] = pool.shape, numbers.shape
    slots = U * P

    def project(of: Weight, rotated: int):
        N, n = of.shape[:2]
        out = jax.ShapeDtypeStruct((slots, N, n + rotated), dtype)
        latents = pool.reshape(pages * P, size), in_slots(scales)
        projected = kernel_call(
            _up_project,
            *(*latents, numbers, count.reshape(1), flat(of)),
            # The last instance of a block of slots copies the rotated key to all heads; those before it multiply.
            grid=(pl.cdiv(N * n, _COLUMNS) + (rotated > 0), pl.cdiv(slots, _SLOTS)),
            out_shape=out,
            num_warps=_WARPS,
            num_stages=_STAGES,
            interpret=interpret,
            P=P,
            rotated=rotated,
        )
        return projected.reshape(U, P, *out.shape[1:])

    return project(maps.keys, size - maps.keys.inputs), project(maps.values, 0)


def _up_project(pool_ref, latent_scale_refs, numbers_ref, count_ref, of: Weight, out_ref, *, P: int, rotated: int):
    part, tile, count = pl.program_id(0), pl.program_id(1), count_ref[jnp.int32(0)]
    (slots, N, H), Ck = out_ref.shape, of.inputs
    n, depth = H - rotated, tile_width(of, _DEPTH)
    width = N * n
    parts = pl.cdiv(width, _COLUMNS)

    @pl.when(tile * _SLOTS < count * P)
    def _():
        slot = block_ids(tile, _SLOTS)
        in_list = slot < slots
        page = pltriton.load(numbers_ref.at[slot // P], mask=in_list, other=0)
        line = page * P + slot % P

        def load(number):
            """Numbers of the lines, ``[rows, columns]``; as bytes have them if they are bytes."""
            x = pltriton.load(pool_ref.at[tile_indices(line, number)])
            if latent_scale_refs is None:
                return x
            return decode_in_kernel(x, out_ref.dtype, nan=not latent_scale_refs.of_tokens, as_loaded=True)

        def store(x, head, number, real):
            """Store ``x [rows, columns]`` where ``real``, at numbers of heads, one of each for a column."""
            if latent_scale_refs is not None:
                k, of_tokens = latent_scale_refs.k, latent_scale_refs.of_tokens
                x *= broadcast_columns(pltriton.load(k.at[0, line]), x.shape[1]) if of_tokens else k[0]
            at, head = tile_indices(slot, head)
            number = jnp.broadcast_to(number[None], x.shape)
            mask = broadcast_columns(in_list, x.shape[1]) & jnp.broadcast_to(real[None], x.shape)
            x = jnp.where(jnp.full(x.shape, count * P <= slots), x, jnp.nan)
            pltriton.store(out_ref.at[at, head, number], x.astype(out_ref.dtype), mask=mask)

        @pl.when(part < parts)
        def _():
            column = block_ids(part, _COLUMNS)
            real = column < width

            def add(i, total):
                x = load(places_of(of, block_ids(i, depth)))
                weight = load_numbers(of, jnp.where(real, column, 0), None, i * depth, depth, x.dtype)
                return total + dot(x, weight, trans_b=True)

            def factors(first):
                """Those of the columns, ``[1, columns]``, or 1."""
                return load_factors(of, column, real, first)[None] if has_factors(of) else 1.0

            zeros, group = jnp.zeros((_SLOTS, _COLUMNS), jnp.float32), group_width(of)
            if group is None:
                total = jax.lax.fori_loop(0, Ck // depth, add, zeros) * factors(0)
            else:
                each = group // depth

                def add_group(i, total):
                    sums = functools.reduce(lambda sums, j: add(i * each + j, sums), range(each), zeros)
                    return total + sums * factors(i * group)

                total = jax.lax.fori_loop(0, Ck // group, add_group, zeros)
                if Ck % group:  # the last group is not full
                    total += add(Ck // depth - 1, zeros) * factors(Ck // group * group)
            total *= shrink_of(of.form)
            store(total, column // n, column % n, real)

        if rotated:

            @pl.when(part == parts)
            def _():
                number = block_ids(0, rotated)
                x = load(Ck + number).astype(jnp.float32)

                def copy(head, _):
                    store(x, jnp.full(rotated, head), n + number, number >= 0)
                    return 0

                jax.lax.fori_loop(0, N, copy, 0)


def has_up_project_kernel(rank: int, rotated: int) -> bool:
    """Whether the kernel supports latents and rotated keys of these sizes."""
    return rank % _DEPTH == 0 and rotated >= MMA_SIZE and pl.next_power_of_2(rotated) == rotated
