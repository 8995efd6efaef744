"""The tokens of a distribution that are closest to being sampled, for drafts that branch."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.sampling.gumbel_max import best_of, group_scores, group_words, gumbel_block, gumbel_noise
from jspec.pallas.sampling.sample import group_weights, log_weights, scale_of, weighed
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
    """``closest_reference`` as four kernels: two weigh the groups of every distribution and choose the best ones, one ranks
    the tokens of each of these, whose noise is most of the work, in an instance of its own, and one merges them."""
    B, J, V = logits.shape
    size, most = group_size(V), _considered(V, count)
    ranked, of_group = min(most, num_groups(V)), min(most, group_size(V))
    shape_of = lambda dtype, *shape: jax.ShapeDtypeStruct((B, J, *shape), dtype)  # noqa: E731
    call = functools.partial(kernel_call, interpret=interpret)
    peak, total = group_weights(logits, temperature, interpret)
    *groups, floor, lse = call(
        _choose_groups,
        *(logits, temperature, top_k, top_p, min_p, peak, total, key_data),
        grid=(B, J),
        out_shape=[shape_of(jnp.int32, ranked), shape_of(jnp.float32, ranked), *[shape_of(jnp.float32)] * 2],
        num_warps=DISTRIBUTION_WARPS,
        size=size,
    )
    tokens = call(
        _rank_tokens,
        *(logits, temperature, key_data, *groups, floor),
        grid=(ranked, B, J),
        out_shape=[shape_of(dtype, ranked * of_group) for dtype in (jnp.float32, jnp.float32, jnp.int32)],
        num_warps=_RANKING_WARPS,
        size=size,
        count=of_group,
    )
    return call(
        _merge_groups,
        *(temperature, lse, *tokens),
        grid=(B, J),
        out_shape=[shape_of(dtype, count) for dtype in (jnp.int32, jnp.float32)],
        num_warps=1,  # which waits for no other
        most=most,
    )


_RANKING_WARPS = 4
_RANKED = 64  # numbers that are ranked at the same time, each compared with all of them


def _choose_groups(logits_ref, temperature_ref, *refs, size: int):
    """The best groups, the best first, and what each lacks to that; and the distribution's floor and lse."""
    top_k_ref, top_p_ref, min_p_ref, peak_ref, total_ref, key_ref, group_ref, lacks_ref, floor_ref, lse_ref = refs
    at = b, _ = pl.program_id(0), pl.program_id(1)
    settings = [ref[b] for ref in (temperature_ref, top_k_ref, top_p_ref, min_p_ref)]
    rows = weighed(logits_ref, at, settings, peak_ref, total_ref, size)
    floor_ref[at], lse_ref[at] = rows.floor, rows.lse

    def masses():
        return rows.shifts + jnp.log(rows.totals) + gumbel_block(key_ref, at, group_words(rows.groups))

    scores, first = jax.lax.cond(rows.noisy, masses, lambda: rows.peaks), None
    for i in range(group_ref.shape[2]):
        best, number = best_of(scores, rows.groups, peak_ref.shape[2])
        first = best if first is None else first
        group_ref[*at, jnp.int32(i)], lacks_ref[*at, jnp.int32(i)] = number, first - best
        scores = jnp.where(rows.groups == number, -jnp.inf, scores)


def _rank_tokens(
    logits_ref, temperature_ref, key_ref, group_ref, lacks_ref, floor_ref, *out_refs, size: int, count: int
):
    """The tokens of a group that lack the least, the best first: what they lack, negative, or -inf where that is no number;
    their log weights, and their ids."""
    i, b, j = (pl.program_id(axis) for axis in range(3))
    at, temperature = (b, j), temperature_ref[b]
    first, lacks, scale = group_ref[*at, i] * size, lacks_ref[*at, i], scale_of(temperature)

    def scores_of(place, length: int):
        """Of runs of tokens: scores, log weights and ids, ``[n, length]`` each."""
        ids = first + _run(place, length)
        z = pltriton.load(logits_ref.at[(*at, ids)], mask=ids < logits_ref.shape[2], other=-jnp.inf).astype(jnp.float32)
        plain = jnp.where(z < floor_ref[at], -jnp.inf, z * scale)
        noisy = lambda: plain + gumbel_block(key_ref, at, ids.astype(jnp.uint32))  # noqa: E731
        return jax.lax.cond(temperature > 0, noisy, lambda: plain), plain, ids

    n, at_once = pl.next_power_of_2(count), max(_RANKED, 2 * pl.next_power_of_2(count))
    place, length = _cut(jnp.zeros(1, jnp.int32), size, at_once)
    scores, plain, ids = scores_of(place, length)
    best = jnp.max(scores)
    while place.shape[0] * length > at_once:  # the best tokens are in the runs that have the best
        chosen = _in_order(_ranks(jnp.max(scores, axis=1)), place, n)
        place, length = _cut(_in_order(_ranks(-chosen), chosen, n), length, at_once)
        scores, plain, ids = scores_of(place, length)
    scores, plain, ids = (x.reshape(-1) for x in (scores, plain, ids))
    lacks = lacks + (best - scores)
    closeness = jnp.where((lacks < jnp.inf) & (scores > -jnp.inf), -lacks, -jnp.inf)
    rank, nth = _ranks(scores), jnp.arange(n, dtype=jnp.int32)
    for ref, x in zip(out_refs, (closeness, plain, ids), strict=True):
        pltriton.store(ref.at[(*at, i * count + nth)], _in_order(rank, x, n), mask=nth < count)


def _merge_groups(temperature_ref, lse_ref, closeness_ref, plain_ref, ids_ref, token_ref, likely_ref, *, most: int):
    """The tokens of all groups that lack the least."""
    at, n, count = (pl.program_id(0), pl.program_id(1)), closeness_ref.shape[2], token_ref.shape[2]
    place = jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32)
    closeness = pltriton.load(closeness_ref.at[(*at, place)], mask=place < n, other=-jnp.inf)
    noisy, lse, total, ranks = temperature_ref[at[0]] > 0, lse_ref[at], jnp.float32(0.0), []
    for _ in range(most):
        ranks.append(best_of(closeness, place, n))
        total += jnp.exp(ranks[-1][0])  # the first lacks nothing
        closeness = jnp.where(place == ranks[-1][1], -jnp.inf, closeness)
    for i in range(count):
        best, here = ranks[min(i, most - 1)]
        token_ref[*at, jnp.int32(i)] = ids_ref[*at, here]
        likely = jnp.where(noisy, best - jnp.log(total), plain_ref[*at, here] - lse)
        usable = (lse > -jnp.inf) & (lse < jnp.inf) & (best > -jnp.inf) & (i < most)
        likely_ref[*at, jnp.int32(i)] = jnp.where(usable, likely, -jnp.inf)


def _cut(place, length: int, count: int):
    """Runs of tokens in pieces, up to ``count`` of them: where each begins, and their length."""
    pieces = min(max(count // place.shape[0], 1), length)
    return _run(place, pieces, length // pieces).reshape(-1), length // pieces


def _run(first, length: int, step: int = 1):
    """``[n] -> [n, length]``, the numbers from each one on."""
    return first[:, None] + step * jnp.arange(length, dtype=jnp.int32)[None]


def _ranks(scores):
    """How many come before each of some scores: the larger ones, and of equals those in front of it; int32 ``[n]``.

    That is one reduction, where finding one after another takes some for each."""
    index = jnp.arange(scores.shape[0], dtype=jnp.int32)
    own, other = scores[None], scores[:, None]
    before = (other > own) | ((other == own) & (index[:, None] < index[None]))
    return jnp.sum(before, axis=0, dtype=jnp.int32)


def _in_order(rank, x, count: int):
    """The numbers whose ranks are 0, 1, .. ``count - 1``: ``[n] -> [count]``."""
    here = rank[None] == jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.sum(jnp.where(here, x[None], jnp.zeros((), x.dtype)), axis=1)
