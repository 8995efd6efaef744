"""How long new weights take to be written into a loaded target, in one process on one GPU.

    python -m benchmarks.engine.updates                        # needs an NVIDIA GPU: the 8B shape
    python -m benchmarks.engine.updates --formats none int4    # some formats of the target
    python -m benchmarks.engine.updates --small                # tiny and anywhere, with meaningless times

Weights are random. For each format of the target, the trainer's arrays are of bfloat16 or float32 on the same device, under
the names of Hugging Face or of jspec. A line has the milliseconds of an update from the call until the device has written
all of it, of the first (which compiles what writes) and the median of those after it, the programs that these compiled, the
rate of bytes read and written, and how much memory the update took beside what stood before. The last lines are the
milliseconds to the first token of a prompt of 512 tokens before and after an update."""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.engine.engines import Setting, make_engine
from benchmarks.rounds.bench import Bench
from benchmarks.shapes import SHAPES
from jspec.checkpoints.tensors.names import tensor_table
from jspec.config import ModelConfig
from jspec.engine.engine import Engine
from jspec.updates.update import ModelWeights

GOALS = {"none": 50, "int8": 150, "int4": 150}  # milliseconds
REPEATS, PROMPT = 5, 512


def arrays_of(config: ModelConfig, names: str, dtype) -> dict[str, jax.Array]:
    """Random arrays, as a trainer has them."""
    plain = dataclasses.replace(config, quantization=None, other_formats=())
    of_files = {name: at.shape for name, at in tensor_table(plain).items()}
    shapes = config.param_shapes() if names == "jspec" else of_files
    keys = jax.random.split(jax.random.key(1), len(shapes))
    made = jax.jit(lambda key, shape: jax.random.normal(key, shape, dtype) * 0.02, static_argnums=1)
    return {name: made(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def in_use() -> int:
    """Bytes that arrays take on the device."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)


def peak() -> int:
    """The most bytes that were ever taken."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def measure(weights: ModelWeights, config: ModelConfig, form: str, names: Any, dtype) -> str:
    given = arrays_of(config, names, dtype)
    jax.block_until_ready(given)
    before, seconds, compiled = in_use(), [], []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        done = weights.update(given, None, None, names, False, True)
        seconds.append(time.perf_counter() - began)
        compiled.append(done.num_compilations)
    written = sum(leaf.nbytes for leaf in weights.target.leaves)
    took = statistics.median(seconds[1:])
    rate = (2 * done.num_bytes + written) / took / 1e9  # the arrays are looked at once, and read once
    goal = f"goal {GOALS[form]}" if form in GOALS else ""
    return (
        f"{form:10} {jnp.dtype(dtype).name:9} {names:12} first {1e3 * seconds[0]:8.1f} ms, {compiled[0]:3} programs; "
        f"then {1e3 * took:7.1f} ms {goal}, {sum(compiled[1:])} programs, {rate:6.0f} GB/s, "
        f"+{(peak() - before) / 1e9:5.2f} GB at most"
    )


def first_token(engine: Engine, vocabulary: int) -> float:
    """Milliseconds to the first token of a prompt that no cache has."""
    took = []
    engine.lifecycle.reset_prefix_cache()
    for i in range(REPEATS):
        prompt = [(7919 * i + 31 * j) % vocabulary for j in range(min(PROMPT, engine.config.max_len // 2))]
        began = time.perf_counter()
        deltas = engine.stream(engine.request(prompt, max_tokens=4, temperature=0))
        next(deltas)
        took.append(time.perf_counter() - began)
        deltas.close()
    return 1e3 * statistics.median(took)


def run(shape: str, form: str, small: bool):
    """The lines of a format."""
    quantization = None if form == "none" else form
    pair = SHAPES[shape]
    config = pair.target if quantization is None else pair.target.with_quantization(quantization)
    bench = Bench(pair._replace(target=config), "float32" if small else "bfloat16", 0.0, 1)
    engine = make_engine(bench, Setting(2 if small else 64, 64 if small else 2048))
    engine.warmup()
    weights = ModelWeights(engine, bench.target, None, None)
    first_token(engine, config.vocab_size)
    before = first_token(engine, config.vocab_size)
    for dtype in (jnp.bfloat16, jnp.float32):
        for names in ("huggingface", "jspec"):
            print(measure(weights, config, form, names, dtype), flush=True)
    after = first_token(engine, config.vocab_size)
    print(
        f"{form:10} first token of {PROMPT}: {before:.2f} ms before, {after:.2f} after, {after / before:.3f}; late programs "
        f"{engine.guard.count}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument(
        "--formats", nargs="+", choices=("none", "int8", "fp8", "int4"), default=["none", "int8", "int4"]
    )
    parser.add_argument("--small", action="store_true", help="a tiny shape, any machine, meaningless times")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}", flush=True)
    for form in args.formats:
        run("tiny" if args.small else args.shape, form, args.small)


if __name__ == "__main__":
    main()
