"""How fast this device reads and copies memory: ``python -m benchmarks.kernels.bandwidth``. Floors are counted at the read
rate."""

import functools
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import kernel_call

ARRAYS, ARRAY_BYTES = 4, 1 << 31
SMALL = 1 << 20  # bytes of an array where times mean nothing
ASSUMED = 4.3e12  # bytes per second: of a device copy on one H200, where there is no GPU to measure
BLOCK, ROW = 4096, 1 << 16
PASSES, REPEATS = 8, 7


def sum_by_xla(x, floor):
    """Sums of the rows of float32 ``[n, ROW]``, each number at least ``floor``."""
    return jnp.sum(jnp.maximum(x, floor), axis=1)


def sum_by_pallas(x, floor, interpret: bool = False):
    """The same by a Pallas kernel, with a program for each row of the array."""

    def kernel(x_ref, floor_ref, out_ref):
        row, least = pl.program_id(0), floor_ref[0]

        def add(i, total):
            return total + jnp.maximum(pltriton.load(x_ref.at[row, pl.ds(i * BLOCK, BLOCK)]), least)

        out_ref[row] = jnp.sum(jax.lax.fori_loop(0, ROW // BLOCK, add, jnp.zeros(BLOCK, jnp.float32)))

    shape = jax.ShapeDtypeStruct((x.shape[0],), jnp.float32)
    call = functools.partial(kernel_call, kernel, x, floor.reshape(1), grid=(x.shape[0],), out_shape=shape)
    return call(num_warps=8, num_stages=4, interpret=interpret)


def seconds(function: Callable, *args, repeats: int) -> float:
    """Median time of a call, the one that compiles left out."""
    jax.block_until_ready(function(*args))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def rates(small: bool = False) -> dict[str, float]:
    """Bytes per second of reading with either kernel, and of a copy, where reads and writes both count."""
    size = SMALL if small else ARRAY_BYTES
    arrays = jax.jit(lambda: [jnp.full((size // (4 * ROW), ROW), i, jnp.float32) for i in range(ARRAYS)])()

    def read(total, arrays):
        def every(_, floor):  # the floor of a pass comes from the one before it, so that none is left out
            return sum(jnp.min(total(x, floor)) for x in arrays) * 1e-20

        return jax.lax.fori_loop(0, PASSES, every, jnp.float32(0))

    @functools.partial(jax.jit, donate_argnums=0)
    def copy(arrays):
        return jax.lax.fori_loop(0, PASSES, lambda i, xs: [x + i.astype(x.dtype) for x in xs], arrays)

    def copy_again():
        arrays[:] = copy(arrays)
        return arrays

    passed = PASSES * sum(x.nbytes for x in arrays)
    by_pallas = functools.partial(sum_by_pallas, interpret=jax.default_backend() != "gpu")
    time_of = functools.partial(seconds, repeats=1 if small else REPEATS)
    by_way = {
        "read, XLA": passed / time_of(jax.jit(functools.partial(read, sum_by_xla)), arrays),
        "read, Pallas": passed / time_of(jax.jit(functools.partial(read, by_pallas)), arrays),
    }
    return by_way | {"copy": 2 * passed / time_of(copy_again)}


def read_rate(by_way: dict[str, float]) -> float:
    """The better of the two ways to read."""
    return max(rate for way, rate in by_way.items() if way.startswith("read"))


def for_floors(given: float | None) -> tuple[dict[str, float], float]:
    """The rates that were measured, and the one to count floors with: ``given``, else that of reading."""
    if given:
        return {}, given
    if jax.default_backend() != "gpu":
        return {}, ASSUMED
    measured = rates()
    return measured, read_rate(measured)


def describe(by_way: dict[str, float]) -> str:
    return "; ".join(f"{way} {rate / 1e9:,.0f} GB/s" for way, rate in by_way.items()) or "memory was not measured"


if __name__ == "__main__":
    print(describe(rates(small=jax.default_backend() != "gpu")))
