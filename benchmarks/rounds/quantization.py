"""What quantised weights cost, and activations that are rounded beside them: how far they move the distribution of the
shipped target, and how long passes and rounds take with them.

    python -m benchmarks.rounds.quantization --json FILE       # writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.quantization --only kl         # the distribution alone, which needs no GPU
    python -m benchmarks.rounds.quantization --only activations  # rounded activations, without a GPU in some minutes
    python -m benchmarks.rounds.quantization --only passes     # the passes alone
    python -m benchmarks.rounds.quantization --only rounds     # the rounds alone, of FP8 in blocks
    python -m benchmarks.rounds.quantization --only rounds --shape qwen3-30b-a3b --formats fp8 fp8_block  # some of them
    python -m benchmarks.rounds.quantization --smoke           # tiny passes and rounds, anywhere, with meaningless times

The distribution: KL(original || quantised) in nats for each token, and the share of tokens of which both have the same
likeliest next one, over the random tokens of ``jspec-convert --verify logits``, in float32. Keys of the result are ``kl,
<format>``. Activations: a *kind* is ``float32``, ``int8`` or ``fp8`` for weights alone, and ``int8, rounded`` or ``fp8,
rounded`` with ``activation_dtype``; benchmarks/rounds/quality.py says what is measured. Keys of the result are
``activations, kl, <kind> from <reference>`` and ``activations, acceptance, <drafter>, T = <temperature>, <kind>``. The
passes: 8 of the 32 layers of the Llama-3.1-8B shape and the output head, 16 rows of 5 query tokens, in microseconds. Keys of
the result are ``8 layers, 16 x 5, <format>``. The rounds: plain decoding of whole models, and a verify pass, in
milliseconds; of targets that round activations with ``--rounded --formats int8``. Keys of the result are ``rounds, <shape>,
<what>, <format>``, with ``, rounded`` behind them for these."""

import argparse
import dataclasses
import gc
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Sequence

import jax
import numpy as np

import jspec
from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import MIXED, Bench
from benchmarks.rounds.of_shapes import known_format
from benchmarks.rounds.programs import PAGE, Decoding, Forward
from benchmarks.rounds.quality import Report, measure_acceptance, measure_divergence
from benchmarks.shapes import LLAMA_8B, SHAPES, TINY, Pair
from convert import convert
from convert.folders import load_folder
from convert.verify import LENGTHS, Comparison, compare, jspec_logits
from jspec.commands.demo import FAMILY
from jspec.config import QUANTIZATIONS, STORED_QUANTIZATIONS
from jspec.models import build

FORMATS = QUANTIZATIONS
LAYERS = 8
ANYWHERE = ("kl", "activations")  # parts that need no GPU
PLAIN = {f"batch {batch}": Decoding(None, 0, batch, 512, 256) for batch in (1, 16, 64)}
ROUNDS = {
    "llama-3.1-8b": {**PLAIN, "verify 16 x 5": Forward(16, 5, 1024, 1024, 64)},
    "qwen3-30b-a3b": PLAIN,
}
ROUNDED = ("int8", "fp8")  # weights beside which activations are rounded
DRAFTERS = ("draft", "eagle3")
SMALL = {"batch 2": Decoding(None, 0, 2, 16, 8), "verify 2 x 3": Forward(2, 3, PAGE, PAGE, 1)}
SMOKE = {"tiny": SMALL, "tiny-latent": SMALL}


def divergences(lengths: Sequence[int] = LENGTHS) -> dict[str, Comparison]:
    """How far each format moves the logits of the shipped target, over random texts of these lengths."""
    folder = FAMILY / "target"

    def logits(of: pathlib.Path) -> list[np.ndarray]:
        config, params = load_folder(of, "float32")
        rng = np.random.default_rng(0)
        sequences = [rng.integers(config.vocab_size, size=length) for length in lengths]
        return jspec_logits(build(config, jax.tree.map(jax.numpy.asarray, params)), sequences)

    original, by_kind = logits(folder), {}
    for kind in FORMATS:
        with tempfile.TemporaryDirectory() as parent:
            converted = pathlib.Path(parent) / "converted"
            convert(folder, converted, quantize=kind, progress=False)
            by_kind[kind] = compare(original, logits(converted))
    return by_kind


def measure_divergences(result: results.Result):
    """Put the figures of every format into ``result``."""
    for kind, one in divergences().items():
        key = f"kl, {kind}"
        result.measured[key], result.details[key] = one.mean_kl, {"unit": "nats"} | dataclasses.asdict(one)
        print(f"{kind}: mean KL {one.mean_kl:.2e}, largest {one.max_kl:.2e} nats, top-1 agreement {one.top1:.1%}")


def measure_activations(report: Report, smoke: bool):
    """How far weights of eight bits, and activations that are rounded beside them, move distributions and acceptance."""
    with tempfile.TemporaryDirectory() as parent:
        folders = {"float32": FAMILY / "target"} | {kind: pathlib.Path(parent) / kind for kind in ROUNDED}
        for kind in ROUNDED:
            convert(folders["float32"], folders[kind], quantize=kind, progress=False)

        def load(kind: str, draft: str | None = None, **how) -> jspec.LLM:
            weights, _, rounded = kind.partition(", ")
            path = None if draft is None else FAMILY / draft
            activations = weights if rounded else "auto"
            with warnings.catch_warnings():  # some drafters make fewer drafts
                warnings.filterwarnings("ignore", "num_draft_tokens=", UserWarning)
                return jspec.load(folders[weights], path, activation_dtype=activations, max_batch=8, max_len=256, **how)

        pairs = [pair for kind in ROUNDED for pair in (("float32", kind), ("float32", f"{kind}, rounded"))]
        pairs += [(kind, f"{kind}, rounded") for kind in ROUNDED]
        keys = {f"activations, kl, {kind} from {reference}": (reference, kind) for reference, kind in pairs}
        measure_divergence(report, load, "float32", keys, smoke)
        kinds = ["float32", *(f"{kind}{how}" for kind in ROUNDED for how in ("", ", rounded"))]
        measure_acceptance(report, load, kinds, DRAFTERS[:1] if smoke else DRAFTERS, smoke, "activations, ")


def measure_passes(result: results.Result, smoke: bool, rate: float, file: pathlib.Path | None):
    """Put the figures of every format into ``result``, and write it after each."""
    base = TINY if smoke else dataclasses.replace(LLAMA_8B, num_layers=LAYERS, windows=())
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    bench = Bench(Pair(base, base), dtype, rate, 1 if smoke else 5)
    live, passes = (PAGE, 1) if smoke else (1024, 64)
    for kind in (None, *STORED_QUANTIZATIONS):
        timed = bench.time(Forward(16, 5, live, live, passes, kind))
        key = f"8 layers, 16 x 5, {kind or dtype}"
        result.measured[key], result.floors[key] = 1e6 * timed.seconds, 1e6 * timed.floor
        result.details[key] = {"unit": "us", "kernels": timed.kernels}
        print(f"{key}: {1e6 * timed.seconds:,.0f} us, floor {1e6 * timed.floor:,.0f}", flush=True)
        if file:
            results.write(result, file)


def measure_rounds(
    result: results.Result,
    smoke: bool,
    rate: float,
    file: pathlib.Path | None,
    shapes: Sequence[str],
    kinds: Sequence[str],
    rounded: bool = False,
):
    """Put the figures of every shape in these formats into ``result``, and write it after each; with ``rounded`` those of
    targets that round the inputs of their maps."""
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    for shape, kind in ((shape, kind) for shape in shapes for kind in kinds):
        bench = Bench(SHAPES[shape], dtype, rate, 1 if smoke else 3)
        for name, what in (SMOKE if smoke else ROUNDS)[shape].items():
            stored = None if kind == "none" else kind
            timed = bench.time(dataclasses.replace(what, quantization=stored, activations=rounded))
            key = f"rounds, {shape}, {name}, {dtype if kind == 'none' else kind}{', rounded' * rounded}"
            result.measured[key], result.floors[key] = 1e3 * timed.seconds, 1e3 * timed.floor
            result.details[key] = {"unit": "ms", "kernels": timed.kernels, "experts": timed.experts}
            print(f"{key}: {1e3 * timed.seconds:.3f} ms, floor {1e3 * timed.floor:.3f}", flush=True)
            if file:
                results.write(result, file)
        Bench.target_in.cache_clear()  # the next weights need the memory of these
        del bench
        gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("kl", "activations", "passes", "rounds"), help="one part of it")
    parser.add_argument("--shape", nargs="+", choices=ROUNDS, default=list(ROUNDS), help="of rounds")
    parser.add_argument(
        "--formats",
        nargs="+",
        type=lambda name: name if name in MIXED else known_format(name),
        default=["fp8_block"],
        help=f"of rounds: none, {', '.join((*STORED_QUANTIZATIONS, *MIXED))}, or another of jspec.quantization.formats",
    )
    parser.add_argument("--rounded", action="store_true", help="rounds of targets that round activations, too")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--smoke", action="store_true", help="tiny models, any machine, meaningless times")
    args = parser.parse_args()
    if args.rounded and not set(args.formats) <= set(ROUNDED):
        parser.error(f"--rounded: expected --formats {' '.join(ROUNDED)}, not {' '.join(args.formats)}")
    if not args.smoke and args.only not in ANYWHERE and jax.default_backend() != "gpu":
        parser.error("no GPU: times need one; --only kl and --only activations run here, --smoke runs tiny models")
    rates, rate = bandwidth.for_floors(None) if args.only not in ANYWHERE else ({}, None)
    result = results.begin("quantization", {"smoke": args.smoke}, rate, rates)
    if args.only in (None, "kl"):
        measure_divergences(result)
    if args.only in (None, "activations"):
        measure_activations(Report(result, args.json), args.smoke)
    if args.only in (None, "passes"):
        measure_passes(result, args.smoke, rate or bandwidth.ASSUMED, args.json)
    if args.only in (None, "rounds"):
        shapes = SMOKE if args.smoke else args.shape
        measure_rounds(
            result, args.smoke, rate or bandwidth.ASSUMED, args.json, list(shapes), args.formats, args.rounded
        )
    if args.json:
        results.write(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
