"""The up-projection of multi-head latent attention: keys and values of all heads from latents in pages (DeepSeek-V2,
2024).

The work grows with the number of listed pages, not with the length of the list: a program instance without listed slots
ends at once."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.mla.head_maps import HeadMap, HeadMaps, multiply_latents
from jspec.pallas.mla.map_tiles import (
    group_width,
    has_factors,
    load_factors,
    load_numbers,
    places_of,
    shrink_of,
    tile_width,
)
from jspec.pallas.triton import MMA_SIZE, block_ids, broadcast_columns, dot, kernel_call, tile_indices

_SLOTS, _COLUMNS, _DEPTH = 128, 128, 64  # of a tile of the product: slots, numbers of heads, numbers to be summed
_WARPS, _STAGES = 8, 3


def up_project(pool, numbers, count, maps: HeadMaps) -> tuple[jax.Array, jax.Array]:
    """``up_project_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(up_project_kernel, up_project_reference, pool, numbers, count, maps)


def up_project_reference(pool, numbers, count, maps: HeadMaps) -> tuple[jax.Array, jax.Array]:
    """Keys and values of the slots of the listed pages.

    Args:
      pool: ``[1, pages, P, Ck + Hr]``, latents and rotated keys.
      numbers: int32 ``[U]``, pages of the pool.
      count: int32, how many of them are listed, the first ones; results of the others are arbitrary. If it is more than
        U, all results are NaN.
      maps: the up-projection.

    Returns:
      keys ``[U, P, N, Hn + Hr]``, of which the last numbers are the rotated key, the same for all heads; and values
      ``[U, P, N, Hv]``. Sums are in float32 and are rounded to the dtype of the pool.
    """
    latents = pool[0, numbers]
    return keys_and_values(jnp.where(count <= numbers.shape[0], latents, jnp.nan), maps)


def keys_and_values(latents, maps: HeadMaps) -> tuple[jax.Array, jax.Array]:
    """Keys ``[..., N, Hn + Hr]`` and values ``[..., N, Hv]`` of latents and rotated keys ``[..., Ck + Hr]``."""
    latents, rotated = jnp.split(latents, [maps.keys.rank], axis=-1)
    k, v = (multiply_latents("...c,nhc->...nh", latents, of) for of in maps)
    rotated = jnp.broadcast_to(rotated[..., None, :], (*k.shape[:-1], rotated.shape[-1]))
    return jnp.concatenate([k, rotated], axis=-1), v


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def up_project_kernel(pool, numbers, count, maps: HeadMaps, *, interpret=False):
    """``up_project_reference`` as a kernel: a launch for keys, and one for values."""
    (_, pages, P, size), [U] = pool.shape, numbers.shape
    slots = U * P

    def project(of: HeadMap, rotated: int):
        N, n = of.weight.shape[:2]
        out = jax.ShapeDtypeStruct((slots, N, n + rotated), pool.dtype)
        projected = kernel_call(
            _up_project,
            *(pool.reshape(pages * P, size), numbers, count.reshape(1), of.flat),
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

    return project(maps.keys, size - maps.keys.rank), project(maps.values, 0)


def _up_project(pool_ref, numbers_ref, count_ref, of: HeadMap, out_ref, *, P: int, rotated: int):
    part, tile, count = pl.program_id(0), pl.program_id(1), count_ref[jnp.int32(0)]
    (slots, N, H), Ck = out_ref.shape, of.rank
    n, depth = H - rotated, tile_width(of, _DEPTH)
    width = N * n
    parts = pl.cdiv(width, _COLUMNS)

    @pl.when(tile * _SLOTS < count * P)
    def _():
        slot = block_ids(tile, _SLOTS)
        in_list = slot < slots
        page = pltriton.load(numbers_ref.at[slot // P], mask=in_list, other=0)
        line = page * P + slot % P

        def store(x, head, number, real):
            """Store ``x [rows, columns]`` where ``real``, at numbers of heads, one of each for a column."""
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
                number = places_of(of, block_ids(i, depth))
                x = pltriton.load(pool_ref.at[tile_indices(line, number)])
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
            total *= shrink_of(of)
            store(total, column // n, column % n, real)

        if rotated:

            @pl.when(part == parts)
            def _():
                number = block_ids(0, rotated)
                x = pltriton.load(pool_ref.at[tile_indices(line, Ck + number)]).astype(jnp.float32)

                def copy(head, _):
                    store(x, jnp.full(rotated, head), n + number, number >= 0)
                    return 0

                jax.lax.fori_loop(0, N, copy, 0)


def has_up_project_kernel(rank: int, rotated: int) -> bool:
    """Whether the kernel supports latents and rotated keys of these sizes."""
    return rank % _DEPTH == 0 and rotated >= MMA_SIZE and pl.next_power_of_2(rotated) == rotated
