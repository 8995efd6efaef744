"""How a launch of ``jspec.pallas.attention.prefill_sm90`` is cut into blocks of queries, and which tiles of cache slots
a block reads."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jspec.pallas.triton import LOG2_E

WARPGROUPS = 2  # that compute
PART = 64  # queries of one of them
SLOTS = 128  # of a tile, or 64 where keys and values have more numbers than these
FEW_NUMBERS = 384  # of a key and a value together
PROGRAMS = 132  # multiprocessors of the largest Hopper GPU
STAGES = 3  # tiles under way: as many as fit into shared memory beside the queries, and at most 3
SHARED = 227 * 1024  # bytes of shared memory that a program has
LOWEST = -1e30  # below any score; unlike -inf, it can be subtracted from itself


class Plan(NamedTuple):
    """What is static in a launch. Letters are those of ``jspec.config``; P is the page size, and R = N / G.

    Attributes:
      tokens: query tokens of a block.
      Hv: how many numbers a value has; H are those of a query and a key.
      slots: cache slots of a tile.
      pages_first: whether a pool is ``[pages, P, G, H]``, and not ``[G, pages, P, H]``.
      heads: attention heads whose queries one warpgroup has; its queries are numbered head by head.
      window: None, or how many slots a query token sees, its own included.
      scale: what products of queries and keys are multiplied by.
      stages: how many tiles of keys, and of values, are under way at once.
      programs: how many programs share the blocks.
      interpret: None, or how to run on any platform, slowly: ``InterpretGPUParams`` of jax 0.11 and later.
    """

    B: int
    T: int
    G: int
    R: int
    H: int
    Hv: int
    P: int
    slots: int
    pages_first: bool
    tokens: int
    heads: int
    window: int | None
    scale: float
    stages: int
    programs: int
    interpret: Any

    @classmethod
    def of(
        cls,
        q,
        v_pool,
        window: int | None,
        scale: float | None,
        stages: int | None,
        most_programs: int,
        interpret,
        pages_first: bool = False,
    ) -> "Plan":
        """The plan for queries ``[B, T, N, H]`` and values ``[G, pages, P, Hv]``, or ``[pages, P, G, Hv]``; without a scale
        it is H^-0.5."""
        (B, T, N, H), Hv = q.shape, v_pool.shape[-1]
        P, G = v_pool.shape[1:3] if pages_first else (v_pool.shape[2], v_pool.shape[0])
        R, slots = N // G, slots_of_tile(H, Hv)
        stages = stages or stages_of(H, Hv)
        tokens = WARPGROUPS * PART // R
        programs = min(most_programs, B * G * (T // tokens))
        heads, scale = max(1, R // WARPGROUPS), H**-0.5 if scale is None else scale
        return cls(B, T, G, R, H, Hv, P, slots, pages_first, tokens, heads, window, scale, stages, programs, interpret)

    @property
    def blocks(self) -> int:
        """Of a row and a KV head."""
        return self.T // self.tokens

    def blocks_of(self, program):
        """How many blocks a program has."""
        rounds, rest = divmod(self.B * self.G * self.blocks, self.programs)
        return rounds + jnp.where(self._place(program, rounds) < rest, 1, 0)

    def block(self, program, i):
        """Row, KV head and number of the i-th block of a program.

        Blocks are dealt like cards, forth and back over the programs, from the last row on. The later rows of a pass are
        often later in the same prompt and have more to read, so every program gets about as much to do.
        """
        dealt, of_a_row = i * self.programs + self._place(program, i), self.G * self.blocks
        row, place = lax.div(dealt, jnp.int32(of_a_row)), lax.rem(dealt, jnp.int32(of_a_row))
        number = self.blocks - 1 - lax.div(place, jnp.int32(self.G))
        return self.B - 1 - row, lax.rem(place, jnp.int32(self.G)), number

    def _place(self, program, i):
        """The place of a program in the i-th trip over all of them, which go forth and back."""
        return jnp.where(lax.rem(jnp.int32(i), jnp.int32(2)) == 0, program, self.programs - 1 - program)

    @property
    def pages(self) -> int:
        """Of a tile."""
        return self.slots // self.P


def slots_of_tile(H: int, Hv: int) -> int:
    """How many cache slots a tile has, whose keys have H numbers and whose values Hv."""
    return SLOTS if H + Hv <= FEW_NUMBERS else SLOTS // 2


def stages_of(H: int, Hv: int) -> int:
    """How many tiles fit into shared memory, beside the queries of a program and some barriers."""
    queries, tile = WARPGROUPS * PART * H, slots_of_tile(H, Hv) * (H + Hv)
    return min((SHARED // 2 - queries - 512) // tile, STAGES)  # numbers of two bytes


def block_bounds(last, plan: Plan):
    """What each block reads, from the last slot that each query token sees, int32 ``[B, T]``.

    Returns:
      int32 ``[B, blocks, 5]``: four tile numbers, between which a block masks slots, masks none, and masks slots again;
        and the newest slot that any of its queries sees. All layers of a pass share this array.
      int32 ``[B, blocks, 2, 64]``: the last slot that each query of each warpgroup sees.
    """
    last = last.reshape(plan.B, plan.blocks, plan.tokens)
    newest = jnp.max(last, axis=2)
    least = jnp.min(jnp.where(last < 0, newest[..., None], last), axis=2)
    end = (newest + plan.slots) // plan.slots
    first = unmasked = jnp.zeros_like(end)
    if plan.window is not None:
        first = jnp.maximum(least - (plan.window - 1), 0) // plan.slots
        unmasked = jnp.minimum(pl.cdiv(jnp.maximum(newest - (plan.window - 1), 0), plan.slots), end)
    masked = jnp.maximum((least + 1) // plan.slots, unmasked)
    by_head = jnp.broadcast_to(last[:, :, None], (*last.shape[:2], plan.R, plan.tokens))
    return (
        jnp.stack([first, unmasked, masked, end, newest], axis=-1),
        by_head.reshape(plan.B, plan.blocks, WARPGROUPS, PART),
    )


def sinks_of_queries(sinks, plan: Plan):
    """The sink of each query of a block, in bits: ``[N]`` -> float32 ``[G, 2, 64]``, two warpgroups for each KV head."""
    bits = jnp.maximum(sinks.astype(jnp.float32) * LOG2_E, LOWEST).reshape(plan.G, plan.R, 1)
    return jnp.broadcast_to(bits, (plan.G, plan.R, plan.tokens)).reshape(plan.G, WARPGROUPS, PART)


def live_pages(table, bounds, plan: Plan):
    """The table, in whole tiles, and with page 0 in place of entries that may hold anything."""
    M = table.shape[1]
    newest = jnp.max(bounds[..., -1], axis=1, keepdims=True)
    live = jnp.arange(M, dtype=jnp.int32)[None] * plan.P <= newest
    return jnp.pad(jnp.where(live, table, 0), ((0, 0), (0, -M % plan.pages)))
