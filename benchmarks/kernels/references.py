"""Do the verification kernels decide as their reference implementations? Thousands of fresh random rows each, for
``benchmarks.kernels.verify``."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jspec.pallas.sampling.gumbel_max import group_scores, token_scores
from jspec.pallas.sampling.residual import (
    Residual,
    log_residual,
    residual_masses_kernel,
    residual_masses_reference,
    residual_sample_kernel,
    residual_sample_reference,
)
from jspec.pallas.sampling.sample import log_weights, sample_kernel, sample_reference
from jspec.pallas.sampling.top_k_top_p import cutoff_reference
from jspec.pallas.sampling.warped_logits import WarpedLogits
from jspec.sampling.streams import RoundNoise

MARGIN = 1e-5  # a decision closer than this may fall otherwise in the kernel ...
MISMATCHES = 1e-4  # ... and in at most this share of the rows a token does
# Spread of random logits: at 128,256 tokens a nucleus of .95 has some 11,000 or some 100 tokens.
FLAT, PEAKED = 3.0, 6.0
K = 4


def draw_inputs(key, rows, V, dtype):
    """A row of each request; half of them draw noise, half of those have filters."""
    keys = jax.random.split(key, 3)
    logits = (3 * jax.random.normal(keys[0], (rows, 1, V))).astype(dtype)
    kind = jnp.arange(rows) % 4
    temperature = jnp.where(kind < 2, 0.0, jax.random.uniform(keys[1], (rows,), minval=0.5, maxval=2.0))
    top_k, top_p = jnp.where(kind == 3, 50, 0), jnp.where(kind == 3, 0.9, 1.0)
    return logits, temperature, top_k, top_p, jnp.zeros(rows), row_keys(keys[2], (rows, 1))


def row_keys(key, shape):
    return jax.random.key_data(jax.random.split(key, shape))


def threshold_inputs(key, rows, V, dtype):
    """Every row has its own top-k, top-p and min-p, each off in some; rows are flat (8) or peaked (8), by turns."""
    keys = jax.random.split(key, 5)
    kind = jnp.arange(rows) % 8
    spread = jnp.where(jnp.arange(rows) % 16 < 8, FLAT, PEAKED)
    logits = (spread[:, None, None] * jax.random.normal(keys[0], (rows, 1, V))).astype(dtype)
    temperature = jax.random.uniform(keys[1], (rows,), minval=0.5, maxval=2.0)
    top_k = jnp.where(kind & 1 == 0, 0, jax.random.randint(keys[2], (rows,), 1, 200))
    top_p = jnp.where(kind & 2 == 0, 1.0, jax.random.uniform(keys[3], (rows,), minval=0.05, maxval=0.99))
    min_p = jnp.where(kind & 4 == 0, 0.0, jax.random.uniform(keys[4], (rows,), maxval=0.3))
    return logits, temperature, top_k, top_p, min_p


def residual_inputs(key, rows, V, dtype):
    """A residual of every row and the rest of ``residual_sample``: q is near p and its vocabulary is narrower."""
    keys = jax.random.split(key, 6)

    def distributions(logits):
        B, J, width = logits.shape
        flat = logits.reshape(B * J, width).astype(dtype)
        scale, threshold = jnp.ones(B * J), jnp.where(jnp.arange(B * J) % 4 == 0, 0.0, -jnp.inf)
        *_, lse = log_weights(flat, scale, threshold)
        return WarpedLogits(flat.reshape(logits.shape), *(x.reshape(B, J) for x in (scale, threshold, lse)))

    target = 3 * jax.random.normal(keys[0], (rows, K + 1, V))
    draft = (target + jax.random.normal(keys[1], target.shape))[:, :K, : V - V // 8]
    kind = jnp.arange(rows)
    log_weight = jnp.log(jax.random.uniform(keys[3], (rows, K + 1), minval=0.1))
    drafts = jax.random.randint(keys[4], (rows, K), 0, V)
    count = jnp.where(kind % 16 == 5, 2, K)
    residual = Residual(
        distributions(target),
        distributions(draft),
        drafts,
        kind % 8 == 7,
        count,
        jnp.where(kind[:, None] % 2 == 0, 0.0, log_weight),
    )
    at = jax.random.randint(keys[2], (rows,), 0, count + 1)
    noise = RoundNoise(row_keys(keys[5], (rows,)), jnp.full(rows, 9, jnp.int32))
    return residual, at, noise, jnp.full((rows, K + 1), -1)


def shortfall(log_mass, log_weight, key_data, token):
    """How far tokens, and their groups, were from being the best."""
    rank = group_scores(log_mass, key_data)
    size = token_scores(log_weight[:1], key_data[:1], token[:1] * 0).shape[1]
    score = token_scores(log_weight, key_data, token // size)
    short = lambda x, i: jnp.max(x, axis=-1) - jnp.take_along_axis(x, i[:, None], axis=-1)[:, 0]  # noqa: E731
    return jnp.maximum(short(rank, token // size), short(score, token % size))


def compare_draw(args, interpret):
    token, rows = sample_kernel(*args, interpret=interpret)
    expected, distribution = sample_reference(*args)
    flat = lambda x: x.reshape(x.shape[0], *x.shape[2:])  # noqa: E731
    log_weight, log_mass, _ = log_weights(*(flat(x) for x in distribution[:3]))
    noisy = shortfall(log_mass, log_weight, flat(args[5]), token[:, 0])
    greedy = jnp.max(log_weight, axis=-1) - jnp.take_along_axis(log_weight, token, axis=-1)[:, 0]
    margin = jnp.where(args[1] > 0, noisy, greedy)
    return (token != expected)[:, 0], margin, jnp.abs(rows.lse - distribution.lse)


def compare_threshold(args, interpret):
    logits, temperature, top_k, top_p, min_p = args
    rows, scale, flat = logits.shape[0], 1 / temperature, logits[:, 0]
    found = sample_kernel(*args, interpret=interpret)[1].cutoff[:, 0]
    expected = cutoff_reference(flat, scale, top_k, top_p, min_p)
    z = flat.astype(jnp.float32)
    survivors = lambda floor: jnp.sum(z >= floor[:, None], axis=-1)  # noqa: E731
    floor = cutoff_reference(flat, scale, top_k, jnp.ones(rows), min_p)
    weight = jnp.exp((z - jnp.max(z, axis=-1, keepdims=True)) * scale[:, None])
    mass = lambda floor: jnp.sum(jnp.where(z >= floor[:, None], weight, 0.0), axis=-1)  # noqa: E731
    to_top_p = jnp.abs(mass(jnp.maximum(found, expected)) / mass(floor) - top_p)
    to_min_p = jnp.min(jnp.abs(weight - min_p[:, None]), axis=-1)
    margin = jnp.minimum(jnp.where(top_p < 1, to_top_p, jnp.inf), jnp.where(min_p > 0, to_min_p, jnp.inf))
    return survivors(found) != survivors(expected), margin, jnp.zeros(rows)


def compare_residual_masses(args, interpret):
    masses, expected = residual_masses_kernel(args[0], interpret=interpret), residual_masses_reference(args[0])
    error = jnp.abs(masses - expected)
    return jnp.zeros(error.shape, bool), jnp.zeros(error.shape), error


def compare_residual_draw(args, interpret):
    residual, at, noise, _ = args
    masses = residual_masses_reference(residual, at)
    token, ok = residual_sample_kernel(residual, masses, *args[1:], interpret=interpret)
    expected, distribution = residual_sample_reference(residual, masses, *args[1:])
    key = jnp.stack(noise.of_requests().last_key(at, residual.valid), axis=-1)
    margin = shortfall(jnp.log(masses[:, 0]), log_residual(residual, at)[:, 0], key, token)
    return (token != expected) | (ok != distribution), margin, jnp.zeros(token.shape)


# Inputs are made by a program of their own: in one program XLA may give the reference implementation logits from before
# their rounding.
COMPARISONS = {
    "draw": (draw_inputs, compare_draw),
    "threshold": (threshold_inputs, compare_threshold),
    "residual_masses": (residual_inputs, compare_residual_masses),
    "residual_draw": (residual_inputs, compare_residual_draw),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One kernel beside its reference implementation, over many rows of one vocabulary.

    Attributes:
      op: the kernel.
      V, dtype: of the logits.
      rows: compared.
      mismatches: rows that were decided otherwise.
      margin: in such a row, how far the decision was at most from falling as in the reference implementation.
      error: largest difference of the numbers that are computed on the way.
      ok: whether all of that is what rounding explains.
    """

    op: str
    V: int
    dtype: str
    rows: int
    mismatches: int
    margin: float
    error: float
    ok: bool

    @property
    def key(self) -> str:
        return f"check {self.op}, V = {self.V}, {self.dtype}"


def check(vocabularies, total: int, batch: int, ops, interpret: bool) -> Iterator[Comparison]:
    """Compare kernels with their reference implementations, and print a line for each op and vocabulary.

    Args:
      vocabularies: (V, dtype) of the logits.
      total: rows compared for each, ``batch`` in a call.
      ops: names of ``COMPARISONS``.
      interpret: whether kernels are interpreted, on any platform.
    """
    print(f"{'op':<15} {'V':>7} {'dtype':>9} {'rows':>6} {'mismatches':>10} {'worst margin':>12} {'largest error':>13}")
    for name in ops:
        for V, dtype in vocabularies:
            comparison = compare(name, V, dtype, total, batch, interpret)
            numbers = f"{comparison.mismatches:>10} {comparison.margin:>12.1e} {comparison.error:>13.1e}"
            print(
                f"{name:<15} {V:>7} {dtype:>9} {total:>6} {numbers}" + ("" if comparison.ok else "  WRONG"), flush=True
            )
            yield comparison


def compare(name: str, V: int, dtype: str, total: int, batch: int, interpret: bool) -> Comparison:
    """The arguments are those of ``check``."""
    inputs, compare_one = COMPARISONS[name]
    inputs = jax.jit(functools.partial(inputs, rows=batch, V=V, dtype=dtype))

    @jax.jit
    def compare_batch(args):
        differs, margin, error = compare_one(args, interpret)
        return jnp.sum(differs), jnp.max(jnp.where(differs, margin, 0.0)), jnp.max(error)

    seeds = range(total // batch)
    found = [compare_batch(inputs(jax.random.fold_in(jax.random.key(V), seed))) for seed in seeds]
    mismatches, margin, error = (jnp.stack(x) for x in zip(*found, strict=True))
    mismatches, margin, error = int(mismatches.sum()), float(margin.max()), float(error.max())
    # A threshold may fall on either side of a token within the margin of top-p, whose mass is a sum in some order.
    rare = name == "threshold" or mismatches <= MISMATCHES * total
    return Comparison(name, V, dtype, total, mismatches, margin, error, ok=rare and margin < MARGIN and error < MARGIN)
