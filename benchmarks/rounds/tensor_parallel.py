"""How long rounds take on several GPUs that share a target, beside the floor that each one's part sets.

    python -m benchmarks.rounds.tensor_parallel                       # needs two NVIDIA GPUs: every line
    python -m benchmarks.rounds.tensor_parallel --gpus 4              # the same on four
    python -m benchmarks.rounds.tensor_parallel --shape llama-3.1-8b  # the lines of one shape
    python -m benchmarks.rounds.tensor_parallel --shape llama-3.3-70b --quantization fp8_block int4 --batches 1 16
    python -m benchmarks.rounds.tensor_parallel --json FILE         # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.tensor_parallel --peer                # sums by packets beside those of XLA, line by line
    python -m benchmarks.rounds.tensor_parallel --whole               # the same rounds on one GPU
    python -m benchmarks.rounds.tensor_parallel --alone               # one of the GPUs by itself; needs one GPU
    python -m benchmarks.rounds.tensor_parallel --smoke               # tiny and anywhere, with meaningless times

Weights are random, and each GPU makes its own. Of mixtures each has its share of the experts. Times are in milliseconds,
the median over calls of many rounds each. The floor is that of ``benchmarks.rounds.round`` on a GPU's part of the target's
bytes, and all of the draft's unless that is in shards, too. Goals are those of two GPUs. The last line is one sum over the
GPUs with the residual sum and the norm behind it, in microseconds, of as many tokens as its name says.

With ``--whole`` one GPU has all of the target, and its rounds are those that several are compared with.

With ``--alone`` one GPU runs plain rounds of what one of them would have: a model with its part of the heads, of the
columns and of the vocabulary. Nothing is added up, so that times are those of several GPUs without their sums."""

import argparse
import dataclasses
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

if "--smoke" in sys.argv:  # before JAX starts
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=4 {os.environ.get('XLA_FLAGS', '')}"

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


def eagle(batch: int) -> Decoding:
    return Decoding("eagle3", 4, batch, PROMPT, NEW)


def mixture(number: int) -> Sequence[Line]:
    one = Line(number, "batch 1", plain(1))
    return one, *(Line(number, f"batch {rows}", plain(rows), share=(1 / 1.6, 1 / 1.4)) for rows in (16, 64))


LINES: dict[str, Sequence[Line]] = {
    "llama-3.1-8b": (
        Line(1, "batch 1", plain(1), 2.5, 2.4),
        Line(1, "batch 16", plain(16), 3.0, 2.8),
        Line(1, "batch 64", plain(64), 4.0, 3.7),
        Line(2, "", eagle(1), 3.8, 3.5),
        *(Line(2, f"batch {rows}", eagle(rows)) for rows in (16, 64)),
        Line(3, "whole draft", Decoding("draft_model", 4, 1, PROMPT, NEW)),
        Line(3, "draft in shards", Decoding("draft_model", 4, 1, PROMPT, NEW, draft_in_shards=True)),
    ),
    "llama-3.3-70b": (
        Line(4, "batch 1", plain(1), share=(0.92, 0.95)),
        *(Line(4, f"batch {rows}", plain(rows)) for rows in (16, 64)),
        *(Line(8, f"EAGLE-3, batch {rows}", eagle(rows)) for rows in (1, 16, 64)),
    ),
    "gpt-oss-20b": mixture(6),
    "gpt-oss-120b": mixture(9),
    "qwen3-30b-a3b": mixture(7),
    "qwen3-235b-a22b": mixture(10),
}
SMALL: Sequence[Line] = (
    Line(1, "batch 2", Decoding(None, 0, 2, 16, 8)),
    Line(2, "", Decoding("eagle3", 2, 1, 16, 8)),
    Line(3, "draft in shards", Decoding("draft_model", 2, 1, 16, 8, draft_in_shards=True)),
)
SMOKE: dict[str, Sequence[Line]] = {
    "tiny": SMALL,
    "tiny-mixture": (Line(7, "batch 2", Decoding(None, 0, 2, 16, 8)),),
}
BY_DEFAULT = ("llama-3.1-8b", "llama-3.3-70b", "gpt-oss-20b", "qwen3-30b-a3b")
ROWS = {1: (6, 5), 16: (6, 5), 64: (11, 10), 80: (13, 10)}  # tokens -> microseconds to reach, and what would be better


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line asks of every shape.

    Attributes:
      gpus: how many share the target.
      dtype: of the weights that are not quantised.
      rate: bytes per second of one GPU, for floors.
      repeats: timed calls of each program.
      ways: to add up.
      batches: rows of the lines that are timed; None for all lines.
      quantization: formats of the target's weights, one after another; None for ``dtype``.
      whole: whether one GPU has the whole target, which has no goals.
    """

    gpus: int
    dtype: str
    rate: float
    repeats: int
    ways: Sequence[str] = (XLA,)
    batches: Sequence[int] | None = None
    quantization: Sequence[str | None] = (None,)
    whole: bool = False

    def of(self, lines: Sequence[Line]) -> list[Line]:
        """Those that are timed."""
        return [line for line in lines if self.batches is None or line.what.batch in self.batches]


def rounds(shape: str, lines: Sequence[Line], asked: Asked) -> Iterator[Figure]:
    """The figures of a shape, whose weights are made first: of each line one for every format and way to add up."""
    pair = SHAPES[shape]
    shards = None if asked.whole else Shards(asked.gpus, by_expert=pair.target.experts is not None)
    for quantization in asked.quantization:
        began = time.perf_counter()
        bench = Bench(pair, asked.dtype, asked.rate, asked.repeats, shards=shards)
        target = bench.target_in(quantization)
        jax.block_until_ready(jax.tree.leaves(target))
        held = target.config.weight_bytes(2) if shards is None else shards.weight_bytes(target.config, 2)
        took = time.perf_counter() - began
        print(f"{shape}, {quantization or asked.dtype}: {held / 1e9:.1f} GB on a GPU, made in {took:.0f} s", flush=True)
        for line, way in itertools.product(lines, asked.ways):
            if not (asked.whole and line.what.draft_in_shards):
                yield _of_line(bench, shape, line, way, quantization, asked)


def _of_line(bench: Bench, shape: str, line: Line, way: str, quantization: str | None, asked: Asked) -> Figure:
    bench.packets = way == PACKETS
    timed = bench.time(dataclasses.replace(line.what, quantization=quantization))
    goals = [line.goal, line.stretch] if line.share is None else [1e3 * timed.floor / share for share in line.share]
    how = "one GPU" if asked.whole else f"{asked.gpus} GPUs, sums by {way}"
    marks = quantization, "one GPU" if asked.whole else PACKETS if bench.packets else None
    return Figure(
        line.number,
        " ".join(filter(None, (line.variant, *marks))),
        f"{shape}, {dataclasses.replace(line.what, quantization=quantization)}; {how}",
        "ms",
        1e3 * timed.seconds,
        1e3 * timed.floor,
        *(goals if asked.gpus == 2 and quantization is None and not asked.whole else []),
        kernels=timed.kernels,
        tokens=timed.tokens if line.what.K else None,
    )


def alone(shape: str, lines: Sequence[Line], asked: Asked) -> Iterator[Figure]:
    """The figures of plain rounds of one shard by itself. They have no goals, which are for rounds with sums."""
    pair, shards = SHAPES[shape], Shards(asked.gpus)
    vocabulary = shards.vocabulary(pair.target.vocab_size)
    part = dataclasses.replace(shards.local(pair.target), vocab_size=vocabulary)
    bench = Bench(pair._replace(target=part), asked.dtype, asked.rate, asked.repeats)
    for line in lines:
        if line.what.method is None:
            timed = bench.time(line.what)
            what = f"{shape}, one of {asked.gpus} shards alone, {line.what}"
            times = 1e3 * timed.seconds, 1e3 * timed.floor
            yield Figure(line.number, line.variant, what, "ms", *times, kernels=timed.kernels)


def sums(asked: Asked) -> Iterator[Figure]:
    """The figures of one sum by itself."""
    D = LLAMA_8B.hidden_size if jax.default_backend() == "gpu" else 64
    for (rows, goals), way in itertools.product(ROWS.items(), asked.ways):
        name = {XLA: "sum", PACKETS: "packets"}[way]
        took = microseconds(name, rows, D, jnp.dtype(asked.dtype), 5 * asked.repeats, asked.gpus)
        what = f"sum over {asked.gpus} GPUs of {rows} x {D}, with norm"
        yield Figure(5, f"{rows} tokens, {name}", what, "us", took, 0.0, *(goals if asked.gpus == 2 else []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LINES, nargs="+", default=BY_DEFAULT, help="the shapes, in this order")
    parser.add_argument("--gpus", type=int, default=2, metavar="N", help="how many share the target")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="rows of the lines to run, instead of all")
    parser.add_argument(
        "--quantization",
        nargs="+",
        default=[None],
        metavar="FORMAT",
        help="of the target's weights, as jspec.load has it",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument(
        "--bandwidth", type=float, help="bytes per second of one GPU for the floors, instead of measuring"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--sums", choices=(XLA, PACKETS), nargs="+", default=[XLA], help="ways to add up")
    parser.add_argument("--peer", dest="sums", action="store_const", const=[XLA, PACKETS], help="both of them")
    parser.add_argument("--whole", action="store_true", help="the whole target on one GPU")
    parser.add_argument("--alone", action="store_true", help="one shard by itself, on one GPU, without sums")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, simulated devices, meaningless times")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    needed = 1 if args.alone or args.whole else args.gpus
    if not args.smoke and (not on_gpu or len(jax.devices()) < needed):
        parser.error(f"fewer than {needed} GPUs: times need them; --smoke runs a tiny version here")
    rates, rate = bandwidth.for_floors(args.bandwidth)
    shapes = SMOKE if args.smoke else {shape: LINES[shape] for shape in args.shape}
    if args.alone:  # which of a mixture's experts a shard has, its config does not say
        shapes = {shape: lines for shape, lines in shapes.items() if SHAPES[shape].target.experts is None}
    asked = Asked(
        args.gpus,
        "bfloat16" if on_gpu else "float32",
        rate,
        1 if args.smoke else args.repeats,
        args.sums[:1] if args.whole else args.sums,
        args.batches,
        args.quantization,
        args.whole,
    )
    settings = {"shapes": list(shapes), "gpus": args.gpus, "dtype": asked.dtype}
    settings |= {"alone": args.alone, "whole": args.whole, "smoke": args.smoke}
    result = results.begin("tensor_parallel", settings, rate, rates)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s of each GPU\n{HEADER}", flush=True)
    of_shape = alone if args.alone else rounds
    figures = [of_shape(shape, asked.of(lines), asked) for shape, lines in shapes.items()]
    figures += [] if args.alone or args.whole else [sums(asked)]
    keep(itertools.chain.from_iterable(figures), result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
