"""The matrix products of a prefill pass at 8B scale: TFLOP/s with one set of compiler options.

    python -m benchmarks.products                          # XLA's defaults; needs a GPU
    python -m benchmarks.products --options cublas         # or "no split-K"
    python -m benchmarks.products --seconds 40             # leaves out what does not fit

Products are timed one shape at a time, over four weights in turn, and as an MLP. XLA chooses among its kernels by timing
them and remembers the choice, so each set of options wants a process of its own."""

import argparse
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.models.layers import project

OPTIONS = {
    "default": {},
    "no split-K": {"xla_gpu_experimental_force_split_k": 1},  # as ``decode_options`` has it for many query tokens
    "cublas": {"xla_gpu_enable_triton_gemm": False},
}
WEIGHTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # [out, in]
TOKENS = (2048, 512, 1024, 256)
COPIES, RUNS, REPEATS = 4, 5, 5


def seconds(function, options, *args) -> tuple[float, str]:
    """Of one of the program's ``COPIES`` products, and which kernels XLA chose."""
    compiled = jax.jit(function, compiler_options=options).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(RUNS)])
        times.append((time.perf_counter() - start) / RUNS)
    kinds = {"cuBLAS": "__cublas$", "Triton": "__triton_", "cuDNN": "__cudnn$"}
    text = compiled.as_text() or ""
    return min(times) / COPIES, ", ".join(name for name, mark in kinds.items() if mark in text)


def products(x, weights):
    return [project(x, weight) for weight in weights]


def mlp(x, gates_and_ups, downs):
    both = [jnp.split(project(x, weight), 2, axis=-1) for weight in gates_and_ups]
    return [project(jax.nn.silu(gate) * up, down) for (gate, up), down in zip(both, downs, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--options", choices=OPTIONS, default="default")
    parser.add_argument("--seconds", type=float, default=60, help="no product is begun later than this")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("no GPU: there is nothing to learn from the products of this machine")
    until, options = time.monotonic() + args.seconds, OPTIONS[args.options]
    make = jax.jit(lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16) * shape[1] ** -0.5, static_argnums=1)
    keys = jax.random.split(jax.random.key(0), COPIES)
    weights = {name: [make(key, shape) for key in keys] for name, shape in WEIGHTS.items()}
    for tokens in TOKENS:
        x = {width: jax.random.normal(keys[0], (tokens, width), jnp.bfloat16) for width in (4096, 14336)}
        pieces: list[tuple[str, Callable, tuple, int]] = [
            (name, products, (x[wide], weights[name]), wide * high) for name, (high, wide) in WEIGHTS.items()
        ]
        pieces.append(("MLP", mlp, (x[4096], weights["gate_up"], weights["down"]), 3 * 4096 * 14336))
        for name, function, arrays, size in pieces:
            if time.monotonic() > until:
                print("out of time")
                return 0
            took, kinds = seconds(function, options, *arrays)
            rate = 2e-12 * tokens * size / took
            print(
                f"{args.options:<10} {tokens:>5} {name:<8} {1e6 * took:>8.1f} us {rate:>6.0f} TFLOP/s  {kinds}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
