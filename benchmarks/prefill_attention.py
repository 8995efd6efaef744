"""Attention of a prefill pass on a Hopper GPU: is the kernel right, does a segment's result depend on its neighbours, and
how many TFLOP/s do the kernel and its alternatives reach?

    python -m benchmarks.prefill_attention                   # needs an NVIDIA GPU; ends within about 80 s
    python -m benchmarks.prefill_attention --seconds 60      # leaves out what does not fit
    python -m benchmarks.prefill_attention --smoke           # small and anywhere (jax 0.11 or later): the check alone

It exits 1 if the kernel is wrong. A pass is n segments of c tokens, 32/8 heads of 128, pages of 64. Eight calls with
different queries make one program, as the layers of a model do, and share what only depends on positions."""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import Shape
from benchmarks.attention import inputs as ragged_inputs
from jspec.pallas.attention.flash import AttentionTiling
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel

N, G, H, P = 32, 8, 128, 64
PAGES = 512  # of a row: 32,768 slots
CALLS = 8
SHORT = 600  # slots of a short prompt, at most
LONG = (2_048, 8_192, 32_000)  # slots of a long one, with the pass that is timed
CHECKED = (Shape(6, 64, 500, 576), Shape(6, 32, 300, 320), Shape(6, 64, 500, 576, window=100))
SMOKE = (Shape(2, 32, 150, 192, N=4, G=1),)


def tiled(**changes) -> Callable:
    return functools.partial(paged_attention_kernel, tiling=AttentionTiling(**changes))


KERNELS = {"prefill": prefill_attention_kernel, "paged": paged_attention_kernel}
TUNED = {
    "prefill, 2 stages": functools.partial(prefill_attention_kernel, num_stages=2),
    "paged, 128 rows, 8 warps, 128 slots, 3 stages": tiled(tile_bytes=32768, queries=128, num_warps=8, num_stages=3),
}
PASSES = {(64, 32): TUNED, (16, 32): {}, (8, 32): {}, (32, 64): {}, (8, 64): {}}


def check(shape: Shape, interpret) -> bool:
    """Print a line; whether the error is what rounding explains, and a row is the same among other rows and alone."""
    attend = jax.jit(functools.partial(prefill_attention_kernel, window=shape.window, interpret=interpret))
    args = jax.jit(functools.partial(ragged_inputs, shape=shape, dtype="bfloat16", ragged=True))(jax.random.key(0))
    q, k, v, *where = args
    exact = functools.partial(paged_attention_reference, window=shape.window)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    wanted, magnitude = exact(q, k, v, *where), exact(q, k, jnp.abs(v), *where)
    got = attend(*args)
    error = jnp.abs(got.astype(jnp.float32) - wanted) / (2**-7 * magnitude + 1e-5)
    error = float(jnp.max(jnp.where(where[-1][:, :, None, None], error, jnp.abs(got.astype(jnp.float32)))))

    order = jnp.roll(jnp.arange(shape.B), 1)
    moved = attend(args[0][order], *args[1:3], *(x[order] for x in where))
    alone = attend(*args[:-1], where[-1].at[1:].set(False))
    same = bool(jnp.array_equal(moved, got[order])) and bool(jnp.array_equal(alone[0], got[0]))
    print(f"{shape} W {shape.window or '-':>4}  error / rounding {error:.2f}, same among others {same}", flush=True)
    return error <= 1 and same  # false for NaN


def where(B: int, T: int, live: int | None):
    """Table, positions and valid of a pass, and its FLOP: the segments of a prompt that then has ``live`` slots, or
    segments of as many short prompts."""
    rng = np.random.default_rng(0)
    table = np.zeros((B, PAGES), np.int32)
    if live is None:
        short = -(-SHORT // P)
        table[:, :short] = 1 + rng.permutation(B * short).reshape(B, short)
        positions = rng.integers(0, SHORT - T, (B, 1)) + np.arange(T)
    else:
        table[:] = 1 + rng.permutation(PAGES)
        positions = live - B * T + np.arange(B * T).reshape(B, T)
    args = jnp.asarray(table), jnp.asarray(positions, jnp.int32), jnp.ones((B, T), bool)
    return args, 4.0 * N * H * float((positions + 1).sum())


def program(attend: Callable):
    return lambda queries, *others: [attend(q, *others) for q in queries]


def seconds(compiled, args) -> float:
    """Of a call, the best of four runs."""
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return min(times) / CALLS


def report(what: str, took: float, flop: float):
    print(f"{what:<75} {1e6 * took:>9.1f} us {flop / took / 1e12:>6.0f} TFLOP/s", flush=True)


def time_passes(until: float):
    keys = jax.random.split(jax.random.key(1))
    pools = [jax.random.normal(key, (G, 1 + 2 * PAGES, P, H), jnp.bfloat16) for key in keys]
    queries = {
        B * T: [jax.random.normal(key, (B * T, N, H), jnp.bfloat16) for key in jax.random.split(keys[0], CALLS)]
        for B, T in PASSES
    }

    def arguments(B, T, live):
        others, flop = where(B, T, live)
        return ([q.reshape(B, T, N, H) for q in queries[B * T]], *pools, *others), flop

    def compiled(job):
        B, T, _, attend = job
        try:
            return jax.jit(program(functools.partial(attend, window=None))).lower(*arguments(B, T, T * B)[0]).compile()
        except Exception as error:  # one candidate that does not compile is a line of the table
            return error

    jobs = [(*cut, name, f) for cut, tuned in PASSES.items() for name, f in (KERNELS | tuned).items()]
    with ThreadPoolExecutor(12) as pool:
        programs = list(pool.map(compiled, jobs))
    for B, T in PASSES:
        for live in (*LONG, None) if (B, T) == (64, 32) else LONG:
            args, flop = arguments(B, T, live)
            for (b, t, name, _), function in zip(jobs, programs, strict=True):
                if (b, t) != (B, T) or time.monotonic() > until:
                    continue
                what = f"{B:>3} x {T}, {f'one prompt, {live:,} slots' if live else 'short prompts'}: {name}"
                if isinstance(function, Exception):
                    print(f"{what:<75} {repr(function)[:90]}", flush=True)
                else:
                    report(what, seconds(function, args), flop)


def time_dense():
    """What dense attention of 2,048 queries over 32,768 keys reaches with nothing masked."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    slots = PAGES * P
    queries = [
        jax.random.normal(key, (1, 2048, N, H), jnp.bfloat16) for key in jax.random.split(jax.random.key(5), CALLS)
    ]
    k, v = (jax.random.normal(key, (1, slots, G, H), jnp.bfloat16) for key in jax.random.split(jax.random.key(6)))
    tuning = attention_mgpu.TuningConfig(block_q=64, block_kv=128, max_concurrent_steps=2)
    functions = {
        "cuDNN": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
        "attention_mgpu of jax": functools.partial(attention_mgpu.attention, config=tuning),
    }
    for name, attend in functions.items():
        try:
            report(f"dense, {name}", seconds(jax.jit(program(attend)), (queries, k, v)), 4.0 * N * H * 2048 * slots)
        except Exception as error:  # as above
            print(f"dense, {name}: {repr(error)[:150]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small check of the interpreted kernel, on any machine")
    parser.add_argument("--seconds", type=float, default=100, help="no timing begins later than this")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    if args.smoke:
        from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

        return 0 if all(check(shape, InterpretGPUParams()) for shape in SMOKE) else 1
    if jax.default_backend() != "gpu":
        parser.error("no GPU: the kernel is compiled for Hopper GPUs; --smoke checks a small interpreted version here")
    good = all([check(shape, None) for shape in CHECKED])
    time_passes(until)
    if time.monotonic() < until:
        time_dense()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
