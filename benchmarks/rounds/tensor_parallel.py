"""How long rounds take on two GPUs that share a target, beside the floor that each one's part sets.

    python -m benchmarks.rounds.tensor_parallel                       # needs two NVIDIA GPUs: every line
    python -m benchmarks.rounds.tensor_parallel --shape llama-3.1-8b  # the lines of one shape
    python -m benchmarks.rounds.tensor_parallel --json FILE         # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.tensor_parallel --peer                # sums by packets beside those of XLA, line by line
    python -m benchmarks.rounds.tensor_parallel --whole               # the same rounds on one GPU
    python -m benchmarks.rounds.tensor_parallel --alone               # one of the two GPUs by itself; needs one GPU
    python -m benchmarks.rounds.tensor_parallel --smoke               # tiny and anywhere, with meaningless times

Weights are random, and each GPU makes its own. Of mixtures each has half of the experts. Times are in milliseconds, the
median over calls of many rounds each. The floor is that of ``benchmarks.rounds.round`` on half of the target's bytes, and
all of the draft's unless that is in shards, too. The last line is one sum over the GPUs with the residual sum and the norm
behind it, in microseconds, of as many tokens as its name says.

With ``--whole`` one GPU has all of the target, and its rounds are those that two are compared with.

With ``--alone`` one GPU runs plain rounds of what one of the two would have: a model with half of the heads, of the columns
and of the vocabulary. Nothing is added up, so that times are those of two GPUs without their sums."""

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

if "--smoke" in sys.argv:  # before JAX starts
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.kernels.sums import microseconds
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.round import HEADER, Figure, keep
from benchmarks.shapes import LLAMA_8B, SHAPES
from jspec.config import Shards

SHARDS = Shards(2)
BY_EXPERT = dataclasses.replace(SHARDS, by_expert=True)  # of mixtures
XLA, PACKETS = "XLA", "packets"  # ways to add up
PROMPT, NEW = 512, 256


class Line(NamedTuple):
    """What is timed of a shape: the rounds, and the milliseconds to reach, and what would be better; None for no goal.

    ``share`` is the goal as a part of the floor's rate, and what would be better."""

    number: int
    variant: str
    what: Decoding
    goal: float | None = None
    stretch: float | None = None
    share: tuple[float, float] | None = None


def plain(batch: int) -> Decoding:
    return Decoding(None, 0, batch, PROMPT, NEW)


def mixture(number: int) -> Sequence[Line]:
    one = Line(number, "batch 1", plain(1))
    return one, *(Line(number, f"batch {rows}", plain(rows), share=(1 / 1.6, 1 / 1.4)) for rows in (16, 64))


LINES: dict[str, Sequence[Line]] = {
    "llama-3.1-8b": (
        Line(1, "batch 1", plain(1), 2.5, 2.4),
        Line(1, "batch 16", plain(16), 3.0, 2.8),
        Line(1, "batch 64", plain(64), 4.0, 3.7),
        Line(2, "", Decoding("eagle3", 4, 1, PROMPT, NEW), 3.8, 3.5),
        Line(3, "whole draft", Decoding("draft_model", 4, 1, PROMPT, NEW)),
        Line(3, "draft in shards", Decoding("draft_model", 4, 1, PROMPT, NEW, draft_in_shards=True)),
    ),
    "llama-3.3-70b": (Line(4, "", plain(1), share=(0.92, 0.95)),),
    "gpt-oss-20b": mixture(6),
    "qwen3-30b-a3b": mixture(7),
}
SMALL: Sequence[Line] = (
    Line(1, "batch 2", Decoding(None, 0, 2, 16, 8)),
    Line(2, "", Decoding("eagle3", 2, 1, 16, 8)),
    Line(3, "draft in shards", Decoding("draft_model", 2, 1, 16, 8, draft_in_shards=True)),
)
SMALL_MIXTURE: Sequence[Line] = (Line(7, "batch 2", Decoding(None, 0, 2, 16, 8)),)
ROWS = {1: (6, 5), 16: (6, 5), 64: (11, 10), 80: (13, 10)}  # tokens -> microseconds to reach, and what would be better


def rounds(
    shape: str, lines: Sequence[Line], dtype: str, rate: float, repeats: int, ways: Sequence[str], whole: bool = False
) -> Iterator[Figure]:
    """The figures of a shape, whose weights are made first: of each line one for every way to add up.

    With ``whole`` they are those of one GPU that has the whole target, which have no goals."""
    began, pair = time.perf_counter(), SHAPES[shape]
    shards = None if whole else SHARDS if pair.target.experts is None else BY_EXPERT
    bench = Bench(pair, dtype, rate, repeats, shards=shards)
    jax.block_until_ready(jax.tree.leaves(bench.target))
    held = pair.target.weight_bytes(2) if shards is None else shards.weight_bytes(pair.target, 2)
    print(f"{shape}: {held / 1e9:.1f} GB of weights on a GPU, made in {time.perf_counter() - began:.0f} s", flush=True)
    for line, way in itertools.product(lines, ways):
        if whole and line.what.draft_in_shards:
            continue
        bench.packets = way == PACKETS
        timed = bench.time(line.what)
        goals = line.goal, line.stretch
        if line.share is not None:
            goals = tuple(1e3 * timed.floor / share for share in line.share)
        tokens = timed.tokens if line.what.K else None
        times = 1e3 * timed.seconds, 1e3 * timed.floor
        how = "one GPU" if whole else f"sums by {way}"
        variant = f"{line.variant} {'one GPU' if whole else PACKETS if bench.packets else ''}".strip()
        more = {"kernels": timed.kernels, "tokens": tokens}
        yield Figure(
            line.number, variant, f"{shape}, {line.what}; {how}", "ms", *times, *([] if whole else goals), **more
        )


def alone(shape: str, lines: Sequence[Line], dtype: str, rate: float, repeats: int) -> Iterator[Figure]:
    """The figures of plain rounds of one shard by itself. They have no goals, which are for rounds with sums."""
    pair = SHAPES[shape]
    vocabulary = SHARDS.vocabulary(pair.target.vocab_size)
    bench = Bench(
        pair._replace(target=dataclasses.replace(SHARDS.local(pair.target), vocab_size=vocabulary)),
        dtype,
        rate,
        repeats,
    )
    for line in lines:
        if line.what.method is None:
            timed = bench.time(line.what)
            what = f"{shape}, one of two shards alone, {line.what}"
            times = 1e3 * timed.seconds, 1e3 * timed.floor
            yield Figure(line.number, line.variant, what, "ms", *times, kernels=timed.kernels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LINES, nargs="+", default=list(LINES), help="the shapes, in this order")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument(
        "--bandwidth", type=float, help="bytes per second of one GPU for the floors, instead of measuring"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--sums", choices=(XLA, PACKETS), nargs="+", default=[XLA], help="ways to add up")
    parser.add_argument("--peer", dest="sums", action="store_const", const=[XLA, PACKETS], help="both of them")
    parser.add_argument("--whole", action="store_true", help="the whole target on one GPU")
    parser.add_argument("--alone", action="store_true", help="one shard by itself, on one GPU, without sums")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, two simulated devices, meaningless times")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    needed = 1 if args.alone or args.whole else SHARDS.count
    if not args.smoke and (not on_gpu or len(jax.devices()) < needed):
        parser.error(f"fewer than {needed} GPUs: times need them; --smoke runs a tiny version here")
    rates, rate = bandwidth.for_floors(args.bandwidth)
    shapes = (
        {"tiny": SMALL, "tiny-mixture": SMALL_MIXTURE} if args.smoke else {shape: LINES[shape] for shape in args.shape}
    )
    if args.alone:  # which of a mixture's experts a shard has, its config does not say
        shapes = {shape: lines for shape, lines in shapes.items() if SHAPES[shape].target.experts is None}
    dtype, repeats = ("bfloat16" if on_gpu else "float32"), (1 if args.smoke else args.repeats)
    settings = {"shapes": list(shapes), "dtype": dtype, "alone": args.alone, "whole": args.whole, "smoke": args.smoke}
    result = results.begin("tensor_parallel", settings, rate, rates)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s of each GPU\n{HEADER}", flush=True)
    ways = args.sums[:1] if args.whole else args.sums
    of_shape = alone if args.alone else functools.partial(rounds, ways=ways, whole=args.whole)
    figures = [of_shape(shape, lines, dtype, rate, repeats) for shape, lines in shapes.items()]
    D = 64 if args.smoke else LLAMA_8B.hidden_size
    figures.append(
        Figure(5, f"{rows} tokens, {way}", f"sum over the GPUs of {rows} x {D}, with norm", "us", took, 0.0, *goals)
        for rows, goals in ({} if args.alone or args.whole else ROWS).items()
        for way in ({XLA: "sum", PACKETS: "packets"}[one] for one in ways)
        for took in [microseconds(way, rows, D, jnp.dtype(dtype), 5 * repeats)]
    )
    keep(itertools.chain.from_iterable(figures), result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
