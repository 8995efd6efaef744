"""Do tensor cores add up in an order that depends on the instruction's shape? One product of 256 tokens and some outputs in
float32, by wgmma at every N and by what Triton and XLA make of it.

No document promises that the bits of a product are those of another instruction. What is compared: wgmma m64nNk16 at each
N, with steps of several depths to a loop's trip, with the weight from shared memory and from registers, with the tokens in
its place; sums in turns and in parts, which must differ; Triton's dot in tiles that lower to mma.sync and to wgmma; and
XLA's products. Numbers are normal, and in a second set their magnitudes are spread, so that what an instruction drops
shows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.invariance.run import Job, Run, compile_all
from jspec.pallas.matmul.few_tokens import LOWERS
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.sm90_tiling import MosaicTiling
from jspec.pallas.matmul.small_batch import multiply_tile, run_matmul, store_products
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.quantization.formats import KINDS
from jspec.quantization.weight import Weight

T, OUTPUTS, INPUTS = 256, 256, 4096
WIDTHS = (8, 16, 24, 32, 40, 64, 80, 96, 128, 160, 256)
DATA = ("normal", "spread", "integers")


def data(kind: str, small: bool) -> tuple[jax.Array, jax.Array]:
    """x ``[T, in]`` and a weight ``[out, in]``, the same but for ``integers`` of eight bits."""
    tokens, outputs, inputs = (16, 64, 128) if small else (T, OUTPUTS, INPUTS)

    def make(key, shape):
        keys = jax.random.split(key)
        x = jax.random.normal(keys[0], shape, jnp.float32)
        if kind == "spread":
            x *= jnp.exp2(jax.random.randint(keys[1], shape, -8, 9).astype(jnp.float32))
        return x.astype(jnp.bfloat16)

    x, weight = (make(jax.random.key(seed), shape) for seed, shape in enumerate(((tokens, inputs), (outputs, inputs))))
    if kind == "integers":
        weight = jnp.clip(jnp.round(weight.astype(jnp.float32) * 32), -127, 127).astype(jnp.bfloat16)
    return x, weight


def _wgmma(tiling: MosaicTiling, form: str, x, weight) -> jax.Array:
    from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

    multiply = functools.partial(few_tokens_matmul_kernel, dtype=jnp.float32, tiling=tiling)
    if form == "swapped":
        return multiply(weight, Weight(x)).T
    if form == "registers":  # a weight of eight bits becomes bfloat16 there
        return multiply(x, Weight(weight.astype(jnp.int8), jnp.ones(len(weight), jnp.float32), form=KINDS["int8"]))
    y = multiply(x, Weight(weight))
    return y if y.ndim == 2 else functools.reduce(jnp.add, (y[:, part] for part in range(y.shape[1])))


def _products_in_float32(x_ref, weight_ref, products_ref, *, tiling: MatmulTiling):
    products, token, output = multiply_tile(x_ref, weight_ref, tiling)
    store_products(products_ref, token, output, products)


def _triton(tiling: MatmulTiling, x, weight) -> Any:
    return run_matmul(_products_in_float32, x, weight, tiling=tiling, dtype=jnp.float32, interpret=False)


def _xla(tokens: int | None, x, weight) -> jax.Array:
    """XLA's product of so many tokens at a time, all at once without a number."""
    if tokens is None:
        return matmul_reference(x, weight, jnp.float32)
    return jnp.concatenate(
        [matmul_reference(x[i : i + tokens], weight, jnp.float32) for i in range(0, 2 * tokens, tokens)]
    )


def _reduction(x, weight) -> jax.Array:
    """The first tokens as sums over products, one token at a time as products of one token are computed."""
    wide = weight.astype(jnp.float32)
    return jnp.stack([jnp.sum(wide * x[i].astype(jnp.float32)[None], axis=1) for i in range(2)])


def _stages(width: int, depth: int) -> int:
    return max(2, min(6, (200 * 1024 - 256 * width) // (2 * depth * (64 + width))))  # beside the results


def ways_of_wgmma() -> dict[str, Callable]:
    def tiling(width: int, depth: int = 64, turns: int = 1, splits: int = 1) -> MosaicTiling:
        stages = _stages(width, depth) // turns * turns
        return MosaicTiling(64, width, depth, max(stages, turns), in_turns=turns, num_splits=splits)

    ways = {f"wgmma n{width}": functools.partial(_wgmma, tiling(width), "memory") for width in WIDTHS}
    ways["wgmma m128 n80"] = functools.partial(
        _wgmma, tiling(80)._replace(outputs=128, side_by_side=2, num_stages=3), "memory"
    )
    for depth in (128, 256):
        ways[f"wgmma n16, steps of {depth}"] = functools.partial(_wgmma, tiling(16, depth), "memory")
    for width in (16, 64, 128):
        ways[f"wgmma n{width}, swapped"] = functools.partial(_wgmma, tiling(width), "swapped")
    for turns in (2, 4):
        ways[f"wgmma n16, {turns} in turns"] = functools.partial(_wgmma, tiling(16, 64, turns), "memory")
    ways["wgmma n80, 2 in turns"] = functools.partial(_wgmma, tiling(80, 64, 2), "memory")
    for width in (16, 80):
        ways[f"wgmma n{width}, 4 parts"] = functools.partial(_wgmma, tiling(width, 64, 1, 4), "memory")
    return ways


def ways_of_registers() -> dict[str, Callable]:
    return {
        f"wgmma n{width}, registers": functools.partial(_wgmma, MosaicTiling(64, width, 128, 4), "registers")
        for width in (8, 16, 40, 80)
    }


def ways_of_triton() -> dict[str, Callable]:
    """Triton multiplies by wgmma where four warps have 64 lines on the left, and with fewer lines or warps by mma.sync. That
    is its rule for Hopper GPUs; the machine code was not looked at."""
    tilings = {
        "Triton mma 32 x 16": MatmulTiling(16, 32, 64, 4, 3, weight_first=False),
        "Triton mma 32 x 16, 2 warps": MatmulTiling(32, 16, 64, 2, 3),
        "Triton mma 16 x 32, steps of 128": MatmulTiling(32, 16, 128, 4, 3, weight_first=False),
        "Triton wgmma 64 x 16": MatmulTiling(64, 16, 64, 4, 3),
        "Triton wgmma 64 x 16, steps of 128": MatmulTiling(64, 16, 128, 4, 3),
        "Triton wgmma 128 x 64": MatmulTiling(128, 64, 64, 4, 3),
        "Triton wgmma 128 x 128, 8 warps": MatmulTiling(128, 128, 64, 8, 3),
        "Triton wgmma 64 x 128, tokens first": MatmulTiling(128, 64, 64, 4, 3, weight_first=False),
    }
    return {name: functools.partial(_triton, tiling) for name, tiling in tilings.items()}


def instructions(run: Run, tokens):
    """Classes for each set of numbers. A way that has the first tokens alone is compared by these with all classes."""
    del tokens
    on_gpu = jax.default_backend() == "gpu"
    whole = ways_of_wgmma() | ways_of_triton() if on_gpu and LOWERS else {}
    if not whole:
        print("wgmma and Triton: left out, they need a Hopper GPU and jax 0.11 or later", flush=True)
    jobs = {name: ("normal", way, False) for name, way in whole.items()}
    jobs |= {name: ("integers", way, False) for name, way in (ways_of_registers() if whole else {}).items()}
    for count in (None, 16, 64):
        jobs[f"XLA, {count or 'all'} tokens"] = ("normal", functools.partial(_xla, count), True)
    jobs["XLA, reduction"] = ("normal", _reduction, True)
    sets = {kind: data(kind, run.small) for kind in DATA}
    programs = compile_all({name: Job(way, sets[kind], {}, tuned) for name, (kind, way, tuned) in jobs.items()})
    for kind, args in sets.items():
        found: dict[str, np.ndarray] = {}
        for name, (needs, _, _) in jobs.items():
            if needs == "integers" and kind != needs:
                continue

            def one(name=name, args=args):
                if isinstance(programs[name], Exception):
                    raise programs[name]
                with run.watched():
                    found[name] = np.asarray(programs[name](*args))  # noqa: B023

            run.attempt(f"instructions, {kind}, {name}", one)
        exact = np.asarray(args[0], np.float64) @ np.asarray(args[1], np.float64).T
        errors = {name: float(np.max(np.abs(y - exact[: len(y)]))) for name, y in found.items()}
        few = min((len(y) for y in found.values()), default=0)
        firsts = {name: y[:few] for name, y in found.items() if len(y) < len(exact)}
        wholes = {name: y for name, y in found.items() if len(y) == len(exact)}
        if wholes:
            run.say_classes(f"instructions, {kind}, {len(exact)} tokens", wholes, largest_error=errors)
        if firsts:
            all_first = {name: y[:few] for name, y in wholes.items()} | firsts
            run.say_classes(f"instructions, {kind}, the first {few}", all_first)
        print("    largest errors: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()), flush=True)
