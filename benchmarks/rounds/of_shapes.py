"""What the programs that time rounds of several shapes have in common: their options, and a bench for each shape."""

import argparse
import contextlib
import dataclasses
import gc
import pathlib
import time
from collections.abc import Iterable, Iterator, Sequence

import jax

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.round import HEADER, Figure, keep
from benchmarks.shapes import SHAPES
from jspec.config import require_quantization


def parser_of(doc: str | None, shapes: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of a program with this documentation, with the options that all have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes, nargs="+", default=list(shapes), help="the shapes, in this order")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each program's rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, any machine, meaningless times")
    return parser


def known_format(name: str) -> str:
    """``name``, if weights can be stored so or it is ``none``."""
    try:
        require_quantization(None if name == "none" else name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of such a program, whose figures are kept as they come.

    Attributes:
      result: what is written.
      dtype: of the weights that are not quantised.
      rate: bytes per second for the floors.
      repeats: timed calls of each program.
      profiled: whether the kernels of each program's rounds are printed.
      file: where the result is written, None for nowhere.
    """

    result: results.Result
    dtype: str
    rate: float
    repeats: int
    profiled: bool
    file: pathlib.Path | None

    @classmethod
    def begin(
        cls, name: str, parser: argparse.ArgumentParser, args: argparse.Namespace, shapes: Sequence[str]
    ) -> "Run":
        """The run of the program ``name`` with these arguments, and the head of its table; ends without a GPU to time."""
        on_gpu = jax.default_backend() == "gpu"
        if not (args.smoke or on_gpu):
            parser.error("no GPU: times need one; --smoke runs a tiny version here")
        rates, rate = bandwidth.for_floors(args.bandwidth)
        dtype = "bfloat16" if on_gpu else "float32"
        result = results.begin(name, {"shapes": list(shapes), "dtype": dtype, "smoke": args.smoke}, rate, rates)
        print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s\n{HEADER}", flush=True)
        return cls(result, dtype, rate, 1 if args.smoke else args.repeats, args.profile, args.json)

    @contextlib.contextmanager
    def bench(self, shape: str, quantization: str | None = None) -> Iterator[Bench]:
        """The bench of a shape, whose weights are made first, and freed in the end."""
        began = time.perf_counter()
        bench = Bench(SHAPES[shape], self.dtype, self.rate, self.repeats, self.profiled)
        target = bench.target_in(quantization)
        jax.block_until_ready(jax.tree.leaves(target))
        size = target.config.weight_bytes(2) / 1e9
        print(f"{shape}: {size:.1f} GB of weights, made in {time.perf_counter() - began:.0f} s", flush=True)
        del target
        try:
            yield bench
        finally:
            Bench.target_in.cache_clear()  # the next shape's weights need the memory of this one's
            Bench.draft.cache_clear()
            gc.collect()

    def keep(self, figures: Iterable[Figure]):
        """Print and write figures, each as soon as it is known."""
        keep(figures, self.result, self.file)
