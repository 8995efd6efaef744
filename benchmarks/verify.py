"""The verification kernels on a GPU: do they decide as their twins do, and how far are they from the memory's speed?

``python -m benchmarks.verify`` needs an NVIDIA GPU; ``--smoke`` runs it small on any machine, with interpreted kernels and
meaningless times. Exits 1 if a kernel decides otherwise than its twin outside the margin.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jspec.pallas.draw import draw_kernel, draw_reference, draw_scores
from jspec.pallas.residual import (
    Rows,
    residual_draw_kernel,
    residual_draw_reference,
    residual_mass_kernel,
    residual_mass_reference,
    residual_scores,
)
from jspec.pallas.threshold import threshold_kernel, threshold_reference

BANDWIDTH = 4.3e12  # bytes / s of a device copy on one H200
L2_BYTES = 50e6
MARGIN = 1e-5  # a decision closer than this may fall otherwise in the kernel ...
MISMATCHES = 1e-4  # ... and in at most this share of the rows a token does
FLAT, PEAKED = (
    3.0,
    6.0,
)  # spread of random logits: at 128,256 tokens a nucleus of .95 has some 11,000 or some 100 tokens
K = 4


@dataclass(frozen=True)
class Sizes:
    vocabularies: tuple  # (V, dtype) of the comparison
    rows: int  # rows compared for every op and vocabulary
    batch: int  # rows of one call in the comparison
    V: int  # of the timing, bfloat16
    draw_rows: tuple
    requests: tuple
    calls: int  # timed in one device loop
    repeats: int


REAL = (1031, "float32"), (128256, "bfloat16"), (128256, "float32"), (151936, "bfloat16")
FULL = Sizes(REAL, 10_240, 64, V=128256, draw_rows=(5, 80, 320), requests=(1, 16, 64), calls=200, repeats=5)
SMOKE = Sizes(((257, "float32"), (300, "bfloat16")), 16, 8, 300, (2,), (2,), 4, 1)


def draw_inputs(key, rows, V, dtype):
    """Half of the rows are cut at their typical logit, half draw noise."""
    keys = jax.random.split(key, 3)
    logits = (3 * jax.random.normal(keys[0], (rows, V))).astype(dtype)
    scale = jax.random.uniform(keys[1], (rows,), minval=0.5, maxval=2.0)
    threshold = jnp.where(jnp.arange(rows) % 4 < 2, -jnp.inf, 0.0)
    return logits, scale, threshold, jax.random.key_data(jax.random.split(keys[2], rows)), jnp.arange(rows) % 2 == 0


def threshold_inputs(key, rows, V, dtype):
    """Every row has its own top-k, top-p and min-p, each off in some; rows are flat (8) or peaked (8), by turns."""
    keys = jax.random.split(key, 5)
    kind = jnp.arange(rows) % 8
    spread = jnp.where(jnp.arange(rows) % 16 < 8, FLAT, PEAKED)
    logits = (spread[:, None] * jax.random.normal(keys[0], (rows, V))).astype(dtype)
    scale = jax.random.uniform(keys[1], (rows,), minval=0.5, maxval=2.0)
    top_k = jnp.where(kind & 1 == 0, 0, jax.random.randint(keys[2], (rows,), 1, 200))
    top_p = jnp.where(kind & 2 == 0, 1.0, jax.random.uniform(keys[3], (rows,), minval=0.05, maxval=0.99))
    min_p = jnp.where(kind & 4 == 0, 0.0, jax.random.uniform(keys[4], (rows,), maxval=0.3))
    return logits, scale, top_k, top_p, min_p


def residual_inputs(key, rows, V, dtype):
    """p, q and the rest of ``residual_draw``: q is near p and its vocabulary is narrower."""
    keys = jax.random.split(key, 6)

    def laws(logits):
        B, J, width = logits.shape
        flat = logits.reshape(B * J, width).astype(dtype)
        scale, threshold = jnp.ones(B * J), jnp.where(jnp.arange(B * J) % 4 == 0, 0.0, -jnp.inf)
        _, lse = draw_reference(flat, scale, threshold)
        return Rows(flat.reshape(logits.shape), *(x.reshape(B, J) for x in (scale, threshold, lse)))

    target = 3 * jax.random.normal(keys[0], (rows, K + 1, V))
    draft = (target + jax.random.normal(keys[1], target.shape))[:, :K, : V - V // 8]
    row = jax.random.randint(keys[2], (rows,), 0, K + 1)
    kind = jnp.arange(rows)
    log_weight = jnp.where(kind % 2 == 0, 0.0, jnp.log(jax.random.uniform(keys[3], (rows,), minval=0.1)))
    use_q = (row < K) & (kind % 8 != 7)
    excluded = jnp.where(use_q, -1, jax.random.randint(keys[4], (rows,), 0, V))
    key_data = jax.random.key_data(jax.random.split(keys[5], rows))
    return laws(target), laws(draft), row, log_weight, use_q, excluded, key_data, kind % 4 != 3


def short_of_best(score, token):
    return jnp.max(score, axis=-1) - jnp.take_along_axis(score, token[:, None], axis=-1)[:, 0]


def compare_draw(args, interpret):
    token, lse = draw_kernel(*args, interpret=interpret)
    expected, expected_lse = draw_reference(*args)
    return token != expected, short_of_best(draw_scores(*args), token), jnp.abs(lse - expected_lse)


def compare_threshold(args, interpret):
    logits, scale, top_k, top_p, min_p = args
    rows = logits.shape[0]
    found, expected = threshold_kernel(*args, interpret=interpret), threshold_reference(*args)
    z = logits.astype(jnp.float32)
    survivors = lambda floor: jnp.sum(z >= floor[:, None], axis=-1)  # noqa: E731
    floor = threshold_reference(logits, scale, top_k, jnp.ones(rows), min_p)
    weight = jnp.exp((z - jnp.max(z, axis=-1, keepdims=True)) * scale[:, None])
    mass = lambda floor: jnp.sum(jnp.where(z >= floor[:, None], weight, 0.0), axis=-1)  # noqa: E731
    to_top_p = jnp.abs(mass(jnp.maximum(found, expected)) / mass(floor) - top_p)
    to_min_p = jnp.min(jnp.abs(weight - min_p[:, None]), axis=-1)
    margin = jnp.minimum(jnp.where(top_p < 1, to_top_p, jnp.inf), jnp.where(min_p > 0, to_min_p, jnp.inf))
    return survivors(found) != survivors(expected), margin, jnp.zeros(rows)


def compare_residual_mass(args, interpret):
    p, q, _, log_weight, *_ = args
    log_weight = jnp.broadcast_to(log_weight[:, None], (log_weight.shape[0], K))
    error = residual_mass_kernel(p, q, log_weight, interpret=interpret) - residual_mass_reference(p, q, log_weight)
    return jnp.zeros(error.shape, bool), jnp.zeros(error.shape), jnp.abs(error)


def compare_residual_draw(args, interpret):
    token = residual_draw_kernel(*args, interpret=interpret)
    return token != residual_draw_reference(*args), short_of_best(residual_scores(*args), token), jnp.zeros(token.shape)


# Inputs are made by a program of their own: in one program XLA may give the twin logits from before their rounding.
COMPARISONS = {
    "draw": (draw_inputs, compare_draw),
    "threshold": (threshold_inputs, compare_threshold),
    "residual_mass": (residual_inputs, compare_residual_mass),
    "residual_draw": (residual_inputs, compare_residual_draw),
}


def check(sizes: Sizes, ops, interpret: bool) -> bool:
    """Print a line per op and vocabulary; whether all of them decide as their twins do."""
    print(f"{'op':<14} {'V':>7} {'dtype':>9} {'rows':>6} {'mismatches':>10} {'worst margin':>12} {'largest error':>13}")
    good = True
    for name in ops:
        for V, dtype in sizes.vocabularies:
            inputs, compare_one = COMPARISONS[name]
            inputs = jax.jit(functools.partial(inputs, rows=sizes.batch, V=V, dtype=dtype))

            @jax.jit
            def compare(args, compare_one=compare_one):
                differs, margin, error = compare_one(args, interpret)
                return jnp.sum(differs), jnp.max(jnp.where(differs, margin, 0.0)), jnp.max(error)

            seeds = range(sizes.rows // sizes.batch)
            results = [compare(inputs(jax.random.fold_in(jax.random.key(V), seed))) for seed in seeds]
            mismatches, margin, error = (jnp.stack(x) for x in zip(*results, strict=True))
            mismatches, margin, error = int(mismatches.sum()), float(margin.max()), float(error.max())
            # A threshold may fall on either side of a token within the margin of top-p, whose mass is a sum in some order.
            rare = name == "threshold" or mismatches <= MISMATCHES * sizes.rows
            ok = rare and margin < MARGIN and error < MARGIN
            good &= ok
            print(
                f"{name:<14} {V:>7} {dtype:>9} {sizes.rows:>6} {mismatches:>10} {margin:>12.1e} {error:>13.1e}"
                + ("" if ok else "  WRONG"),
                flush=True,
            )
    return good


@dataclass(frozen=True)
class Piece:
    """One timed call: ``inputs(key) -> args`` of kernel and twin, which float argument ties it to the call before, and the
    bytes of logits that it has to read."""

    op: str
    label: str
    kernel: Callable
    reference: Callable
    inputs: Callable
    tied: int
    bytes: int


def timed_draw(key, rows, V, noise):
    logits, scale, _, key_data, _ = draw_inputs(key, rows, V, "bfloat16")
    args = logits, scale, jnp.full(rows, -jnp.inf)
    return (*args, key_data, jnp.ones(rows, bool)) if noise else args


def timed_threshold(key, rows, V, settings):
    spread, top_k, top_p, min_p = settings
    logits = (spread * jax.random.normal(key, (rows, V))).astype("bfloat16")
    return logits, jnp.ones(rows), jnp.full(rows, top_k), jnp.full(rows, top_p), jnp.full(rows, min_p)


def timed_mass(key, requests, V):
    p, q, *_ = residual_inputs(key, requests, V, "bfloat16")
    return p, q, jnp.zeros((requests, K))


def pieces(sizes: Sizes):
    """What a step verifies with: draws of 1, 16 and 64 requests' rows, thresholds, residuals."""
    V, row_bytes = sizes.V, 2 * sizes.V
    for rows in sizes.draw_rows:
        for label, noise in (("greedy", False), ("noise", True)):
            inputs = functools.partial(timed_draw, rows=rows, V=V, noise=noise)
            yield Piece("draw", f"{rows} rows, {label}", draw_kernel, draw_reference, inputs, 1, rows * row_bytes)
    settings = {
        "off": (PEAKED, 0, 1.0, 0.0),
        "top-k 50": (PEAKED, 50, 1.0, 0.0),
        "top-p .95": (PEAKED, 0, 0.95, 0.0),
        "top-p .95, flat": (FLAT, 0, 0.95, 0.0),
        "min-p .05": (PEAKED, 0, 1.0, 0.05),
        "top-k 50, top-p .95": (PEAKED, 50, 0.95, 0.0),
    }
    for rows in sizes.draw_rows[:2]:
        for label, values in settings.items():
            inputs = functools.partial(timed_threshold, rows=rows, V=V, settings=values)
            read = 0 if label == "off" else rows * row_bytes
            yield Piece("threshold", f"{rows} rows, {label}", threshold_kernel, threshold_reference, inputs, 1, read)
    for B in sizes.requests:
        inputs = functools.partial(timed_mass, requests=B, V=V)
        twin, read = residual_mass_reference, 2 * B * K * row_bytes
        yield Piece("residual_mass", f"B={B}, K={K}", residual_mass_kernel, twin, inputs, 2, read)
        inputs = functools.partial(residual_inputs, rows=B, V=V, dtype="bfloat16")
        twin, read = residual_draw_reference, 2 * B * row_bytes
        yield Piece("residual_draw", f"B={B}, K={K}", residual_draw_kernel, twin, inputs, 3, read)


def seconds_per_call(function, inputs, tied: int, sizes: Sizes) -> float:
    """Median over repeats of one call, in a device loop over copies of the inputs.

    Argument ``tied`` of each call gets a zero that only the outputs of the call before can tell, so that the calls run one
    after another and none is hoisted; every output is kept.
    """
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
    print(f"{'op':<14} {'what':<28} {'MB':>6} {'from':>4} {'floor':>6} {'kernel':>7} {'ratio':>6} {'twin':>7}")
    for piece in pieces(sizes):
        if piece.op not in ops:
            continue
        copies = 2 if piece.bytes > L2_BYTES else 4
        inputs = [jax.jit(piece.inputs)(jax.random.key(seed)) for seed in range(copies)]
        kernel = functools.partial(piece.kernel, interpret=interpret)
        took, twin = (1e6 * seconds_per_call(f, inputs, piece.tied, sizes) for f in (kernel, piece.reference))
        floor = 1e6 * piece.bytes / BANDWIDTH
        source = "HBM" if copies * piece.bytes > L2_BYTES else "L2"
        ratio = f"{took / floor:>6.1f}" if floor else f"{'-':>6}"
        sizes_and_floor = f"{piece.bytes / 1e6:>6.1f} {source:>4} {floor:>6.1f}"
        print(f"{piece.op:<14} {piece.label:<28} {sizes_and_floor} {took:>7.1f} {ratio} {twin:>7.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes, interpreted kernels, any machine")
    parser.add_argument("--ops", nargs="+", choices=COMPARISONS, default=list(COMPARISONS))
    parser.add_argument("--only", choices=("check", "time"), help="one half of it")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: the kernels are compiled for NVIDIA GPUs; --smoke runs a small interpreted version here")
    sizes, interpret = (SMOKE, True) if args.smoke else (FULL, False)
    good = args.only == "time" or check(sizes, args.ops, interpret)
    if args.only != "check":
        measure(sizes, args.ops, interpret)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
