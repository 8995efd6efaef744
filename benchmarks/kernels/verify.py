"""Verification on a GPU: do the kernels decide as their reference implementations do, and how long do the kernels and
whole rules take?

    python -m benchmarks.kernels.verify                     # both halves; needs an NVIDIA GPU
    python -m benchmarks.kernels.verify --only time         # one half
    python -m benchmarks.kernels.verify --json FILE         # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.kernels.verify --smoke             # small and anywhere: interpreted kernels, meaningless times

It exits 1 if a kernel decides otherwise than its reference implementation outside the margin. The floor of a time is that
of reading the logits once, at the read rate that is measured first. A figure's key in the result is the op and what tells
it from other figures of that op, as in ``rejection, B = 16``; times are in microseconds. Keys of the comparison begin with
``check``, and their figure is the number of rows that were decided otherwise."""

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.kernels.references import COMPARISONS, FLAT, PEAKED, K, check, residual_inputs, row_keys
from benchmarks.report import results
from jspec.pallas.sampling.residual import (
    residual_masses_kernel,
    residual_masses_reference,
    residual_sample_kernel,
    residual_sample_reference,
)
from jspec.pallas.sampling.sample import sample_kernel, sample_reference
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES, Proposal

L2_BYTES = 50e6


@dataclass(frozen=True)
class Sizes:
    vocabularies: tuple  # (V, dtype) of the logits that are compared
    rows: int  # compared for every op and vocabulary
    batch: int  # rows of one call in the comparison
    V: int  # of the bfloat16 logits that are timed
    batches: tuple  # B of the calls that are timed
    filtered: tuple  # those of them that are timed with filters as well
    calls: int  # timed in one device loop
    repeats: int


REAL = (1031, "float32"), (128256, "bfloat16"), (128256, "float32"), (151936, "bfloat16")
FULL = Sizes(REAL, 10_240, 64, V=128256, batches=(1, 16, 64), filtered=(1, 16), calls=200, repeats=5)
SMOKE = Sizes(((257, "float32"), (300, "bfloat16")), 16, 8, 300, (2,), (2,), 1, 1)


@dataclass(frozen=True)
class Piece:
    """One call that is timed.

    Attributes:
      op: the kernel or the rule.
      label: what tells it from other calls of the op.
      kernel: ``(*args, interpret)``, what is timed.
      reference: its reference implementation, None for a whole rule, which has none.
      inputs: ``key -> args`` of both.
      tied: index of the argument that ties a call to the one before.
      bytes: of logits that it has to read.
      goal: microseconds that it should take, None without a goal.
    """

    op: str
    label: str
    kernel: Callable
    reference: Callable | None
    inputs: Callable
    tied: int
    bytes: int
    goal: float | None = None

    @property
    def key(self) -> str:
        return f"{self.op}, {self.label}"


FILTERS = {
    "off": (PEAKED, 0, 1.0, 0.0),
    "top-k 50": (PEAKED, 50, 1.0, 0.0),
    "top-p .95": (PEAKED, 0, 0.95, 0.0),
    "top-p .95, flat": (FLAT, 0, 0.95, 0.0),
    "min-p .05": (PEAKED, 0, 1.0, 0.05),
    "top-k 50, top-p .95": (PEAKED, 50, 0.95, 0.0),
}
ALL_FILTERS = (PEAKED, 50, 0.95, 0.05)
GOALS = {  # microseconds by rule and number of rows
    "rejection": {1: 11, 16: 35, 64: 95},
    "block": {1: 16, 16: 45, 64: 125},
    "match": {1: 9, 16: 24, 64: 65},
}
FILTERED_GOAL = {16: 200}  # with filters on the distributions of target and draft


def timed_draw(key, rows, V, settings, noise=True):
    spread, top_k, top_p, min_p = settings
    keys = jax.random.split(key)
    logits = (spread * jax.random.normal(keys[0], (rows, K + 1, V))).astype("bfloat16")
    all_rows = lambda value: jnp.full(rows, value)  # noqa: E731
    args = logits, all_rows(1.0), all_rows(top_k), all_rows(top_p), all_rows(min_p)
    return (*args, row_keys(keys[1], (rows, K + 1))) if noise else args


def timed_masses(key, rows, V, one):
    """Arguments of what ``masses_with`` makes of the kernel or its reference implementation: for the masses after every
    draft, or with ``one`` for those after the one draft of each row that was rejected."""
    residual, *_ = residual_inputs(key, rows, V, "bfloat16")
    at = jnp.arange(rows, dtype=jnp.int32) % K if one else None
    count, point_mass = jnp.full(rows, K, jnp.int32), jnp.zeros((rows, K), bool)
    return residual.log_weight, residual._replace(log_weight=None, valid=count, point_mass=point_mass), at


def masses_with(masses: Callable) -> Callable:
    return lambda log_weight, residual, at, **how: masses(residual._replace(log_weight=log_weight), at, **how)


def timed_residual_draw(key, rows, V):
    residual, at, *rest = residual_inputs(key, rows, V, "bfloat16")
    return at, residual, residual_masses_reference(residual, at), *rest


def residual_draw_with(draw: Callable) -> Callable:
    return lambda at, residual, masses, noise, best, **how: draw(residual, masses, at, noise, best, **how)


def rule_inputs(key, rows, V, settings):
    """A target, and a draft that is near it and proposes K tokens; the arguments of ``judged``."""
    keys = jax.random.split(key, 3)
    logits, *warp = timed_draw(keys[0], rows, V, settings, noise=False)
    near = logits[:, :K] + jax.random.normal(keys[1], (rows, K, V)).astype(logits.dtype)
    noise = RoundNoise(row_keys(keys[2], (rows,)), jnp.full(rows, 9, jnp.int32))
    index = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (rows, K))
    distribution, tokens = make_distribution(near, Warp(*warp), noise.draft_keys(index))
    count, point_mass = jnp.full(rows, K, jnp.int32), jnp.zeros((rows, K), bool)
    return *warp, logits, distribution, tokens, count, point_mass, noise


def judged(temperature, top_k, top_p, min_p, logits, distribution, *drafted, rule, draft_too, interpret=False):
    """A whole verification; with ``draft_too``, the distributions of the draft are made anew as well."""
    del interpret
    warp = Warp(temperature, top_k, top_p, min_p)
    if draft_too:
        distribution, _ = make_distribution(distribution.warped.logits, warp)
    tokens, count, point_mass, noise = drafted
    return RULES[rule](logits, warp, Proposal(tokens, count, distribution, point_mass), noise)


def without_logits(draw: Callable) -> Callable:
    """A draw that returns what it computed: the loop would copy the logits that its distributions refer to."""

    def draw_alone(*args, **how):
        token, rows = draw(*args, **how)
        return token, rows[1:]

    return draw_alone


DRAWS = without_logits(sample_kernel), without_logits(sample_reference)


def pieces(sizes: Sizes) -> Iterator[Piece]:
    """Whole rules, which have goals, and then the kernels that they are made of."""
    yield from rules(sizes)
    V, row_bytes = sizes.V, 2 * sizes.V
    for B in sizes.batches:
        read = B * (K + 1) * row_bytes
        for label, noise in (("distributions only", False), ("noise", True)):
            inputs = functools.partial(timed_draw, rows=B, V=V, settings=FILTERS["off"], noise=noise)
            yield Piece("draw", f"B = {B}, {label}", *DRAWS, inputs, 1, read)
        if B in sizes.filtered:
            for label, values in FILTERS.items():
                inputs = functools.partial(timed_draw, rows=B, V=V, settings=values)
                yield Piece("threshold", f"B = {B}, {label}", *DRAWS, inputs, 1, read)
        for label, one, vectors in (("after every draft", False, 2 * K + 1), ("after one draft", True, 2)):
            inputs = functools.partial(timed_masses, rows=B, V=V, one=one)
            both = map(masses_with, (residual_masses_kernel, residual_masses_reference))
            yield Piece("residual_masses", f"B = {B}, {label}", *both, inputs, 0, vectors * B * row_bytes)
        inputs = functools.partial(timed_residual_draw, rows=B, V=V)
        both = map(residual_draw_with, (residual_sample_kernel, residual_sample_reference))
        yield Piece("residual_draw", f"B = {B}", *both, inputs, 0, 0)


def rules(sizes: Sizes) -> Iterator[Piece]:
    for rule, goals in GOALS.items():
        for_residuals = {"match": 0, "rejection": 2, "block": 2 * K}[rule]  # vectors of V logits that a row reads again
        for B in sizes.batches:
            for filters in (False, True) if B in FILTERED_GOAL else (False,):
                goal = FILTERED_GOAL[B] if filters else goals.get(B)
                settings = ALL_FILTERS if filters else FILTERS["off"]
                inputs = functools.partial(rule_inputs, rows=B, V=sizes.V, settings=settings)
                vectors = K + 1 + for_residuals + K * filters
                whole = functools.partial(judged, rule=rule, draft_too=filters)
                label = f"B = {B}, all filters, drafts too" if filters else f"B = {B}"
                yield Piece(rule, label, whole, None, inputs, 0, B * vectors * 2 * sizes.V, goal)


def seconds_per_call(function, inputs, tied: int, sizes: Sizes) -> float:
    """Median over repeats of one call, in a device loop over copies of the inputs.

    Argument ``tied`` of each call is raised by a zero that is computed from the outputs of the call before. So the calls
    run one after another, and none is moved out of the loop; every output is kept. The zero is a launch of its own."""
    return seconds_of_loop(device_loop(function, inputs, tied, sizes), inputs, sizes)


def device_loop(function, inputs, tied: int, sizes: Sizes):
    """The program that ``seconds_per_call`` times, which has yet to be compiled; the outputs of its last calls."""

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
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, _rounds(inputs, sizes), body, zeros)

    return loop


def seconds_of_loop(loop, inputs, sizes: Sizes) -> float:
    """The same of a ``device_loop``, which may have been compiled before."""
    jax.block_until_ready(loop(inputs))
    times = []
    for _ in range(sizes.repeats):
        start = time.perf_counter()
        jax.block_until_ready(loop(inputs))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (_rounds(inputs, sizes) * len(inputs))


def _rounds(inputs, sizes: Sizes) -> int:
    return max(1, sizes.calls // len(inputs))


def measure(sizes: Sizes, ops, interpret: bool, rate: float, until: float, save: Callable):
    """Print a line for each piece and give it to ``save``; none begins after ``until``, a time of the monotonic clock."""
    print(f"\nV = {sizes.V}, bfloat16; floor: logits read once at {rate / 1e9:,.0f} GB/s; times in us")
    print(f"{'op':<15} {'what':<30} {'MB':>6} {'from':>4} {'floor':>6} {'time':>7} {'goal':>6} {'reference':>7}")
    for piece in pieces(sizes):
        if piece.op not in ops:
            continue
        if time.monotonic() > until:
            print(f"{piece.op:<15} {piece.label:<30} left out: the time is over", flush=True)
            continue
        copies = min(2 if piece.bytes > L2_BYTES else 4, sizes.calls)
        inputs = [jax.jit(piece.inputs)(jax.random.key(seed)) for seed in range(copies)]
        time_of = lambda f: 1e6 * seconds_per_call(f, inputs, piece.tied, sizes)  # noqa: B023, E731
        took = time_of(functools.partial(piece.kernel, interpret=interpret))
        reference = time_of(piece.reference) if piece.reference else None
        source = "HBM" if copies * piece.bytes > L2_BYTES else "L2"
        floor = 1e6 * piece.bytes / rate
        columns = f"{piece.bytes / 1e6:>6.1f} {source:>4} {floor:>6.1f} {took:>7.1f}"
        goal = "-" if piece.goal is None else f"{piece.goal:.0f}"
        beside = "-" if reference is None else f"{reference:.1f}"
        print(f"{piece.op:<15} {piece.label:<30} {columns} {goal:>6} {beside:>7}", flush=True)
        save(piece, took, floor, {"unit": "us", "bytes": piece.bytes, "from": source, "reference": reference})


OPS = [*COMPARISONS, *GOALS]


def run(args) -> bool:
    """Print what is measured and write the result; whether all kernels decide as their reference implementations do."""
    until = time.monotonic() + args.seconds
    sizes, interpret = (SMOKE, True) if args.smoke else (FULL, False)
    rates, rate = bandwidth.for_floors(None)
    settings = {"vocabulary": sizes.V, "dtype": "bfloat16", "num_draft_tokens": K, "smoke": args.smoke}
    result = results.begin("verify", settings, rate, rates)

    def save(piece: Piece, took: float, floor: float, details: dict):
        result.measured[piece.key], result.floors[piece.key], result.details[piece.key] = took, floor, details
        if piece.goal is not None:
            result.goals[piece.key] = {"goal": piece.goal}
        if args.json:
            results.write(result, args.json)

    good = True
    if args.only != "time":
        compared = [op for op in args.ops if op in COMPARISONS]
        for one in check(sizes.vocabularies, sizes.rows, sizes.batch, compared, interpret):
            good &= one.ok
            result.measured[one.key], result.details[one.key] = one.mismatches, dataclasses.asdict(one)
            if args.json:
                results.write(result, args.json)
    if args.only != "check":
        measure(sizes, args.ops, interpret, rate, until, save)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, interpreted kernels, any machine")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--only", choices=("check", "time"), help="one half of it")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further timing after so long")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
