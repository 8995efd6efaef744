"""Attention of a prefill pass over cached latents, on a Hopper GPU: is it right, and how long do two ways to it take?

    python -m benchmarks.latent_prefill                   # needs an NVIDIA GPU; ends within about 90 s
    python -m benchmarks.latent_prefill --smoke           # small and anywhere (jax 0.11 or later): the check alone

It exits 1 if a result is wrong. One way attends to the latents themselves, and multiplies queries with the map of keys
before, and sums of latents with the map of values behind; the other computes keys and values of all heads first. Times are
in microseconds, of a layer of GLM-4.7-Flash, from unrotated queries to sums of values. The floor is that of the operations
of the second way at 790 TFLOP/s."""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import GLM_47_FLASH
from jspec.config import Latent
from jspec.models.layers import rotation_at
from jspec.pallas.attention.reference import Rotation, Scores, apply_rope
from jspec.pallas.mla.absorb_queries import absorb_queries
from jspec.pallas.mla.attention import latent_attention_kernel
from jspec.pallas.mla.prefill import max_prefill_pages, up_projected_attention_kernel, up_projected_attention_reference
from jspec.pallas.mla.up_project import HeadMaps, up_project_kernel

P, T = 64, 128
PEAK = 790e12  # operations per second
CALLS = 8
SHAPE = GLM_47_FLASH
SCORES = Scores(SHAPE.head_dim**-0.5)


class Pass(NamedTuple):
    """``prompts`` texts of which ``read`` tokens each were read before, and ``segments`` more segments of each."""

    prompts: int
    read: int
    segments: int

    def __str__(self) -> str:
        return f"{self.prompts} x {self.segments * T} tokens behind {self.read:,}"

    @property
    def operations(self) -> float:
        """Of attention with keys of heads, and of making them."""
        latent = _latent()
        N, H, Hv = SHAPE.num_heads, SHAPE.head_dim, latent.value_dim
        new = self.segments * T
        pairs = self.prompts * (new * self.read + new * (new + 1) / 2)
        made = self.prompts * (self.read + new) * latent.rank * (H - latent.rotated + Hv)
        return 2.0 * N * (pairs * (H + Hv) + made)


PASSES = (Pass(16, 0, 4), Pass(1, 0, 64), Pass(1, 8192, 64), Pass(1, 24_000 // P * P, 64), Pass(1, 32_000 // P * P, 4))
CHECKED = Pass(1, 192, 6), Pass(3, 0, 2)  # within the room of ``jspec.pallas.mla.prefill``
SMOKE = Pass(1, 64, 1)


def _latent() -> Latent:
    assert SHAPE.latent is not None
    return SHAPE.latent


def arguments(which: Pass, heads: int, dtype: str):
    """Queries, whose last numbers are not rotated yet, and the other arguments of ``up_projected_attention_reference``."""
    latent, (prompts, read, segments) = _latent(), which
    own, M = SHAPE.head_dim - latent.rotated, -(-(read + segments * T) // P)
    keys, B = jax.random.split(jax.random.key(0), 4), prompts * segments
    pool = jax.random.normal(keys[0], (1, 1 + prompts * M, P, latent.cached), jnp.bfloat16)
    q = jax.random.normal(keys[1], (B, T, heads, SHAPE.head_dim), jnp.bfloat16)
    maps = (
        jax.random.normal(key, (heads, size, latent.rank))
        for key, size in zip(keys[2:], (own, latent.value_dim), strict=True)
    )
    k, v = ((latent.rank**-0.5 * weight).astype(jnp.bfloat16) for weight in maps)
    table = 1 + np.random.default_rng(0).permutation(prompts * M).reshape(prompts, M)
    start = read + T * np.arange(segments)
    positions = np.broadcast_to(start[None, :, None] + np.arange(T), (prompts, segments, T)).reshape(B, T)
    where = (
        jnp.asarray(np.repeat(table, segments, axis=0), jnp.int32),
        jnp.asarray(positions, jnp.int32),
        jnp.ones((B, T), bool),
    )
    return (
        q.astype(dtype),
        pool.astype(dtype),
        *where,
        jax.tree.map(lambda x: x.astype(dtype), HeadMaps(k, None, v, None)),
    )


def _rotation(positions) -> Rotation:
    rotation = rotation_at(positions, SHAPE.rope, _latent().rotated)
    assert rotation is not None
    return rotation


def over_latents(q, pool, table, positions, valid, maps: HeadMaps):
    """Attention to the latents themselves, as ``jspec.models.mla`` has it."""
    latent = _latent()
    q = absorb_queries(q, maps.keys, None, _rotation(positions))
    sums = latent_attention_kernel(q, pool, table, positions, valid, latent.rank, SCORES)
    return jnp.einsum("btnc,nhc->btnh", sums, maps.values)


def over_heads(q, pool, table, positions, valid, maps: HeadMaps, attend: Callable = up_projected_attention_kernel):
    """Attention to keys of heads."""
    latent = _latent()
    own, turning = jnp.split(q, [SHAPE.head_dim - latent.rotated], axis=-1)
    turned = apply_rope(turning, _rotation(positions))
    return attend(jnp.concatenate([own, turned], axis=-1), pool, table, positions, valid, maps, SCORES)


def expand(q, pool, table, positions, valid, maps: HeadMaps):
    """Keys and values alone, of as many pages as the pass has."""
    del valid
    pages = -(-(jnp.max(positions) + 1) // P) * (pool.shape[1] // table.shape[1])
    numbers = jnp.arange(max_prefill_pages(q.shape[0], T, table.shape[1], P), dtype=jnp.int32) % pool.shape[1]
    return up_project_kernel(pool, numbers, pages, maps)


WAYS: dict[str, Callable] = {
    "over latents": over_latents,
    "over keys of heads": over_heads,
    "of these, expanding": expand,
}


def check(which: Pass, heads: int, interpret) -> bool:
    """Print a line; whether both ways are right but for rounding. An interpreter runs the second way alone."""
    exact = functools.partial(over_heads, attend=up_projected_attention_reference)
    wanted = jax.jit(exact)(*arguments(which, heads, "float32"))
    attend = functools.partial(over_heads, attend=functools.partial(up_projected_attention_kernel, interpret=interpret))
    ways = {"over keys of heads": attend} | ({} if interpret else {"over latents": over_latents})
    args, good = arguments(which, heads, "bfloat16"), True
    for name, way in ways.items():
        error = float(jnp.max(jnp.abs(jax.jit(way)(*args) - wanted)) / jnp.max(jnp.abs(wanted)))
        good &= error < 0.02  # false for NaN
        print(f"{which}, {heads} heads, {name}: largest error {error:.2%} of the largest number", flush=True)
    return good


def microseconds(way: Callable, args) -> float:
    """Of a call, the best of four runs of several, each of which waits for the one before."""

    def several(q, *others):
        for _ in range(CALLS):
            out = way(q, *others)
            q = q + 0 * jax.tree.leaves(out)[0].reshape(-1)[0]
        return q

    compiled, times = jax.jit(several), []
    jax.block_until_ready(compiled(*args))
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / CALLS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small check of the interpreted kernel, on any machine")
    if parser.parse_args().smoke:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

        return 0 if check(SMOKE, 1, InterpretGPUParams()) else 1
    if jax.default_backend() != "gpu":
        parser.error(
            "no GPU: the kernels are compiled for Hopper GPUs; --smoke checks a small interpreted version here"
        )
    good = all([check(which, SHAPE.num_heads, None) for which in CHECKED])  # a list: both are printed
    print("| pass | floor, us | " + " | ".join(WAYS) + " |\n|" + "---|" * (2 + len(WAYS)), flush=True)
    for which in PASSES:
        args = arguments(which, SHAPE.num_heads, "bfloat16")
        took = (f"{microseconds(way, args):,.0f}" for way in WAYS.values())
        print(f"| {which} | {1e6 * which.operations / PEAK:,.0f} | " + " | ".join(took) + " |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
