"""Verification on a GPU: do the kernels decide as their reference implementations do, and how long do they and whole
rules take?

``python -m benchmarks.verify`` needs an NVIDIA GPU; ``--smoke`` runs it small on any machine, with interpreted kernels
and meaningless times. Exits 1 if a kernel decides otherwise than its reference implementation outside the margin."""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.references import COMPARISONS, FLAT, PEAKED, K, check, residual_inputs, row_keys
from jspec.pallas.draw import draw_kernel, draw_reference
from jspec.pallas.residual import (
    residual_draw_kernel,
    residual_draw_reference,
    residual_masses_kernel,
    residual_masses_reference,
)
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES, Proposal

BANDWIDTH = 4.3e12  # bytes / s of a device copy on one H200
L2_BYTES = 50e6


@dataclass(frozen=True)
class Sizes:
    vocabularies: tuple  # (V, dtype) of the comparison
    rows: int  # rows compared for every op and vocabulary
    batch: int  # rows of one call in the comparison
    V: int  # of the timing, bfloat16
    requests: tuple
    filtered: tuple  # of those, timed with filters as well
    calls: int  # timed in one device loop
    repeats: int


REAL = (1031, "float32"), (128256, "bfloat16"), (128256, "float32"), (151936, "bfloat16")
FULL = Sizes(REAL, 10_240, 64, V=128256, requests=(1, 16, 64), filtered=(1, 16), calls=200, repeats=5)
SMOKE = Sizes(((257, "float32"), (300, "bfloat16")), 16, 8, 300, (2,), (2,), 1, 1)


@dataclass(frozen=True)
class Piece:
    """One timed call.

    Attributes:
      op, label: what it is.
      kernel: ``(*args, interpret)``, and
      reference: its reference implementation, None for a whole rule, which has none of its own.
      inputs: ``key -> args`` of both.
      tied: which argument ties it to the call before.
      bytes: of logits that it has to read.
      goal: us it should take, if there is one.
    """

    op: str
    label: str
    kernel: Callable
    reference: Callable | None
    inputs: Callable
    tied: int
    bytes: int
    goal: float | None = None


FILTERS = {
    "off": (PEAKED, 0, 1.0, 0.0),
    "top-k 50": (PEAKED, 50, 1.0, 0.0),
    "top-p .95": (PEAKED, 0, 0.95, 0.0),
    "top-p .95, flat": (FLAT, 0, 0.95, 0.0),
    "min-p .05": (PEAKED, 0, 1.0, 0.05),
    "top-k 50, top-p .95": (PEAKED, 50, 0.95, 0.0),
}
ALL_FILTERS = (PEAKED, 50, 0.95, 0.05)
GOALS = {  # us by rule and requests
    "rejection": {1: 11, 16: 35, 64: 95},
    "block": {1: 16, 16: 45, 64: 125},
    "match": {1: 9, 16: 24, 64: 65},
}
FILTERED_GOAL = {16: 200}  # of target and draft rows together


def timed_draw(key, requests, V, settings, noise=True):
    spread, top_k, top_p, min_p = settings
    keys = jax.random.split(key)
    logits = (spread * jax.random.normal(keys[0], (requests, K + 1, V))).astype("bfloat16")
    all_rows = lambda value: jnp.full(requests, value)  # noqa: E731
    args = logits, all_rows(1.0), all_rows(top_k), all_rows(top_p), all_rows(min_p)
    return (*args, row_keys(keys[1], (requests, K + 1))) if noise else args


def timed_masses(key, requests, V, one):
    """Of every row, or after ``one`` refusal per request: the arguments of ``masses_with`` its kernel or reference
    implementation."""
    residual, *_ = residual_inputs(key, requests, V, "bfloat16")
    at = jnp.arange(requests, dtype=jnp.int32) % K if one else None
    count, point_mass = jnp.full(requests, K, jnp.int32), jnp.zeros(requests, bool)
    return residual.log_weight, residual._replace(log_weight=None, valid=count, point_mass=point_mass), at


def masses_with(masses: Callable) -> Callable:
    return lambda log_weight, residual, at, **how: masses(residual._replace(log_weight=log_weight), at, **how)


def timed_residual_draw(key, requests, V):
    residual, at, *rest = residual_inputs(key, requests, V, "bfloat16")
    return at, residual, residual_masses_reference(residual, at), *rest


def residual_draw_with(draw: Callable) -> Callable:
    return lambda at, residual, masses, noise, best, **how: draw(residual, masses, at, noise, best, **how)


def rule_inputs(key, requests, V, settings):
    """A target, and a draft that is near it and proposes K tokens; the arguments of ``judged``."""
    keys = jax.random.split(key, 3)
    logits, *warp = timed_draw(keys[0], requests, V, settings, noise=False)
    near = logits[:, :K] + jax.random.normal(keys[1], (requests, K, V)).astype(logits.dtype)
    noise = RoundNoise(row_keys(keys[2], (requests,)), jnp.full(requests, 9, jnp.int32))
    index = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (requests, K))
    distribution, tokens = make_distribution(near, Warp(*warp), noise.draft_keys(index))
    count, point_mass = jnp.full(requests, K, jnp.int32), jnp.zeros(requests, bool)
    return *warp, logits, distribution, tokens, count, point_mass, noise


def judged(temperature, top_k, top_p, min_p, logits, distribution, *drafted, rule, draft_rows, interpret=False):
    """A whole verification; with ``draft_rows``, the distributions of the draft's rows are made anew as well."""
    del interpret
    warp = Warp(temperature, top_k, top_p, min_p)
    if draft_rows:
        distribution, _ = make_distribution(distribution.warped.logits, warp)
    tokens, count, point_mass, noise = drafted
    return RULES[rule](logits, warp, Proposal(tokens, count, distribution, point_mass), noise)


def without_logits(draw: Callable) -> Callable:
    """A draw that returns what it computed: the loop would copy the logits that its distributions refer to."""

    def draw_alone(*args, **how):
        token, rows = draw(*args, **how)
        return token, rows[1:]

    return draw_alone


DRAWS = without_logits(draw_kernel), without_logits(draw_reference)


def pieces(sizes: Sizes):
    """What a step verifies with, and whole rules."""
    V, row_bytes = sizes.V, 2 * sizes.V
    for B in sizes.requests:
        read = B * (K + 1) * row_bytes
        for label, noise in (("distribution only", False), ("noise", True)):
            inputs = functools.partial(timed_draw, requests=B, V=V, settings=FILTERS["off"], noise=noise)
            yield Piece("draw", f"B={B}, {label}", *DRAWS, inputs, 1, read)
        if B in sizes.filtered:
            for label, values in FILTERS.items():
                inputs = functools.partial(timed_draw, requests=B, V=V, settings=values)
                yield Piece("threshold", f"B={B}, {label}", *DRAWS, inputs, 1, read)
        for label, one, rows in (("every row", False, 2 * K + 1), ("one row", True, 2)):
            inputs = functools.partial(timed_masses, requests=B, V=V, one=one)
            both = map(masses_with, (residual_masses_kernel, residual_masses_reference))
            yield Piece("residual_masses", f"B={B}, {label}", *both, inputs, 0, rows * B * row_bytes)
        inputs = functools.partial(timed_residual_draw, requests=B, V=V)
        both = map(residual_draw_with, (residual_draw_kernel, residual_draw_reference))
        yield Piece("residual_draw", f"B={B}", *both, inputs, 0, 0)
    for rule, goals in GOALS.items():
        residual_rows = {"match": 0, "rejection": 2, "block": 2 * K}[rule]
        for B in sizes.requests:
            for filters in (False, True) if B in FILTERED_GOAL else (False,):
                goal = FILTERED_GOAL[B] if filters else goals.get(B)
                inputs = functools.partial(
                    rule_inputs, requests=B, V=V, settings=ALL_FILTERS if filters else FILTERS["off"]
                )
                rows = K + 1 + residual_rows + K * filters
                whole = functools.partial(judged, rule=rule, draft_rows=filters)
                label = f"B={B}, all filters, drafts too" if filters else f"B={B}"
                yield Piece(rule, label, whole, None, inputs, 0, B * rows * row_bytes, goal)


def seconds_per_call(function, inputs, tied: int, sizes: Sizes) -> float:
    """Median over repeats of one call, in a device loop over copies of the inputs.

    Argument ``tied`` of each call gets a zero that only the outputs of the call before can tell, so that the calls run
    one after another and none is hoisted; every output is kept. The zero is a launch of its own."""
    rounds = max(1, sizes.calls // len(inputs))

    @jax.jit
    def loop(copies):
        def body(_, outputs):
            last, kept = outputs[-1], []
            for args in copies:
                seen = sum(x.reshape(-1)[0].astype(jnp.float32) for x in jax.tree.leaves(last))
                zero = jnp.where(seen > 1e38, 1, 0).astype(args[tied].dtype)
                last = function(*args[:tied], args[tied] + zero, *args[tied + 1 :])
                kept.append(last)
            return kept

        shapes = [jax.eval_shape(function, *args) for args in copies]
        return jax.lax.fori_loop(0, rounds, body, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))

    jax.block_until_ready(loop(inputs))
    times = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        jax.block_until_ready(loop(inputs))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (rounds * len(inputs))


def measure(sizes: Sizes, ops, interpret: bool):
    print(f"\nV = {sizes.V}, bfloat16; floor: logits read once at {BANDWIDTH / 1e12} TB/s; times in us")
    print(f"{'op':<15} {'what':<28} {'MB':>6} {'from':>4} {'floor':>6} {'time':>7} {'goal':>6} {'reference':>7}")
    for piece in pieces(sizes):
        if piece.op not in ops:
            continue
        copies = min(2 if piece.bytes > L2_BYTES else 4, sizes.calls)
        inputs = [jax.jit(piece.inputs)(jax.random.key(seed)) for seed in range(copies)]
        time_of = lambda f: 1e6 * seconds_per_call(f, inputs, piece.tied, sizes)  # noqa: B023, E731
        took = time_of(functools.partial(piece.kernel, interpret=interpret))
        reference = f"{time_of(piece.reference):>7.1f}" if piece.reference else f"{'-':>7}"
        goal = f"{piece.goal:>6.0f}" if piece.goal else f"{'-':>6}"
        source = "HBM" if copies * piece.bytes > L2_BYTES else "L2"
        floor = 1e6 * piece.bytes / BANDWIDTH
        sizes_and_floor = f"{piece.bytes / 1e6:>6.1f} {source:>4} {floor:>6.1f}"
        print(f"{piece.op:<15} {piece.label:<28} {sizes_and_floor} {took:>7.1f} {goal} {reference}", flush=True)


OPS = [*COMPARISONS, *GOALS]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, interpreted kernels, any machine")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--only", choices=("check", "time"), help="one half of it")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    sizes, interpret = (SMOKE, True) if args.smoke else (FULL, False)
    compared = [op for op in args.ops if op in COMPARISONS]
    good = args.only == "time" or check(sizes.vocabularies, sizes.rows, sizes.batch, compared, interpret)
    if args.only != "check":
        measure(sizes, args.ops, interpret)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
