"""Attention over the paged cache on a GPU: is the kernel right, and how far is it from reading the live slots once?

    python -m benchmarks.attention                  # needs an NVIDIA GPU
    python -m benchmarks.attention --sweep          # times other tilings as well
    python -m benchmarks.attention --json FILE      # also writes a result, see benchmarks/results.py
    python -m benchmarks.attention --smoke          # small and anywhere: interpreted kernels, meaningless times

It exits 1 if the kernel is wrong. The floor of a time is that of reading the keys and values of the live slots once, at the
read rate that is measured first. A figure's key in the result is its shape; times are in microseconds."""

import argparse
import functools
import math
import pathlib
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from benchmarks import bandwidth, results
from benchmarks.verify import FULL, L2_BYTES, SMOKE, seconds_per_call
from jspec.pallas.attention.flash import AttentionTiling
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference

POSITIONS = 4  # which argument ties a call to the one before
MOST_COPIES = 16


@dataclass(frozen=True)
class Shape:
    """T query tokens in each of B rows. They are the last of ``live`` cache slots, of which there are ``max_len``."""

    B: int
    T: int
    live: int
    max_len: int
    N: int = 32
    G: int = 8
    H: int = 128
    P: int = 64
    window: int | None = None

    @property
    def bytes(self) -> int:
        """How many bytes of keys and values have to be read, in bfloat16."""
        return 2 * 2 * self.B * self.live * self.G * self.H

    @property
    def copies(self) -> int:
        """How many sets of pages a timed loop goes through: in a decode step too, the weights push the cache out of L2."""
        return min(max(2, math.ceil(2 * L2_BYTES / self.bytes)), MOST_COPIES)

    def __str__(self):
        return f"{self.B:>3} x {self.T:>3}, {self.live:>5} of {self.max_len:>5}"


SHAPES = (
    *(Shape(1, 1, 1024, 1024), Shape(1, 5, 1024, 1024), Shape(16, 5, 1024, 1024), Shape(16, 5, 512, 4096)),
    *(Shape(64, 5, 1024, 1024), Shape(1, 5, 8192, 16384), Shape(1, 256, 1024, 1024)),
)
ODD = (
    *(Shape(4, 9, 1000, 1024), Shape(4, 5, 1000, 1024, N=7, G=1), Shape(4, 5, 1000, 1008, H=64, P=16)),
    *(Shape(4, 5, 1000, 1024, window=100), Shape(4, 1, 1000, 1008, H=256, P=48, N=8)),
)
TINY = (Shape(2, 5, 40, 64, N=4, G=2, H=16, P=16), Shape(1, 1, 17, 48, N=4, G=2, H=16, P=16, window=5))


def sweep() -> list[AttentionTiling]:
    """Tile sizes, stages and splits against each other, the rest one at a time."""
    base = AttentionTiling()
    tiles = ((8192, 3), (8192, 4), (16384, 2), (16384, 3), (16384, 4), (32768, 2), (32768, 3))
    grid = [replace(base, tile_bytes=t, num_stages=s, instances=p) for t, s in tiles for p in (132, 264, 528)]
    others = [replace(base, **{name: n}) for name, n in (("warps", 2), ("warps", 8), ("rows", 32), ("rows", 128))]
    return [*grid, *others, replace(base, rows=128, warps=8)]


def inputs(key, shape: Shape, dtype: str, ragged: bool):
    """Arguments of ``paged_attention``: scattered pages, NaN wherever nothing live is.

    Ragged rows have up to ``live`` slots and some invalid queries at their end, and the last of several rows is dead.
    """
    keys = jax.random.split(key, 6)
    B, T, M = shape.B, shape.T, math.ceil(shape.max_len / shape.P)
    q = jax.random.normal(keys[0], (B, T, shape.N, shape.H)).astype(dtype)
    lengths = jax.random.randint(keys[1], (B,), T, shape.live + 1) if ragged else jnp.full(B, shape.live)
    positions = lengths[:, None] - T + jnp.arange(T)[None]
    kept = jax.random.randint(keys[2], (B,), 1, T + 1) if ragged else jnp.full(B, T)
    valid = jnp.arange(T)[None] < jnp.where(ragged & (B > 1) & (jnp.arange(B) == B - 1), 0, kept)[:, None]
    table = 1 + jax.random.permutation(keys[3], B * M).reshape(B, M)

    newest = jnp.max(jnp.where(valid, positions, -1), axis=1)
    known = jnp.arange(M * shape.P).reshape(1, M, shape.P) <= newest[:, None, None]
    known = jnp.zeros((1 + B * M, shape.P), bool).at[table].set(known)[None, :, :, None]

    def pool(key):
        numbers = jax.random.normal(key, (shape.G, 1 + B * M, shape.P, shape.H), dtype)
        return jnp.where(known, numbers, jnp.full((), jnp.nan, dtype))

    return q, pool(keys[4]), pool(keys[5]), table.astype(jnp.int32), positions.astype(jnp.int32), valid


def check(shapes, dtypes, seeds: int, interpret: bool) -> bool:
    """Print a line per shape and dtype; whether all errors are within what rounding to the dtype explains."""
    print(
        f"{'B x T, live of max_len':<24} {'heads':>5} {'H':>4} {'P':>3} {'W':>4} {'dtype':>9} {'error / rounding':>17}"
    )
    good = True
    for shape in shapes:
        for dtype in dtypes:

            @jax.jit
            def worst(args, shape=shape, dtype=dtype):
                q, k, v, *where = args
                got = paged_attention_kernel(*args, window=shape.window, interpret=interpret)
                exact = functools.partial(paged_attention_reference, window=shape.window)
                q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
                wanted, magnitude = exact(q, k, v, *where), exact(q, k, jnp.abs(v), *where)
                # bfloat16 rounds each weight, and then the result, by at most 2^-8 of itself.
                rounding = (2**-7 if dtype == "bfloat16" else 0.0) * magnitude + 1e-5
                error = jnp.abs(got.astype(jnp.float32) - wanted) / rounding
                return jnp.max(jnp.where(args[-1][:, :, None, None], error, jnp.abs(got.astype(jnp.float32))))

            make = jax.jit(functools.partial(inputs, shape=shape, dtype=dtype, ragged=True))
            error = max(float(worst(make(jax.random.key(seed)))) for seed in range(seeds))
            ok = error <= 1  # false for NaN
            good &= ok
            model = f"{shape.N:>3}/{shape.G} {shape.H:>4} {shape.P:>3} {shape.window or '-':>4} {dtype:>9}"
            print(f"{shape} {model} {error:>17.2f}" + ("" if ok else "  WRONG"), flush=True)
    return good


def timed_inputs(shape: Shape) -> list:
    """Arguments of the calls of a loop: the same queries over different pages of one pool."""
    many = replace(shape, B=shape.B * shape.copies)
    q, k, v, table, positions, valid = jax.jit(functools.partial(inputs, shape=many, dtype="bfloat16", ragged=False))(
        jax.random.key(0)
    )
    rows = [slice(i * shape.B, (i + 1) * shape.B) for i in range(shape.copies)]
    return [(q[row], k, v, table[row], positions[row], valid[row]) for row in rows]


def kernel(shape: Shape, tiling: AttentionTiling | None, interpret: bool):
    return functools.partial(paged_attention_kernel, window=shape.window, tiling=tiling, interpret=interpret)


def measure(shapes, sizes, interpret: bool, result: results.Result):
    """Print a line for each shape and put its time into ``result``."""
    rate = result.device["bandwidth"]
    print(f"\nbfloat16, 32/8 heads of 128; floor: live slots read once at {rate / 1e9:,.0f} GB/s; times in us")
    print(f"{'B x T, live of max_len':<24} {'MB':>6} {'floor':>6} {'kernel':>7} {'ratio':>6} {'reference':>7}")
    for shape in shapes:
        calls = timed_inputs(shape)
        reference = functools.partial(paged_attention_reference, window=shape.window)
        functions = kernel(shape, None, interpret), reference
        took, by_reference = (1e6 * seconds_per_call(f, calls, POSITIONS, sizes) for f in functions)
        floor = 1e6 * shape.bytes / rate
        print(
            f"{shape} {shape.bytes / 1e6:>6.1f} {floor:>6.1f} {took:>7.1f} {took / floor:>6.2f} {by_reference:>7.1f}",
            flush=True,
        )
        key = " ".join(str(shape).split())
        result.measured[key], result.floors[key] = took, floor
        result.details[key] = {"unit": "us", "bytes": shape.bytes, "reference": by_reference}


def measure_tilings(shapes, tilings, sizes, interpret: bool):
    """Print a row per tiling, a column per shape; a dash where the tiling does not fit."""
    print(f"\ntimes in us; columns: {'; '.join(' '.join(str(shape).split()) for shape in shapes)}")
    print(f"{'tile':>6} {'queries':>7} {'instances':>9} {'warps':>5} {'stages':>6}")
    calls = [timed_inputs(shape) for shape in shapes]
    for t in tilings:
        times = []
        for shape, args in zip(shapes, calls, strict=True):
            try:
                times.append(f"{1e6 * seconds_per_call(kernel(shape, t, interpret), args, POSITIONS, sizes):>7.1f}")
            except jax.errors.JaxRuntimeError:  # more shared memory than a multiprocessor has
                times.append(f"{'-':>7}")
        setting = f"{t.tile_bytes:>6} {t.queries:>7} {t.instances:>9} {t.num_warps:>5} {t.num_stages:>6}"
        print(setting, *times, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small shapes, interpreted kernels, any machine")
    parser.add_argument("--sweep", action="store_true", help="time other tilings too")
    parser.add_argument("--only", choices=("check", "time"), help="one half of it")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernel is compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    shapes, odd, sizes, seeds = (TINY, (), SMOKE, 1) if args.smoke else (SHAPES, ODD, FULL, 3)
    good = args.only == "time" or check((*shapes, *odd), ("bfloat16", "float32"), seeds, args.smoke)
    if args.only != "check":
        rates, rate = bandwidth.for_floors(None)
        result = results.begin("attention", {"dtype": "bfloat16", "smoke": args.smoke}, rate, rates)
        measure(shapes, sizes, args.smoke, result)
        if args.json:
            results.write(result, args.json)
    if args.sweep:
        measure_tilings(shapes, sweep()[:1] if args.smoke else sweep(), sizes, args.smoke)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
