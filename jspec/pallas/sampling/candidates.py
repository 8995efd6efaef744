"""The tokens of a distribution that are closest to being sampled, for drafts that branch."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.sampling.gumbel_max import best_of, group_scores, group_words, gumbel_block, gumbel_noise
from jspec.pallas.sampling.sample import group_weights, log_weights, weighed
from jspec.pallas.sampling.top_k_top_p import DISTRIBUTION_WARPS, cutoff_if_any
from jspec.pallas.sampling.warped_logits import group_size, grouped, num_groups
from jspec.pallas.triton import kernel_call


def closest(logits, temperature, top_k, top_p, min_p, key_data, count: int):
    """``closest_reference``, and on an NVIDIA GPU the kernel."""
    functions = (functools.partial(function, count=count) for function in (closest_kernel, closest_reference))
    return by_platform(*functions, logits, temperature, top_k, top_p, min_p, key_data)


def closest_reference(logits, temperature, top_k, top_p, min_p, key_data, count: int):
    """The ``count`` tokens of each distribution that are closest to being drawn, the best first.

    Args:
      logits, temperature, top_k, top_p, min_p, key_data: as of ``sample_reference``.
      count: C.

    Returns:
      tokens, int32 ``[B, J, C]``, all different, and the log of how likely each is, float32 ``[B, J, C]``, as
      ``jspec.sampling.candidates`` has them.
    """
    B, J, V = logits.shape
    greedy, flat = jnp.repeat(temperature == 0, J), logits.reshape(B * J, V)
    settings = [jnp.repeat(x, J) for x in (temperature, top_k, top_p, min_p)]
    scale = 1.0 / jnp.where(greedy, 1.0, settings[0])
    filters = [jnp.where(greedy, off, x) for x, off in zip(settings[1:], (0, 1.0, 0.0), strict=True)]
    log_weight, log_mass, lse = log_weights(flat, scale, cutoff_if_any(flat, scale, *filters))
    by_group, keys = grouped(log_weight), key_data.reshape(B * J, 2)
    of_groups = jnp.where(greedy[:, None], jnp.max(by_group, axis=2), group_scores(log_mass, keys))
    most, size = _considered(V, count), by_group.shape[2]
    best_groups, group = jax.lax.top_k(of_groups, min(most, of_groups.shape[1]))
    plain = jnp.take_along_axis(by_group, group[:, :, None], axis=1)
    tokens = group[:, :, None] * size + jnp.arange(size, dtype=jnp.int32)[None, None]
    noise = gumbel_noise(keys, tokens.reshape(B * J, -1).astype(jnp.uint32)).reshape(plain.shape)
    scores = jnp.where(greedy[:, None, None], plain, plain + noise)
    lacks = (best_groups[:, :1] - best_groups)[:, :, None] + (jnp.max(scores, axis=2, keepdims=True) - scores)
    lacks = jnp.where(jnp.isfinite(lacks), lacks, jnp.inf).reshape(B * J, -1)
    closeness, place = jax.lax.top_k(-lacks, most)
    token, log_weight = (jnp.take_along_axis(x.reshape(B * J, -1), place, axis=1) for x in (tokens, plain))
    among = closeness - jax.nn.logsumexp(closeness, axis=1, keepdims=True)
    likely = jnp.where(greedy[:, None], log_weight - lse[:, None], among)
    likely = jnp.where(jnp.isfinite(closeness) & jnp.isfinite(lse)[:, None], likely, -jnp.inf)
    return token[:, :count].reshape(B, J, count), likely[:, :count].reshape(B, J, count)


def _considered(V: int, count: int) -> int:
    """How many tokens are ranked. The n best lie in the n best groups, each of which has one that is better than all of
    the groups behind it."""
    return min(2 * count, V)


def closest_kernel(logits, temperature, top_k, top_p, min_p, key_data, count: int, *, interpret=False):
    """``closest_reference`` as two kernels: one weighs the groups of every distribution, the other ranks tokens."""
    B, J, V = logits.shape
    peak, total = group_weights(logits, temperature, interpret)
    return kernel_call(
        _closest,
        *(logits, temperature, top_k, top_p, min_p, peak, total, key_data),
        grid=(B, J),
        out_shape=[jax.ShapeDtypeStruct((B, J, count), dtype) for dtype in (jnp.int32, jnp.float32)],
        num_warps=DISTRIBUTION_WARPS,
        interpret=interpret,
        size=group_size(V),
        most=_considered(V, count),
        ranked=min(_considered(V, count), num_groups(V)),
    )


def _closest(logits_ref, temperature_ref, *refs, size: int, most: int, ranked: int):
    top_k_ref, top_p_ref, min_p_ref, peak_ref, total_ref, key_ref, token_ref, likely_ref = refs
    at = b, _ = pl.program_id(0), pl.program_id(1)
    V, count = logits_ref.shape[2], token_ref.shape[2]
    settings = [ref[b] for ref in (temperature_ref, top_k_ref, top_p_ref, min_p_ref)]
    rows = weighed(logits_ref, at, settings, peak_ref, total_ref, size)
    noise = functools.partial(gumbel_block, key_ref, at)
    masses = lambda: rows.shifts + jnp.log(rows.totals) + noise(group_words(rows.groups))  # noqa: E731
    scores = jax.lax.cond(rows.noisy, masses, lambda: rows.peaks)

    line = jnp.arange(pl.next_power_of_2(ranked), dtype=jnp.int32)  # a group, the best first
    group, of_group, first = jnp.zeros_like(line), jnp.full(line.shape, -jnp.inf), jnp.max(scores)
    for i in range(ranked):
        best, number = best_of(scores, rows.groups, peak_ref.shape[2])
        group, of_group = jnp.where(line == i, number, group), jnp.where(line == i, best, of_group)
        scores = jnp.where(rows.groups == number, -jnp.inf, scores)

    ids = group[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    real = (ids < V) & (line < ranked)[:, None]
    z = pltriton.load(logits_ref.at[(*at, ids)], mask=real, other=-jnp.inf).astype(jnp.float32)
    plain = jnp.where(z < rows.floor, -jnp.inf, z * rows.scale)
    scores = jax.lax.cond(rows.noisy, lambda: plain + noise(ids.astype(jnp.uint32)), lambda: plain)
    lacks = (first - of_group)[:, None] + (jnp.max(scores, axis=1)[:, None] - scores)
    closeness = jnp.where((lacks < jnp.inf) & (scores > -jnp.inf), -lacks, -jnp.inf)  # -inf where it is no number

    place = line[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    ranks, total, usable = [], jnp.float32(0.0), (rows.lse > -jnp.inf) & (rows.lse < jnp.inf)
    for _ in range(most):
        best = jnp.max(closeness)
        here = place == jnp.min(jnp.where(closeness == best, place, line.shape[0] * size - 1))
        ranks.append((best, jnp.max(jnp.where(here, ids, 0)), jnp.max(jnp.where(here, plain, -jnp.inf))))
        total += jnp.exp(best)  # the first lacks nothing
        closeness = jnp.where(here, -jnp.inf, closeness)
    for i in range(count):
        best, token, log_weight = ranks[min(i, most - 1)]
        likely = jnp.where(rows.noisy, best - jnp.log(total), log_weight - rows.lse)
        token_ref[*at, jnp.int32(i)] = token
        likely_ref[*at, jnp.int32(i)] = jnp.where(usable & (best > -jnp.inf) & (i < most), likely, -jnp.inf)
