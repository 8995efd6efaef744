"""The MLP of a mixture of experts on a GPU: are the kernels right, and how far are they from reading each expert once?

    python -m benchmarks.experts                  # needs an NVIDIA GPU
    python -m benchmarks.experts --sweep          # times other tilings as well
    python -m benchmarks.experts --json FILE      # also writes a result, see benchmarks/results.py
    python -m benchmarks.experts --smoke          # small and anywhere: interpreted kernels, meaningless times

It exits 1 if a kernel is wrong, or if the result of a token depends on its neighbours. The shape is that of a layer of
Qwen3-30B-A3B: 128 experts of 768 features, 8 for each token. Routers spread the tokens evenly. The floor of a time is that
of reading the weights of the experts that were hit once, at the read rate that is measured first, or that of the products
at 790 TFLOP/s if that is longer. Times are in microseconds."""

import argparse
import dataclasses
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp

from benchmarks import bandwidth, results
from benchmarks.verify import FULL, SMOKE, seconds_per_call
from jspec.pallas.expert_tiles import Stacked, Tiling
from jspec.pallas.experts import experts_kernel, experts_reference, tiling_of
from jspec.pallas.routing import route_kernel
from jspec.pallas.routing_reference import route_reference

TOKENS = (1, 5, 16, 64, 80, 320, 4096)
COPIES = 4  # sets of tokens that a timed loop goes through, each with experts of its own
FLOPS = 790e12


@dataclasses.dataclass(frozen=True)
class Layer:
    """X experts of F features over hidden states of D, Y of them for each token."""

    X: int = 128
    F: int = 768
    D: int = 2048
    Y: int = 8

    def weights(self, key):
        """``gate_up`` and ``down`` of ``experts``, in bfloat16."""
        keys = jax.random.split(key)
        gate_up = jax.random.normal(keys[0], (self.X, 2 * self.F, self.D), jnp.bfloat16) * self.D**-0.5
        down = jax.random.normal(keys[1], (self.X, self.D, self.F), jnp.bfloat16) * self.F**-0.5
        return gate_up, down

    def tokens(self, key, M: int):
        """Hidden states and router logits of M tokens."""
        keys = jax.random.split(key)
        return jax.random.normal(keys[0], (M, self.D), jnp.bfloat16), jax.random.normal(keys[1], (M, self.X))

    @property
    def expert_bytes(self) -> int:
        return 2 * 3 * self.F * self.D

    def floor(self, M: int, hit: float, rate: float) -> float:
        """Seconds for M tokens that hit so many experts."""
        return max(hit * self.expert_bytes / rate, 2 * 3 * M * self.Y * self.F * self.D / FLOPS)


def mixture(layer: Layer, interpret: bool, tiling: Tiling | None = None):
    """Routing and experts, as a decoder calls them."""

    def function(x, logits, gate_up, down):
        routed = route_kernel(logits, None, layer.Y, True, interpret=interpret)
        return experts_kernel(
            x, routed, Stacked(gate_up), Stacked(down), up_tiling=tiling, down_tiling=tiling, interpret=interpret
        )

    return function


def check(layer: Layer, weights, counts, interpret: bool) -> bool:
    """Print a line for each number of tokens; whether all errors are what rounding explains, and no token depends on its
    neighbours."""
    good, kernels = True, jax.jit(mixture(layer, interpret))
    for M in counts:
        x, logits = layer.tokens(jax.random.key(M), M)
        got = kernels(x, logits, *weights)
        some = slice(0, min(M, 16))  # the reference implementation has every expert read every token
        routed = route_reference(logits[some], None, layer.Y, True)
        wanted = experts_reference(x[some], routed, *map(Stacked, weights))
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
    print(f"\n{layer}, bfloat16; times in us\n{'tokens':>6} {'experts':>7} {'floor':>7} {'time':>7} {'ratio':>6}")
    for M in counts:
        calls, hit = timed(layer, weights, M)
        took = 1e6 * seconds_per_call(mixture(layer, interpret), calls, 0, sizes)
        floor = 1e6 * layer.floor(M, hit, rate)
        print(f"{M:>6} {hit:>7.1f} {floor:>7.1f} {took:>7.1f} {took / floor:>6.2f}", flush=True)
        key = f"{M} tokens"
        result.measured[key], result.floors[key] = took, floor
        result.details[key] = {"unit": "us", "experts": hit}


def timed(layer: Layer, weights, M: int):
    """Arguments of the calls of a loop, and how many experts a call hits on average."""
    calls = [(*layer.tokens(jax.random.key(100 + i), M), *weights) for i in range(COPIES)]
    hit = [len(set(jax.lax.top_k(logits, layer.Y)[1].reshape(-1).tolist())) for _, logits, *_ in calls]
    return calls, sum(hit) / COPIES


def sweep(layer: Layer, weights, counts, sizes, interpret: bool):
    """Print the best few tilings for each number of tokens."""
    for M in counts:
        calls, _ = timed(layer, weights, M)
        base, found = tiling_of(M * layer.Y, layer.X, jnp.bfloat16), []
        columns, depths, warps, stages = (16, 32, 64, 128), (64, 128, 256), (2, 4, 8), (2, 3, 4)
        rows = (base.rows,) if M < 320 else (32, 64, 128)
        for values in itertools.product(rows, columns, depths, warps, stages):
            if values[0] * values[1] // values[3] > 2048 or values[1] * values[2] * values[4] > 2**16:
                continue
            try:
                took = 1e6 * seconds_per_call(mixture(layer, interpret, Tiling(*values)), calls, 0, sizes)
            except jax.errors.JaxRuntimeError:  # more shared memory than a multiprocessor has
                continue
            found.append((took, values))
        print(M, [(round(t, 1), v) for t, v in sorted(found)[:6]], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small shapes, interpreted kernels, any machine")
    parser.add_argument("--sweep", nargs="*", type=int, metavar="M", help="time other tilings too, for M tokens")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    layer, counts, sizes = (Layer(8, 48, 64, 2), (1, 5), SMOKE) if args.smoke else (Layer(), TOKENS, FULL)
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
