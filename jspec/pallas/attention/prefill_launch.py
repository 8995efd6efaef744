"""The sizes of a launch of ``jspec.pallas.attention.prefill_sm90``, its blocks of queries, and the tiles of cache slots
that a block reads."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.pallas.attention.parts import PARTS, Parts
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.triton import LOG2_E

WARPGROUPS = 2  # that compute
WARPGROUP_QUERIES = 64
ORDERED_TILE_SLOTS = 64  # cache slots of a tile in the order of sums of the kernels for few query tokens
TILE_SLOTS = 128  # or 64 where a key and a value have more numbers than these
FEW_NUMBERS = 384  # of a key and a value together
INSTANCES = 132  # multiprocessors of the largest Hopper GPU
BLOCK_HEADS = 16  # attention heads of a block, at most
MIN_BLOCKS = 64  # with fewer blocks, ``paged_attention`` keeps more of a GPU busy, because it splits rows
MAX_STAGES = 3  # tiles under way: as many as fit into shared memory beside the queries, and at most 3
SHARED_MEMORY = 227 * 1024  # bytes of a program instance
LOWEST = -1e30  # below any score; unlike -inf, it can be subtracted from itself


class PrefillLaunch(NamedTuple):
    """The static sizes of a launch. Letters are those of ``jspec.config``.

    Attributes:
      Hv: how many numbers a value has; H are those of a query and a key.
      tile_slots: cache slots of a tile.
      pages_first: whether a pool is ``[pages, P, G, H]``, and not ``[G, pages, P, H]``.
      block_heads: attention heads of a block, ``block_heads_of(R)``. So many, one after another, are a *group*.
      block_tokens: query tokens of a block.
      warpgroup_heads: attention heads whose queries one warpgroup has; its queries are numbered head by head.
      window: None, or how many slots a query token sees, its own included.
      scale: the factor of products of queries and keys.
      num_stages: how many tiles of keys, and of values, are under way at once.
      instances: how many program instances share the blocks.
      parts: which slots are a part, which is merged with those before it; None if all are one.
      interpret: None, or how to run on any platform, slowly: ``InterpretGPUParams`` of jax 0.11 and later.
    """

    B: int
    T: int
    G: int
    R: int
    H: int
    Hv: int
    P: int
    tile_slots: int
    pages_first: bool
    block_heads: int
    block_tokens: int
    warpgroup_heads: int
    window: int | None
    scale: float
    num_stages: int
    instances: int
    parts: Parts | None
    interpret: Any

    @classmethod
    def of(
        cls,
        q,
        v_pool,
        spec: AttentionSpec,
        num_stages: int | None,
        max_instances: int,
        interpret,
        pages_first: bool = False,
        one_order: bool = False,
    ) -> "PrefillLaunch":
        """The launch for queries ``[B, T, N, H]`` and values ``[G, pages, P, Hv]``, or ``[pages, P, G, Hv]``."""
        (B, T, N, H), Hv = q.shape, v_pool.shape[-1]
        P, G = v_pool.shape[1:3] if pages_first else (v_pool.shape[2], v_pool.shape[0])
        R, tile_slots = N // G, ORDERED_TILE_SLOTS if one_order else tile_slots_of(H, Hv)
        num_stages, heads = num_stages or num_stages_of(H, Hv, tile_slots), block_heads_of(R)
        tokens = WARPGROUPS * WARPGROUP_QUERIES // heads
        instances = min(max_instances, B * (N // heads) * (T // tokens))
        scale = H**-0.5 if spec.scale is None else spec.scale
        shape, block = (B, T, G, R, H, Hv, P), (tile_slots, pages_first, heads, tokens, max(1, heads // WARPGROUPS))
        return cls(*shape, *block, spec.window, scale, num_stages, instances, PARTS if one_order else None, interpret)

    @property
    def groups(self) -> int:
        """How many groups of attention heads there are, one or more for each KV head."""
        return self.G * (self.R // self.block_heads)

    def kv_head(self, group):
        """The KV head of a group."""
        return lax.div(group, jnp.int32(self.R // self.block_heads))

    @property
    def blocks(self) -> int:
        """How many blocks a row has for a group."""
        return self.T // self.block_tokens

    def blocks_of(self, instance):
        """How many blocks a program instance has."""
        trips, rest = divmod(self.B * self.groups * self.blocks, self.instances)
        return trips + jnp.where(self._place(instance, trips) < rest, 1, 0)

    def block(self, instance, i):
        """Row, group and number of the i-th block of a program instance.

        Instances take blocks in serpentine order, from the last row on. The later rows of a prefill batch are often
        later in the same prompt and have more to read, so every instance gets about as much to do."""
        index, row_blocks = i * self.instances + self._place(instance, i), self.groups * self.blocks
        row, place = lax.div(index, jnp.int32(row_blocks)), lax.rem(index, jnp.int32(row_blocks))
        number = self.blocks - 1 - lax.div(place, jnp.int32(self.groups))
        return self.B - 1 - row, lax.rem(place, jnp.int32(self.groups)), number

    def _place(self, instance, i):
        """The place of an instance in the i-th trip over all of them, of which every second runs backwards."""
        return jnp.where(lax.rem(jnp.int32(i), jnp.int32(2)) == 0, instance, self.instances - 1 - instance)

    @property
    def tile_pages(self) -> int:
        """How many pages a tile has."""
        return self.tile_slots // self.P


def suits_prefill(B: int, T: int, N: int, R: int) -> bool:
    """Whether the query tokens of a row fill blocks, and there are enough blocks for all multiprocessors."""
    queries, block = B * T * N, WARPGROUPS * WARPGROUP_QUERIES
    return T * block_heads_of(R) % block == 0 and queries >= MIN_BLOCKS * block


def block_heads_of(R: int) -> int:
    """How many attention heads a block has, all of one KV head: the largest power of two that divides R, at most 16."""
    return min(R & -R, BLOCK_HEADS)


def tile_slots_of(H: int, Hv: int) -> int:
    """How many cache slots a tile has, whose keys have H numbers and whose values Hv."""
    return TILE_SLOTS if H + Hv <= FEW_NUMBERS else TILE_SLOTS // 2


def num_stages_of(H: int, Hv: int, tile_slots: int) -> int:
    """How many tiles fit into shared memory, beside the queries of a program instance and some barriers."""
    queries, tile = WARPGROUPS * WARPGROUP_QUERIES * H, tile_slots * (H + Hv)
    return min((SHARED_MEMORY // 2 - queries - 512) // tile, MAX_STAGES)  # numbers of two bytes


def block_bounds(last, launch: PrefillLaunch):
    """The bounds of each block, from the last slot that each query token sees, int32 ``[B, T]``.

    Returns:
      int32 ``[B, blocks, 5]``: four tile numbers, between which a block masks slots, masks none, and masks slots again;
        and the newest slot that any of its queries sees. All layers of a prefill program share this array.
      int32 ``[B, blocks, 2, 64]``: the last slot that each query of each warpgroup sees.
    """
    last = last.reshape(launch.B, launch.blocks, launch.block_tokens)
    newest = jnp.max(last, axis=2)
    least = jnp.min(jnp.where(last < 0, newest[..., None], last), axis=2)
    end = (newest + launch.tile_slots) // launch.tile_slots
    first = unmasked = jnp.zeros_like(end)
    if launch.window is not None:
        first = jnp.maximum(least - (launch.window - 1), 0) // launch.tile_slots
        unmasked = jnp.minimum(pl.cdiv(jnp.maximum(newest - (launch.window - 1), 0), launch.tile_slots), end)
    masked = jnp.maximum((least + 1) // launch.tile_slots, unmasked)
    by_head = jnp.broadcast_to(last[:, :, None], (*last.shape[:2], launch.block_heads, launch.block_tokens))
    return (
        jnp.stack([first, unmasked, masked, end, newest], axis=-1),
        by_head.reshape(launch.B, launch.blocks, WARPGROUPS, WARPGROUP_QUERIES),
    )


def sinks_of_queries(sinks, launch: PrefillLaunch):
    """The sink of each query of a block, in bits: ``[N]`` -> float32 ``[groups, 2, 64]``, two warpgroups for each group."""
    shape = launch.groups, launch.block_heads, launch.block_tokens
    bits = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, LOWEST).reshape(*shape[:2], 1)
    return jnp.broadcast_to(bits, shape).reshape(launch.groups, WARPGROUPS, WARPGROUP_QUERIES)


def live_pages(table, bounds, launch: PrefillLaunch):
    """The table, padded to whole tiles, with page 0 in place of entries that may hold anything."""
    M = table.shape[1]
    newest = jnp.max(bounds[..., -1], axis=1, keepdims=True)
    live = jnp.arange(M, dtype=jnp.int32)[None] * launch.P <= newest
    return jnp.pad(jnp.where(live, table, 0), ((0, 0), (0, -M % launch.tile_pages)))
