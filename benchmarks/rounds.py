"""What a round costs as K grows: a sequential head against a parallel one, 8B-shaped, random weights.

``python -m benchmarks.rounds`` needs an NVIDIA GPU; ``--smoke`` runs a tiny shape anywhere, with meaningless times.
"""

import argparse
import dataclasses
import re
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.shapes import LLAMA_8B, TINY, head_for, random_module
from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.models.eagle3 import Eagle3Head
from jspec.models.params import DTYPES
from jspec.models.split import split
from jspec.sampling.law import Warp
from jspec.sampling.params import MAX_STOP_TOKENS
from jspec.sampling.verify import RULES
from jspec.state import DecodeState, Request, admit, init_state
from jspec.step import Step

DRAFTS = (3, 8)
LAUNCHES_NOTHING = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "while")


@dataclasses.dataclass(frozen=True)
class Round:
    """Of one program: launches of a round, and seconds that it takes."""

    kernels: int
    seconds: float


def count_kernels(hlo: str) -> int:
    """Kernels and library calls in the text of a compiled program, each loop body once."""
    inside = set(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", hlo))
    count, name = 0, ""
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head.group(1)
        elif name not in inside and (op := re.match(r"\s+(?:ROOT )?%?\S+ = .+? ([\w\-]+)\(", line)):
            count += op.group(1) not in LAUNCHES_NOTHING
    return count


def in_flight(state: DecodeState, config: EngineConfig, length: int) -> DecodeState:
    """Every row decoding a text of ``length`` tokens, sampled at temperature 1."""
    M = config.pages_per_row
    for row in range(config.max_batch):
        request = Request(
            length=jnp.int32(length),
            limit=jnp.int32(config.max_len),
            min_length=jnp.int32(0),
            stop_tokens=jnp.full(MAX_STOP_TOKENS, -1, jnp.int32),
            key_data=jnp.array([0, row], jnp.uint32),
            table=1 + row * M + jnp.arange(M, dtype=jnp.int32),
            warp=Warp(jnp.float32(1), jnp.int32(0), jnp.float32(1), jnp.float32(0)),
        )
        state = admit(state, jnp.int32(row), jnp.zeros(config.max_len, jnp.int32), request)
    return state


def measure(target, head, draft, K: int, config: EngineConfig, rounds: int, repeats: int) -> Round:
    """Rounds of one batch, ``rounds`` to a call: the fewest launches and the median of ``repeats`` calls."""
    make = drafter_for(draft, target.config, Speculation(K, "rejection", "sample"))
    (of, merge_of), (by, merge_by) = split(target), split(head)

    def step(leaves) -> Step:
        model = merge_of(leaves[0])
        return Step(model, make(model, merge_by(leaves[1])), RULES["rejection"], K + 1)

    one = jax.jit(lambda leaves, state: step(leaves).round(state), donate_argnums=1)
    many = jax.jit(lambda leaves, state: step(leaves).decode(state, rounds), donate_argnums=1)
    dtype = DTYPES[config.dtype]
    fresh = lambda: in_flight(init_state(config, target, make(target, head), dtype), config, config.max_len // 2)  # noqa: E731
    kernels = count_kernels(one.lower((of, by), jax.eval_shape(fresh)).compile().as_text() or "")
    seconds = []
    for _ in range(repeats + 1):  # the first call compiles
        state = jax.block_until_ready(fresh())
        started = time.perf_counter()
        jax.block_until_ready(many((of, by), state))
        seconds.append((time.perf_counter() - started) / rounds)
    return Round(kernels, statistics.median(seconds[1:]))


def compare(shape: ModelConfig, config: EngineConfig, methods, rounds: int, repeats: int):
    """Print a line per method."""
    target = random_module(shape, dtype=config.dtype)
    print(f"{'drafter':10s} rows  kernels K={DRAFTS[0]} K={DRAFTS[1]}   ms a round K={DRAFTS[0]} K={DRAFTS[1]}  ratio")
    for method in methods:
        draft = head_for(shape, method)
        head = random_module(draft, 1, config.dtype)
        head = head.prepare() if isinstance(head, Eagle3Head) else head
        few, more = (measure(target, head, draft, K, config, rounds, repeats) for K in DRAFTS)
        print(
            f"{method:10s} {config.max_batch:4d}  {few.kernels:11d} {more.kernels:3d}   {few.seconds * 1e3:14.3f} "
            f"{more.seconds * 1e3:.3f}  {more.seconds / few.seconds:.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--methods", nargs="+", default=["eagle3", "parallel"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    for rows in args.rows:
        config = EngineConfig(max_batch=rows, max_len=1024, dtype="bfloat16")
        if args.smoke:
            compare(TINY, dataclasses.replace(config, max_len=128, dtype="float32"), args.methods, rounds=2, repeats=1)
        else:
            compare(LLAMA_8B, config, args.methods, rounds=32, repeats=5)


if __name__ == "__main__":
    main()
