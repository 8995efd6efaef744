"""The MLP of a mixture of experts on a GPU: are the kernels right, and how far are they from reading each expert once?

    python -m benchmarks.kernels.experts                        # needs an NVIDIA GPU
    python -m benchmarks.kernels.experts --layer gpt-oss-20b    # experts in MXFP4, with biases
    python -m benchmarks.kernels.experts --stored int4          # quantised experts: in groups of codes, or FP8 blocks
    python -m benchmarks.kernels.experts --sweep 1 64 4096      # only tries tilings, for these numbers of tokens
    python -m benchmarks.kernels.experts --json FILE            # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.kernels.experts --smoke                # small and anywhere: interpreted kernels, meaningless times

It exits 1 if a kernel is wrong, or if the result of a token depends on its neighbours. The shape is that of a layer of
Qwen3-30B-A3B, 128 experts of 768 features, 8 for each token, or of another mixture. Routers spread the tokens evenly. The
floor of a time is that of reading the weights of the experts that were hit once, at the read rate that is measured first,
or that of the products at 790 TFLOP/s if that is longer. Times are in microseconds, from the router's logits to the sum
over experts; the time of the routing alone is in them. A sweep times either product by itself, and the launch that ties
one call to the next, of some microseconds, is in its times; it exits 1 if a tiling gives another result."""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.kernels.verify import FULL, SMOKE, device_loop, seconds_of_loop, seconds_per_call
from benchmarks.report import results
from jspec.config import Experts
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.moe.grouped_mlp import (
    grouped_mlp_kernel,
    grouped_mlp_reference,
    hidden_kernel,
    made_kernel,
    tilings_of,
)
from jspec.pallas.moe.router import route_kernel
from jspec.pallas.moe.router_reference import Routed, route_reference
from jspec.pallas.moe.tiles import ExpertMap, ExpertTiling
from jspec.quantization import mxfp4_pairs, nvfp4
from jspec.quantization.formats import GROUP, format_of
from jspec.quantization.weight import random_weight

STORED = "int4", "nvfp4", "fp8_block", "mxfp8"
TOKENS = (1, 5, 16, 64, 80, 320, 4096)
COPIES = 4  # sets of tokens that a timed loop goes through, each with experts of its own
FLOPS = 790e12


@dataclasses.dataclass(frozen=True)
class Layer:
    """X experts of F features over hidden states of D, Y of them for each token. The last ``shared`` of both are those of
    every token.

    Attributes:
      four_bits: whether they are stored in MXFP4, and have biases and gpt-oss' activation.
      stored: how else they are quantised, one of ``STORED``; None for bfloat16.
    """

    X: int = 128
    F: int = 768
    D: int = 2048
    Y: int = 8
    four_bits: bool = False
    stored: str | None = None
    shared: int = 0

    @property
    def routing(self) -> Experts:
        return Experts(self.X - self.shared, self.Y - self.shared, self.F, shared=self.shared)

    @property
    def clamp(self) -> float | None:
        return 7.0 if self.four_bits else None

    def weights(self, key) -> tuple[ExpertMap, ExpertMap]:
        """``gate_up`` and ``down`` of ``experts``."""
        up, down = jax.random.split(key)
        return self._stacked(up, 2 * self.F, self.D), self._stacked(down, self.D, self.F)

    def _stacked(self, key, out: int, inputs: int) -> ExpertMap:
        form, shape = format_of("mxfp4_pairs" if self.four_bits else self.stored), (self.X * out, inputs)
        weight = random_weight(key, shape, inputs**-0.5, dtype=jnp.bfloat16, form=form).split(self.X)
        return ExpertMap(weight, jax.random.normal(key, (self.X, out), jnp.bfloat16) if self.four_bits else None)

    def tokens(self, key, M: int):
        """Hidden states and router logits of M tokens."""
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], (M, self.D), jnp.bfloat16), jax.random.normal(
            keys[1], (M, self.routing.count)
        )

    @property
    def expert_bytes(self) -> float:
        """Of all three maps of an expert."""
        weight = 1 / 2 + 1 / mxfp4_pairs.GROUP if self.four_bits else 2
        stored = {"int4": 1 / 2 + 2 / GROUP, "nvfp4": 1 / 2 + 1 / nvfp4.GROUP, "fp8_block": 1 + 4 / GROUP}
        stored["mxfp8"] = 1 + 1 / 32
        weight = stored.get(self.stored or "", weight)
        return weight * 3 * self.F * self.D

    def floor(self, M: int, hit: float, rate: float) -> float:
        """Seconds for M tokens that hit so many experts."""
        return max(hit * self.expert_bytes / rate, 2 * 3 * M * self.Y * self.F * self.D / FLOPS)


LAYERS = {
    "qwen3-30b-a3b": Layer(),
    "qwen3.6-35b-a3b": Layer(257, 512, 2048, 9, shared=1),
    "gpt-oss-20b": Layer(32, 2880, 2880, 4, four_bits=True),
}


def mixture(layer: Layer, interpret: bool):
    """Routing and experts, as a decoder calls them."""

    def function(x, logits, gate_up, down):
        routed = route_kernel(logits, None, layer.routing, interpret=interpret)
        outputs = grouped_mlp_kernel(x, routed, gate_up, down, clamp=layer.clamp, interpret=interpret)
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
        routed = route_reference(logits[some], None, layer.routing)
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
    alone = functools.partial(route_kernel, bias=None, routing=layer.routing, interpret=interpret)
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
    chosen = layer.Y - layer.shared
    hit = [len(set(jax.lax.top_k(logits, chosen)[1].reshape(-1).tolist())) for _, logits, *_ in calls]
    return calls, sum(hit) / COPIES + layer.shared


def product(layer: Layer, up: bool, interpret: bool, tiling: ExpertTiling) -> Callable:
    """One of the two products, as ``device_loop`` calls it: it is tied by ``sizes``, the least of its arguments."""

    def function(sizes, x, routed: Routed, weights):
        routed = routed._replace(sizes=sizes)
        if up:
            how = {"down": weights.weight, "clamp": layer.clamp}
            return hidden_kernel(x, routed, weights, tiling=tiling, interpret=interpret, **how)
        return made_kernel(x, routed, weights, tiling=tiling, interpret=interpret)

    return function


def products(layer: Layer, weights, M: int, interpret: bool) -> tuple[list, list]:
    """Arguments of the calls of a loop, of either product."""
    gate_up, down = weights
    how = {"down": down.weight, "clamp": layer.clamp, "interpret": interpret}
    hidden_of = jax.jit(functools.partial(hidden_kernel, **how))
    up_calls, down_calls = [], []
    for x, logits, *_ in timed(layer, weights, M)[0]:
        routed = route_kernel(logits, None, layer.routing, interpret=interpret)
        up_calls.append((routed.sizes, x, routed, gate_up))
        down_calls.append((routed.sizes, hidden_of(x, routed, gate_up), routed, down))
    return up_calls, down_calls


def tilings(layer: Layer, M: int, up: bool) -> Iterator[ExpertTiling]:
    """Tilings to try for one of the products of M tokens.

    Those are left out whose tiles do not suit the assignments of an expert, whose sums fill more than half of the
    registers, or that have fewer bytes under way than memory needs, or more than a multiprocessor has: small tiles wait for
    memory, and it needs two of them for that."""
    per_expert, maps = M * layer.Y / layer.X, 1 + up
    for size, outputs, inputs, num_warps, num_stages in itertools.product(
        (16, 32, 64, 128), (16, 32, 64, 128, 256), _inputs_of_trips(layer), (2, 4, 8), (2, 3, 4, 5)
    ):
        suits = 0.8 * min(per_expert, 64) <= size <= max(16, 4 * per_expert)
        if layer.four_bits or layer.stored:
            warps = num_warps in ((2, 4) if layer.four_bits else (4, 8)) and outputs in (32, 64, 128)
        elif size <= 32:  # a warp has 16 or 32 outputs
            warps = num_stages > 2 and outputs // num_warps in (16, 32)
        else:
            warps = num_warps == (8 if size * outputs * maps > 64 * 128 else 4) and outputs >= 64 and num_stages > 2
        sums = size * outputs * maps / (32 * num_warps) <= 128
        weight = outputs * inputs * layer.expert_bytes / (3 * layer.F * layer.D)
        bytes_under_way = (num_stages - 1) * maps * weight
        buffers = num_stages - (size <= 32)  # the products of large tiles read shared memory while they run
        shared_bytes = buffers * (maps * weight + 2 * size * inputs)
        fits = bytes_under_way >= 12 * 1024 and shared_bytes <= (104 if size <= 32 else 226) * 1024
        if suits and warps and sums and fits:
            yield ExpertTiling(size, outputs, inputs, num_warps, num_stages)


def _inputs_of_trips(layer: Layer) -> tuple[int, ...]:
    if layer.stored:  # a trip has one group
        return (GROUP,)
    return (64, 192, 320) if layer.four_bits else (64, 128)


def sweep(layer: Layer, weights, counts, sizes, interpret: bool, rate: float, most: int | None) -> bool:
    """Print the best few tilings of either product for each number of tokens; whether all tilings give the results of the
    one in use, but for rounding."""
    good = True
    print(f"\n{layer}; times in us, and tilings: assignments, outputs, inputs, warps, stages, outputs first")
    for M in counts:
        hit = timed(layer, weights, M)[1]
        for part, calls, share in zip(
            ("up", "down"), products(layer, weights, M, interpret), (2 / 3, 1 / 3), strict=True
        ):
            in_use = tilings_of(M * layer.Y, layer.X, jnp.bfloat16, calls[0][-1].weight)[part == "down"]
            others = [tiling for tiling in tilings(layer, M, part == "up") if tiling != in_use][:most]
            timings, same = times_of(layer, calls, part == "up", [in_use, *others], sizes, interpret)
            best = dict.fromkeys([in_use, *sorted(timings, key=timings.__getitem__)[:4]])
            turned = [dataclasses.replace(tiling, outputs_first=not tiling.outputs_first) for tiling in best]
            more, also_same = times_of(layer, calls, part == "up", [in_use, *turned], sizes, interpret)
            timings, same = timings | more, same and also_same
            good &= same
            head = f"{M:>5} tokens, {hit:.0f} experts, {part:<4}: floor {1e6 * share * layer.floor(M, hit, rate):.1f}"
            print(f"{head}, in use {timings[in_use]:.1f} {dataclasses.astuple(in_use)}, of {len(timings)} tilings")
            for tiling, took in sorted(timings.items(), key=lambda item: item[1])[:8]:
                print(f"      {took:>7.1f} {dataclasses.astuple(tiling)}", flush=True)
    return good


def times_of(
    layer: Layer, calls, up: bool, candidates: list[ExpertTiling], sizes, interpret: bool
) -> tuple[dict[ExpertTiling, float], bool]:
    """Microseconds of those of the tilings that can run, and whether all give what the first one does, but for rounding."""

    def compiled(tiling: ExpertTiling) -> Any:
        try:
            return device_loop(product(layer, up, interpret, tiling), calls, 0, sizes).lower(calls).compile()
        except jax.errors.JaxRuntimeError:  # more shared memory than a multiprocessor has
            return None

    with concurrent.futures.ThreadPoolExecutor(1 if interpret else os.cpu_count()) as pool:
        loops = list(pool.map(compiled, candidates))
    timings, wanted, same = {}, None, True
    for tiling, loop in zip(candidates, loops, strict=True):
        if loop is None:
            continue
        timings[tiling] = 1e6 * seconds_of_loop(loop, calls, sizes)
        got = loop(calls)[0]
        wanted = got if wanted is None else wanted
        error = float(_distance(got, wanted))
        if not error < 0.01:
            same = False
            print(f"{tiling}: another result than {candidates[0]}, by {error:.2g} of it", flush=True)
    return timings, same


@jax.jit
def _distance(x, y):
    """The norm of the difference of two results, of the norm of the second."""
    x, y = (array.astype(jnp.float32) for array in (x, y))
    return jnp.linalg.norm(x - y) / jnp.linalg.norm(y)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=LAYERS, default="qwen3-30b-a3b", help="whose layer has the shape")
    parser.add_argument("--stored", choices=STORED, help="how experts are quantised")
    parser.add_argument("--smoke", action="store_true", help="small shapes, interpreted kernels, any machine")
    parser.add_argument(
        "--sweep", nargs="*", type=int, metavar="M", help="only time tilings of the products of M tokens"
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    layer, counts, sizes = dataclasses.replace(LAYERS[args.layer], stored=args.stored), TOKENS, FULL
    if layer.four_bits and layer.stored:
        parser.error(f"--stored {layer.stored}: experts of {args.layer} are in MXFP4")
    if args.smoke:
        layer, counts, sizes = Layer(8, 64, 96, 2, layer.four_bits, layer.stored, layer.shared), (1, 5), SMOKE
    sizes = dataclasses.replace(sizes, calls=min(sizes.calls, 40), repeats=3)
    weights = layer.weights(jax.random.key(0))
    rates, rate = bandwidth.for_floors(None)
    if args.sweep is not None:
        good = sweep(layer, weights, args.sweep or counts, sizes, args.smoke, rate, 2 if args.smoke else None)
        return 0 if good else 1
    good = check(layer, weights, counts, args.smoke)
    result = results.begin("experts", {"layer": dataclasses.asdict(layer), "smoke": args.smoke}, rate, rates)
    measure(layer, weights, counts, sizes, args.smoke, result)
    if args.json:
        results.write(result, args.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
