"""The residual max(w p - q, 0) from which the target samples after a rejected draft: its mass, and a token of it.

Both are computed from the logits of p, the target's distribution, and of q, the draft's. The draft's vocabulary may be
smaller than the target's; q is 0 past its end, or outside of the tokens that ``draft_ids`` names.

Every token keeps at least the share ``LEAST`` of its w p. So where rounding leaves nothing of a residual, the token is
sampled from p; elsewhere this adds less than 1e-18 to the probability of any token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.sampling.gumbel_max import best_of, group_words, gumbel_max_reference, gumbel_of
from jspec.pallas.sampling.warped_logits import (
    WarpedLogits,
    group_size,
    grouped,
    load_groups,
    num_groups,
    store_groups,
)
from jspec.pallas.sums import row_sum
from jspec.pallas.triton import block_ids, exp, kernel_call, maximum, multiply_add

LEAST = 2.0**-60
_GROUPS = 2  # groups that one program instance sums
_WARPS = 4
_SAMPLE_WARPS = 8
_LOWEST = -1e4  # stands for log 0 where log 0 - log 0 would be NaN; e^-1e4 is 0


class Residual(NamedTuple):
    """The distributions of the token after i accepted drafts, for i = 0 .. K and each of B rows.

    If i < valid, draft i was rejected, and the recovered token is sampled from max(w_i p_i - q_i, 0), normalised. If i =
    valid, no draft was rejected, and the bonus token is sampled from p_i.

    Attributes:
      p: the target's distributions, J >= K + 1 of each row.
      q: the draft's distributions, K of each row.
      drafts: int32 ``[B, K]``.
      point_mass: bool ``[B, K]``; where true, q_i is 1 at drafts[i] and 0 elsewhere, and ``q`` is ignored.
      valid: int32 ``[B]``, how many of the drafts count.
      log_weight: float32 ``[B, K + 1]``, log w <= 0; None stands for w = 1.
      draft_ids: int32 ``[V]``, for each token the index of its logit in q, -1 where q is 0; None if the index is the
        token.
    """

    p: WarpedLogits
    q: WarpedLogits
    drafts: jax.Array
    point_mass: jax.Array
    valid: jax.Array
    log_weight: jax.Array | None
    draft_ids: jax.Array | None = None


def residual_masses(residual: Residual, at=None):
    """``residual_masses_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(residual_masses_kernel, residual_masses_reference, residual, at)


def residual_masses_reference(residual: Residual, at=None):
    """The mass of each group of tokens in the residual.

    With w = 1, the masses of all groups add up to the probability that the draft there is rejected.

    Args:
      residual: the residuals, for every number of accepted drafts.
      at: int32 ``[B]``, the number of accepted drafts to compute it for; None computes it for 0 .. K.

    Returns:
      float32 ``[B, J, groups]``, with J = 1 or K + 1.
    """
    return row_sum(jnp.exp(grouped(log_residual(residual, at))))[..., 0]


def residual_sample(residual: Residual, masses, at, noise, best):
    """``residual_sample_reference``, and on an NVIDIA GPU the kernel, which takes the same decisions."""
    return by_platform(residual_sample_kernel, residual_sample_reference, residual, masses, at, noise, best)


def residual_sample_reference(residual: Residual, masses, at, noise, best):
    """The token that follows the accepted drafts of each row: the recovered token or the bonus token.

    Args:
      residual: the residuals, for every number of accepted drafts.
      masses: ``residual_masses`` of it, for every number of accepted drafts or for ``at`` alone.
      at: int32 ``[B]``, how many drafts were accepted, 0 .. valid.
      noise: the ``RoundNoise`` of the round.
      best: int32 ``[B, J]``, J >= K + 1, the token of a greedy request, which needs no noise; -1 elsewhere.

    Returns:
      the tokens, int32 ``[B]``, and whether p is a distribution there, bool ``[B]``.
    """
    index = jnp.minimum(at, masses.shape[1] - 1)
    key = jnp.stack(noise.of_requests().last_key(at, residual.valid), axis=-1)
    drawn = gumbel_max_reference(jnp.log(_at(masses, index[:, None])[:, 0]), log_residual(residual, at)[:, 0], key)
    greedy_token, lse = (_at(x, at[:, None])[:, 0] for x in (best, residual.p.lse))
    return jnp.where(greedy_token >= 0, greedy_token, drawn), jnp.isfinite(lse)


def log_residual(residual: Residual, at=None):
    """log max(w p - q, 0) of every token, float32 ``[B, J, V]``."""
    p, q, drafts, point_mass, valid, log_weight, draft_ids = residual
    V, (B, K) = p.logits.shape[2], drafts.shape
    accepted = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), (B, K + 1)) if at is None else at[:, None]
    rejected, drafted = accepted < valid[:, None], jnp.minimum(accepted, K - 1)
    weight = 0.0 if log_weight is None else jnp.where(rejected, _at(log_weight, accepted), 0.0)[..., None]
    log_p = WarpedLogits(*(_at(x, accepted) for x in p)).log_prob(V) + weight
    log_p = jnp.where((accepted <= valid[:, None])[..., None], log_p, -jnp.inf)
    log_q = WarpedLogits(*(_at(x, drafted) for x in q)).log_prob(V, draft_ids)
    is_point = _at(point_mass, drafted)
    log_q = jnp.where((rejected & ~is_point)[..., None], log_q, -jnp.inf)
    excluded = jnp.where(rejected & is_point, _at(drafts, drafted), -1)
    excludes = jnp.arange(V, dtype=jnp.int32)[None, None] == excluded[..., None]
    return log_p + jnp.log(_share(log_p, log_q, excludes))


def _share(log_p, log_q, excludes):
    """The share of w p that is left when q is subtracted: 1 where q is 0."""
    share = -jnp.expm1(log_q - jnp.maximum(log_p, _LOWEST))  # exact where w p is a rounding step above q
    share = jnp.where(excludes, 0.0, share)
    return jnp.where(share < LEAST, LEAST, share)  # NaN stays, unlike in a maximum of a kernel


def _at(x, index):
    """``[B, J, ...], int32 [B, I] -> [B, I, ...]``."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)


def residual_masses_kernel(residual: Residual, at=None, *, interpret=False):
    """``residual_masses_reference`` as a kernel over (row, number of accepted drafts, some groups)."""
    (B, K), V = residual.drafts.shape, residual.p.logits.shape[2]
    J, groups, (leaves, tree) = K + 1 if at is None else 1, num_groups(V), jax.tree.flatten((residual, at))
    return kernel_call(
        _weigh_residual,
        *leaves,
        grid=(B, J, pl.cdiv(groups, _GROUPS)),
        out_shape=jax.ShapeDtypeStruct((B, J, groups), jnp.float32),
        num_warps=_WARPS,
        interpret=interpret,
        tree=tree,
        shape=(_GROUPS, group_size(V)),
    )


def residual_sample_kernel(residual: Residual, masses, at, noise, best, *, interpret=False):
    """``residual_sample_reference`` as a kernel over rows; a program instance reads the tokens of one group."""
    leaves, tree = jax.tree.flatten((residual, masses, at, noise, best))
    return kernel_call(
        _sample_residual,
        *leaves,
        grid=at.shape,
        out_shape=[jax.ShapeDtypeStruct(at.shape, dtype) for dtype in (jnp.int32, jnp.bool_)],
        num_warps=_SAMPLE_WARPS,
        interpret=interpret,
        tree=tree,
        size=group_size(residual.p.logits.shape[2]),
    )


def _weigh_residual(*refs, tree, shape):
    *refs, mass_ref = refs
    residual, at_ref = tree.unflatten(refs)
    b, j, block = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    p, q, ids = residual.p, residual.q, block_ids(block, shape[0] * shape[1])
    place = _place(residual, b, j if at_ref is None else at_ref[b])
    z_p = p.load(place.p, block, ids, when=place.wanted)
    z_q = q.load(place.q, block, ids, when=place.use_q, draft_ids=residual.draft_ids)
    line_p = p.line(place.p, place.log_weight, when=place.wanted)
    line_q = q.line(place.q, when=place.use_q)

    def masses(cuts: bool):
        log_p, log_q = multiply_add(z_p, *line_p), multiply_add(z_q, *line_q)
        if cuts:
            log_p, log_q = (
                jnp.where(z_p >= place.floor_p, log_p, -jnp.inf),
                jnp.where(z_q >= place.floor_q, log_q, -jnp.inf),
            )
        gap = log_q - jnp.maximum(log_p, _LOWEST)
        # With y = -gap, the first is 1 - e^-y and the second is y - y^2 / 2, which is a little below it. If y is small,
        # rounding leaves less of the first than that, and the second is the better one.
        share = jnp.maximum(1 - exp(gap), gap * multiply_add(gap, -0.5, -1.0))
        share = jnp.where(ids == place.excluded, 0.0, share) if cuts else share
        return jnp.sum((exp(log_p) * maximum(share, LEAST)).reshape(shape), axis=1)

    store_groups(mass_ref, (b, j), block, jax.lax.cond(place.cuts, lambda: masses(True), lambda: masses(False)))


def _sample_residual(*refs, tree, size):
    *refs, token_ref, ok_ref = refs
    residual, masses_ref, at_ref, noise, best_ref = tree.unflatten(refs)
    b = pl.program_id(0)
    at = at_ref[b]
    p, q, place = residual.p, residual.q, _place(residual, b, at)
    key_0, key_1 = noise.of_request(b).last_key(at, residual.valid[b])
    (_, J, groups), V = masses_ref.shape, p.logits.shape[2]
    masses, ids = load_groups(masses_ref, (b, jnp.minimum(at, J - 1)), other=0.0)
    _, group = best_of(jnp.log(masses) + gumbel_of(key_0, key_1, group_words(ids)), ids, groups)
    ids = block_ids(group, size)
    log_p = p.log_prob_block(place.p, group, ids) + place.log_weight
    log_q = q.log_prob_block(place.q, group, ids, when=place.use_q, draft_ids=residual.draft_ids)
    score = log_p + jnp.log(_share(log_p, log_q, ids == place.excluded))
    _, token = best_of(score + gumbel_of(key_0, key_1, ids.astype(jnp.uint32)), ids, V)
    greedy_token = best_ref[b, at]
    token_ref[b], ok_ref[b] = jnp.where(greedy_token >= 0, greedy_token, token), jnp.abs(p.lse[place.p]) < jnp.inf


class _Place(NamedTuple):
    """In a kernel: the residual of a row after some accepted drafts.

    Attributes:
      p, q: indices (b, j) of the two distributions.
      wanted: whether so many drafts can be accepted at all.
      use_q: whether q is subtracted from w p.
      excluded: the token that a point mass excludes, -1 if there is none.
      log_weight: log w.
      floor_p, floor_q: cutoffs of the two distributions.
      cuts: whether any token is cut or excluded.
    """

    p: tuple
    q: tuple
    wanted: jax.Array
    use_q: jax.Array
    excluded: jax.Array
    log_weight: Any
    floor_p: jax.Array
    floor_q: jax.Array
    cuts: jax.Array


def _place(residual: Residual, b, accepted) -> _Place:
    p, q, drafts, point_mass, valid, log_weight, _ = residual
    at_p, at_q = (b, accepted), (b, jnp.minimum(accepted, drafts.shape[1] - 1))
    rejected = accepted < valid[b]
    is_point = point_mass[at_q]
    use_q, excludes = rejected & ~is_point, rejected & is_point
    floor_p, floor_q = p.cutoff[at_p], q.cutoff[at_q]
    return _Place(
        p=at_p,
        q=at_q,
        wanted=accepted <= valid[b],
        use_q=use_q,
        excluded=jnp.where(excludes, drafts[at_q], -1),
        log_weight=0.0 if log_weight is None else jnp.where(rejected, log_weight[at_p], 0.0),
        floor_p=floor_p,
        floor_q=floor_q,
        cuts=(floor_p > -jnp.inf) | (use_q & (floor_q > -jnp.inf)) | excludes,
    )
