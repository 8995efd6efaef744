"""The MLP of a mixture of experts on a GPU: are the kernels right, and how far are they from reading each expert once?

    python -m benchmarks.kernels.experts                        # needs an NVIDIA GPU
    python -m benchmarks.kernels.experts --layer gpt-oss-20b    # experts in MXFP4, with biases
    python -m benchmarks.kernels.experts --stored int4          # quantised experts: in groups of codes, or FP8 blocks
    python -m benchmarks.kernels.experts --sweep 1 64 4096      # times other tilings as well, for these numbers of tokens
    python -m benchmarks.kernels.experts --json FILE            # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.kernels.experts --smoke                # small and anywhere: interpreted kernels, meaningless times

It exits 1 if a kernel is wrong, or if the result of a token depends on its neighbours. The shape is that of a layer of
Qwen3-30B-A3B, 128 experts of 768 features, 8 for each token, or of gpt-oss-20b. Routers spread the tokens evenly. The floor
of a time is that of reading the weights of the experts that were hit once, at the read rate that is measured first, or that
of the products at 790 TFLOP/s if that is longer. Times are in microseconds, from the router's logits to the sum over
experts; the time of the routing alone is in them."""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.kernels.verify import FULL, SMOKE, seconds_per_call
from benchmarks.report import results
from jspec.config import Experts
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.moe.grouped_mlp import grouped_mlp_kernel, grouped_mlp_reference, tilings_of
from jspec.pallas.moe.router import route_kernel
from jspec.pallas.moe.router_reference import route_reference
from jspec.pallas.moe.tiles import ExpertTiling, ExpertWeights
from jspec.quantization import fp8_block, mxfp4
from jspec.quantization.codes import random_codes
from jspec.quantization.groups import GROUP

STORED = {"int4": random_codes, "fp8_block": fp8_block.random_numbers}
TOKENS = (1, 5, 16, 64, 80, 320, 4096)
COPIES = 4  # sets of tokens that a timed loop goes through, each with experts of its own
FLOPS = 790e12


@dataclasses.dataclass(frozen=True)
class Layer:
    """X experts of F features over hidden states of D, Y of them for each token.

    Attributes:
      four_bits: whether they are stored in MXFP4, and have biases and gpt-oss' activation.
      stored: how else they are quantised, a key of ``STORED``; None for bfloat16.
    """

    X: int = 128
    F: int = 768
    D: int = 2048
    Y: int = 8
    four_bits: bool = False
    stored: str | None = None

    @property
    def clamp(self) -> float | None:
        return 7.0 if self.four_bits else None

    def weights(self, key) -> tuple[ExpertWeights, ExpertWeights]:
        """``gate_up`` and ``down`` of ``experts``."""
        up, down = jax.random.split(key)
        return self._stacked(up, 2 * self.F, self.D), self._stacked(down, self.D, self.F)

    def _stacked(self, key, out: int, inputs: int) -> ExpertWeights:
        if self.stored is not None:
            numbers, scale = STORED[self.stored](key, (self.X * out, inputs), inputs**-0.5)
            return ExpertWeights(*(array.reshape(self.X, out, *array.shape[1:]) for array in (numbers, scale)))
        if not self.four_bits:
            return ExpertWeights(jax.random.normal(key, (self.X, out, inputs), jnp.bfloat16) * inputs**-0.5)
        pairs = mxfp4.num_pairs(inputs), self.X, out
        codes = jax.random.bits(key, (*pairs, mxfp4.GROUP), jnp.uint8)
        scale = jnp.full(pairs, mxfp4.factors_of_random_codes(inputs), jnp.uint32)
        return ExpertWeights(codes, scale, jax.random.normal(key, (self.X, out), jnp.bfloat16))

    def tokens(self, key, M: int):
        """Hidden states and router logits of M tokens."""
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], (M, self.D), jnp.bfloat16), jax.random.normal(keys[1], (M, self.X))

    @property
    def expert_bytes(self) -> float:
        weight = 1 / 2 + 1 / mxfp4.GROUP if self.four_bits else 2
        weight = {"int4": 1 / 2 + 2 / GROUP, "fp8_block": 1 + 4 / GROUP}.get(self.stored or "", weight)
        return weight * 3 * self.F * self.D

    def floor(self, M: int, hit: float, rate: float) -> float:
        """Seconds for M tokens that hit so many experts."""
        return max(hit * self.expert_bytes / rate, 2 * 3 * M * self.Y * self.F * self.D / FLOPS)


LAYERS = {"qwen3-30b-a3b": Layer(), "gpt-oss-20b": Layer(32, 2880, 2880, 4, four_bits=True)}


def mixture(layer: Layer, interpret: bool, tiling: ExpertTiling | None = None):
    """Routing and experts, as a decoder calls them."""

    def function(x, logits, gate_up, down):
        routed = route_kernel(logits, None, Experts(layer.X, layer.Y, layer.F), interpret=interpret)
        tilings = {"up_tiling": tiling, "down_tiling": tiling}
        outputs = grouped_mlp_kernel(x, routed, gate_up, down, clamp=layer.clamp, **tilings, interpret=interpret)
        return PartialSums(outputs).total(x.dtype)

    return function


def check(layer: Layer, weights, counts, interpret: bool) -> bool:
    """Print a line for each number of tokens; whether all errors are what rounding explains, and no token depends on its
    neighbours."""
    good, kernels = True, jax.jit(mixture(layer, interpret))
    for M in counts:
        x, logits = layer.tokens(jax.random.key(M), M)
        got = kernels(x, logits, *weights)
        some = slice(0, min(M, 16))  # the reference implementation has every expert read every token
        routed = route_reference(logits[some], None, Experts(layer.X, layer.Y, layer.F))
        wanted = PartialSums(grouped_mlp_reference(x[some], routed, *weights, clamp=layer.clamp)).total(x.dtype)
        error = float(jnp.max(jnp.abs(got[some].astype(jnp.float32) - wanted.astype(jnp.float32))))
        other_x, other_logits = layer.tokens(jax.random.key(M + 1), M)
        mixed = kernels(other_x.at[-1].set(x[0]), other_logits.at[-1].set(logits[0]), *weights)
        alone = bool(jnp.all(mixed[-1] == got[0]))
        ok = error < 0.05 and alone
        good &= ok
        print(
            f"{M:>5} tokens: largest error {error:.4f}, beside others {'the same' if alone else 'DIFFERENT'}",
            flush=True,
        )
    return good


def measure(layer: Layer, weights, counts, sizes, interpret: bool, result: results.Result):
    """Print a line for each number of tokens and put its time into ``result``."""
    rate = result.device["bandwidth"]
    alone = functools.partial(route_kernel, bias=None, routing=Experts(layer.X, layer.Y, layer.F), interpret=interpret)
    print(f"\n{layer}, bfloat16; times in us")
    print(f"{'tokens':>6} {'experts':>7} {'floor':>7} {'time':>7} {'ratio':>6} {'routing':>7}")
    for M in counts:
        calls, hit = timed(layer, weights, M)
        took = 1e6 * seconds_per_call(mixture(layer, interpret), calls, 0, sizes)
        floor = 1e6 * layer.floor(M, hit, rate)
        routing = 1e6 * seconds_per_call(alone, [(logits,) for _, logits, *_ in calls], 0, sizes)
        print(f"{M:>6} {hit:>7.1f} {floor:>7.1f} {took:>7.1f} {took / floor:>6.2f} {routing:>7.1f}", flush=True)
        key = f"{M} tokens"
        result.measured[key], result.floors[key] = took, floor
        result.details[key] = {"unit": "us", "experts": hit, "routing": routing}


def timed(layer: Layer, weights, M: int):
    """Arguments of the calls of a loop, and how many experts a call hits on average."""
    calls = [(*layer.tokens(jax.random.key(100 + i), M), *weights) for i in range(COPIES)]
    hit = [len(set(jax.lax.top_k(logits, layer.Y)[1].reshape(-1).tolist())) for _, logits, *_ in calls]
    return calls, sum(hit) / COPIES


def tilings(layer: Layer, M: int) -> Iterator[ExpertTiling]:
    """Tilings to try for M tokens."""
    assignments = tilings_of(M * layer.Y, layer.X, jnp.bfloat16, layer.weights(jax.random.key(0))[0])[0].assignments
    if layer.stored is not None:  # a trip has one group
        several = (assignments,) if assignments <= 32 else (64, 128)
        sizes = itertools.product(several, (32, 64, 128), (GROUP,), (4, 8), (2, 3, 4, 5))
    elif assignments <= 32:
        depths = (64, 192, 320) if layer.four_bits else (64, 128, 256)
        sizes = itertools.product((assignments,), (16, 32, 64), depths, (2, 4), (2, 3, 4))
    else:
        sizes = itertools.product((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4))
    for values in sizes:
        yield ExpertTiling(*values)


def sweep(layer: Layer, weights, counts, sizes, interpret: bool):
    """Print the best few tilings for each number of tokens."""
    for M in counts:
        calls, _ = timed(layer, weights, M)
        timings = []
        for tiling in tilings(layer, M):
            try:
                took = 1e6 * seconds_per_call(mixture(layer, interpret, tiling), calls, 0, sizes)
            except jax.errors.JaxRuntimeError:  # more shared memory than a multiprocessor has
                continue
            timings.append((took, dataclasses.astuple(tiling)))
        print(M, [(round(took, 1), values) for took, values in sorted(timings)[:6]], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, default="qwen3-30b-a3b", help="whose layer has the shape")
    parser.add_argument("--stored", choices=STORED, help="how experts are quantised")
    parser.add_argument("--smoke", action="store_true", help="small shapes, interpreted kernels, any machine")
    parser.add_argument("--sweep", nargs="*", type=int, metavar="M", help="time other tilings too, for M tokens")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    layer, counts, sizes = dataclasses.replace(LAYERS[args.layer], stored=args.stored), TOKENS, FULL
    if layer.four_bits and layer.stored:
        parser.error(f"--stored {layer.stored}: experts of {args.layer} are in MXFP4")
    if args.smoke:
        layer, counts, sizes = Layer(8, 64, 96, 2, layer.four_bits, layer.stored), (1, 5), SMOKE
    sizes = dataclasses.replace(sizes, calls=min(sizes.calls, 40), repeats=3)
    weights = layer.weights(jax.random.key(0))
    good = check(layer, weights, counts, args.smoke)
    rates, rate = bandwidth.for_floors(None)
    result = results.begin("experts", {"layer": dataclasses.asdict(layer), "smoke": args.smoke}, rate, rates)
    measure(layer, weights, counts, sizes, args.smoke, result)
    if args.json:
        results.write(result, args.json)
    if args.sweep is not None:
        sweep(layer, weights, args.sweep or counts, sizes, args.smoke)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
