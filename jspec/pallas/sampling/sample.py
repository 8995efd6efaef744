"""From logits to distributions and tokens: temperature, cutoff, log-normaliser, and one token sampled from every
distribution."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.sampling.gumbel_max import best_of, group_words, gumbel_block, gumbel_max_reference
from jspec.pallas.sampling.top_k_top_p import DISTRIBUTION_WARPS, cutoff_if_any, cutoff_in_kernel, fold_over
from jspec.pallas.sampling.warped_logits import (
    WarpedLogits,
    group_size,
    grouped,
    load_groups,
    num_groups,
    store_groups,
)
from jspec.pallas.sums import row_max, row_sum
from jspec.pallas.triton import LOG2_E, block_ids, exp, exp2, kernel_call, load_block

_GROUPS = 4  # groups that one program instance sums
_WARPS = 4


def sample(logits, temperature, top_k, top_p, min_p, key_data=None):
    """``sample_reference``, and on an NVIDIA GPU the kernel, which takes the same decisions."""
    return by_platform(sample_kernel, sample_reference, logits, temperature, top_k, top_p, min_p, key_data)


def sample_reference(logits, temperature, top_k, top_p, min_p, key_data=None):
    """J distributions for each of B rows, under the settings of the row's request, and a token sampled from each.

    Args:
      logits: ``[B, J, V]``, float32 or bfloat16, as stored.
      temperature: float32 ``[B]``; 0 is greedy, and a greedy request has no filters.
      top_k, top_p, min_p: int32, float32 and float32 ``[B]``, as in ``cutoff_reference``.
      key_data: uint32 ``[B, J, 2]``, Threefry keys; None samples nothing.

    Returns:
      The tokens, int32 ``[B, J]``. A greedy request gets the likeliest token, the lowest id among equals, and any other
      request gets -1 without keys. And the distributions, ``WarpedLogits``, whose lse is NaN or infinite where the
      logits make no distribution.
    """
    B, J, V = logits.shape
    greedy = temperature == 0
    by_request = (
        scale_of(temperature),
        jnp.where(greedy, 0, top_k),
        jnp.where(greedy, 1.0, top_p),
        jnp.where(greedy, 0.0, min_p),
    )
    scale, *filters = (jnp.broadcast_to(x[:, None], (B, J)).reshape(B * J) for x in by_request)
    flat = logits.reshape(B * J, V)
    cutoff = cutoff_if_any(flat, scale, *filters)
    log_weight, log_mass, lse = log_weights(flat, scale, cutoff)
    drawn = -1 if key_data is None else gumbel_max_reference(log_mass, log_weight, key_data.reshape(B * J, 2))
    token = jnp.where(jnp.repeat(greedy, J), jnp.argmax(log_weight, axis=-1).astype(jnp.int32), drawn)
    return token.reshape(B, J), WarpedLogits(logits, *(x.reshape(B, J) for x in (scale, cutoff, lse)))


def log_weights(logits, scale, cutoff):
    """The log weights by which a token of each of R distributions is sampled, float32.

    Returns:
      the log weights of tokens ``[R, V]``, those of groups ``[R, groups]``, and lse ``[R]``.
    """
    z = logits.astype(jnp.float32)
    scaled = z * scale[:, None]
    cut = z < cutoff[:, None]  # False for NaN, so that a NaN reaches the sum
    log_weight = jnp.where(cut, -jnp.inf, scaled)
    peak = row_max(grouped(scaled))[..., 0]
    shift = jnp.where(peak > -jnp.inf, peak, 0.0)  # all of a group may be -inf, all of a distribution may not
    total = row_sum(jnp.exp(grouped(log_weight) - shift[..., None]))[..., 0]
    top = row_max(peak)
    lse = (top + jnp.log(row_sum(total * jnp.exp(peak - top))))[:, 0]
    return log_weight, peak + jnp.log(total), lse


def sample_kernel(logits, temperature, top_k, top_p, min_p, key_data=None, *, interpret=False):
    """``sample_reference`` as two kernels: one weighs the groups of every distribution, the other samples.

    Where tokens are cut, the second kernel reads the logits again, because it has to search the cutoff."""
    B, J, V = logits.shape
    shape_of = lambda dtype: jax.ShapeDtypeStruct((B, J), dtype)  # noqa: E731
    peak, total = group_weights(logits, temperature, interpret)
    token, *distribution = kernel_call(
        _sample,
        *(logits, temperature, top_k, top_p, min_p, peak, total, *(() if key_data is None else (key_data,))),
        grid=(B, J),
        out_shape=[shape_of(jnp.int32), *[shape_of(jnp.float32)] * 3],
        num_warps=DISTRIBUTION_WARPS,
        interpret=interpret,
        size=group_size(V),
    )
    return token, WarpedLogits(logits, *distribution)


def group_weights(logits, temperature, interpret: bool):
    """By a kernel: the largest scaled logit of each group and the sum of its weights over that, float32 ``[B, J, groups]``
    each, before anything is cut."""
    B, J, V = logits.shape
    groups = num_groups(V)
    return kernel_call(
        _weigh_groups,
        *(logits, temperature),
        grid=(B, J, pl.cdiv(groups, _GROUPS)),
        out_shape=[jax.ShapeDtypeStruct((B, J, groups), jnp.float32)] * 2,
        num_warps=_WARPS,
        interpret=interpret,
        shape=(_GROUPS, group_size(V)),
    )


def scale_of(temperature):
    """What logits are multiplied by."""
    return 1.0 / jnp.where(temperature == 0, 1.0, temperature)


def _weigh_groups(logits_ref, temperature_ref, peak_ref, total_ref, *, shape):
    at, block = (pl.program_id(0), pl.program_id(1)), pl.program_id(2)
    ids = block_ids(block, shape[0] * shape[1])
    z = load_block(logits_ref, at, block, ids, logits_ref.shape[2]).astype(jnp.float32).reshape(shape)
    peak, scale = jnp.max(z, axis=1), scale_of(temperature_ref[at[0]])
    shift = jnp.where(peak > -jnp.inf, peak, 0.0)
    store_groups(peak_ref, at, block, peak * scale)
    store_groups(total_ref, at, block, jnp.sum(exp2((z - shift[:, None]) * (scale * LOG2_E)), axis=1))


def _sample(logits_ref, temperature_ref, top_k_ref, top_p_ref, min_p_ref, peak_ref, total_ref, *refs, size):
    *key_refs, token_ref, scale_ref, cutoff_ref, lse_ref = refs
    at = b, _ = pl.program_id(0), pl.program_id(1)
    V = logits_ref.shape[2]
    settings = [ref[b] for ref in (temperature_ref, top_k_ref, top_p_ref, min_p_ref)]
    noisy, scale, floor, lse, groups, peaks, shifts, totals = weighed(
        logits_ref, at, settings, peak_ref, total_ref, size
    )
    scale_ref[at], cutoff_ref[at], lse_ref[at] = scale, floor, lse

    def argmax_by_group(noise, rank):
        _, group = best_of(rank, groups, peak_ref.shape[2])
        ids = block_ids(group, size)
        z = load_block(logits_ref, at, group, ids, V).astype(jnp.float32)
        score = jnp.where(z < floor, -jnp.inf, z * scale) + noise(ids.astype(jnp.uint32))
        return best_of(score, ids, V)[1]

    def drawn():
        noise = functools.partial(gumbel_block, key_refs[0], at)
        return argmax_by_group(noise, shifts + jnp.log(totals) + noise(group_words(groups)))

    def likeliest():
        return argmax_by_group(jnp.zeros_like, peaks)

    token_ref[at] = jax.lax.cond(noisy, drawn if key_refs else lambda: jnp.minimum(b, 0) - 1, likeliest)


class Weighed(NamedTuple):
    """In a kernel: a distribution, and what the groups of its tokens weigh.

    Attributes:
      noisy: whether it is not greedy.
      scale, floor, lse: as those of ``WarpedLogits``.
      groups: int32 ``[n]``, the ids of the groups, padded.
      peaks: float32 ``[n]``, their largest scaled logits.
      shifts, totals: float32 ``[n]``; a group weighs totals * exp(shifts).
    """

    noisy: Any
    scale: Any
    floor: Any
    lse: Any
    groups: Any
    peaks: Any
    shifts: Any
    totals: Any


def weighed(logits_ref, at, settings, peak_ref, total_ref, size: int) -> Weighed:
    """In a kernel: distribution ``at = (b, j)`` under a request's temperature, top_k, top_p and min_p, from what
    ``group_weights`` has made."""
    temperature, top_k, top_p, min_p = settings
    noisy, scale = temperature > 0, scale_of(temperature)
    cuts = noisy & (((top_k > 0) & (top_k < logits_ref.shape[2])) | (top_p < 1) | (min_p > 0))
    peaks, groups = load_groups(peak_ref, at, other=-jnp.inf)
    totals, _ = load_groups(total_ref, at, other=0.0)
    peak = jnp.max(peaks)

    def cut():
        floor = cutoff_in_kernel(logits_ref, at, scale, top_k, top_p, min_p)
        return floor, _totals_above(floor, logits_ref, at, scale, peak, size)

    floor, totals = jax.lax.cond(cuts, cut, lambda: (scale, totals))  # a branch that returns a literal does not lower
    floor, shifts = jnp.where(cuts, floor, -jnp.inf), jnp.where(cuts, peak, peaks)
    lse = peak + jnp.log(jnp.sum(totals * jnp.exp(shifts - peak)))
    return Weighed(noisy, scale, floor, lse, groups, peaks, shifts, totals)


def _totals_above(floor, logits_ref, at, scale, peak, size: int):
    """The weights of the groups of distribution ``at``, relative to its peak, without tokens below ``floor``."""
    fold, block_width = fold_over(logits_ref, at)
    shape = pl.next_power_of_2(pl.cdiv(logits_ref.shape[2], block_width)), block_width // size

    def add(totals, z, block):
        weight = jnp.where(z < floor, 0.0, exp(z * scale - peak))
        of_block = jnp.sum(weight.reshape(shape[1], size), axis=1)
        here = jnp.arange(shape[0], dtype=jnp.int32)[:, None] == block
        return jnp.where(here, of_block[None], totals)

    return fold(add, jnp.zeros(shape, jnp.float32)).reshape(shape[0] * shape[1])
