"""In a kernel: the experts of some tokens and their weights, found in rounds or by comparing all experts at once."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.config import Experts
from jspec.pallas.moe.router_logits import in_pairs
from jspec.pallas.moe.router_reference import TINY

_LEAST, _ALL_BUT_THE_SIGN = -(2**31), 2**31 - 1


def choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, routing: Experts, *, at_once=False):
    """Write the experts of some tokens and their weights.

    Args:
      token: int32 ``[m]``, where m is a power of two; those past the last token are ignored.
      logits_ref, bias_ref, routing: as ``route_reference`` has them. Logits may be in parts, those of
        ``router_logits_kernel``.
      expert_ref, weight_ref: of ``Routed``.
      at_once: whether all pairs of experts are compared, which takes less time than rounds and more instructions.

    Returns:
      the experts of each token, int32 ``[m, n]``, of which the first Y are meant.
    """
    (M, Y), X = expert_ref.shape, logits_ref.shape[-1]
    shape = token.shape[0], pl.next_power_of_2(X)
    row, ids = jnp.broadcast_to(token[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    places = [(jnp.full(shape, part),) for part in range(logits_ref.shape[0])] if len(logits_ref.shape) == 3 else [()]
    mask = (token < M)[:, None] & (ids < X)
    logits = in_pairs([pltriton.load(logits_ref.at[(*at, row, ids)], mask=mask, other=-jnp.inf) for at in places])
    probability = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else None
    choice = logits if probability is None else jnp.where(ids < X, probability, -jnp.inf)
    if bias_ref is not None:
        choice += pltriton.load(bias_ref.at[ids], mask=ids < X, other=0.0).astype(jnp.float32)
    allowed = choice if routing.groups == 1 else jnp.where(_in_best_groups(choice, ids, X, routing), choice, -jnp.inf)

    rank = jax.lax.broadcasted_iota(jnp.int32, (token.shape[0], pl.next_power_of_2(Y)), 1)
    expert = _at_once(allowed, ids, rank, X) if at_once else _in_rounds(allowed, ids, rank, X, routing.chosen)
    is_chosen = rank < routing.chosen
    score = _of_experts(choice if probability is None else probability, ids, expert)
    if probability is None:
        best = jnp.max(choice, axis=1)[:, None]
        weight = jnp.where(is_chosen, jnp.exp(score - best), 0.0)
        weight /= _row_sums(weight if routing.renormalise else jnp.exp(choice - best))[:, None]
    else:
        weight = jnp.where(is_chosen, score, 0.0)
        if routing.renormalise:
            weight /= (_row_sums(weight) + TINY)[:, None]
    # The maxima above drop a NaN. One of integers does not.
    is_nan = jnp.max((choice != choice).astype(jnp.int32), axis=1) > 0
    weight = jnp.where(is_nan[:, None], jnp.nan, weight * routing.scale)
    expert = jnp.where(is_chosen, expert, X + rank - routing.chosen)  # the shared ones are the last
    real, row = (token < M)[:, None] & (rank < Y), jnp.broadcast_to(token[:, None], rank.shape)
    pltriton.store(expert_ref.at[row, rank], expert, mask=real)
    pltriton.store(weight_ref.at[row, rank], jnp.where(is_chosen, weight, 1.0), mask=real)
    return expert


def _in_rounds(left, ids, rank, X: int, chosen: int):
    """The experts with the ``chosen`` greatest numbers ``left [m, n]``, one after the other; int32 of the shape of ``rank``,
    the greatest first, and of equals the first."""
    experts = jnp.zeros(rank.shape, jnp.int32)
    for i in range(chosen):
        best = jnp.max(left, axis=1)
        expert = jnp.min(jnp.where(left == best[:, None], ids, X), axis=1)
        expert = jnp.minimum(expert, X - 1)  # no id is there if a logit is NaN
        experts = jnp.where(rank == i, expert[:, None], experts)
        left = jnp.where(ids == expert[:, None], -jnp.inf, left)
    return experts


def _at_once(left, ids, rank, X: int):
    """The same: an expert's rank is how many others go before it."""
    bits = jax.lax.bitcast_convert_type(jnp.where(left == 0, 0.0, left), jnp.int32)  # 0 and -0 are equal
    key = jnp.where(bits < 0, bits ^ _ALL_BUT_THE_SIGN, bits)  # in the order of the numbers, with a place for each NaN
    key = jnp.where(ids < X, key, _LEAST)
    other, own = key[:, :, None], key[:, None, :]
    earlier = ids[:, :, None] < ids[:, None, :]
    before = jnp.sum(((other > own) | (other == own) & earlier).astype(jnp.int32), axis=1)
    return jnp.sum(jnp.where(before[:, None, :] == rank[:, :, None], ids[:, None, :], 0), axis=2)


def _of_experts(x, ids, expert):
    """Numbers of ``x [m, n]`` for experts ``[m, k]``."""
    return jnp.sum(jnp.where(ids[:, None, :] == expert[:, :, None], x[:, None, :], 0.0), axis=2)


def _row_sums(x):
    """Sums over lines of ``[m, n]``, by halves. ``jnp.sum`` adds in an order that follows from m and the number of warps."""
    while x.shape[1] > 1:
        x = jnp.sum(x.reshape(x.shape[0], 2, x.shape[1] // 2), axis=1)
    return x.reshape(-1)


def _in_best_groups(choice, ids, X: int, routing: Experts):
    """Which experts each token may choose, bool of the shape of ``choice`` and ``ids``."""
    group, sums = ids // (X // routing.groups), []
    for g in range(routing.groups):
        members = jnp.where(group == g, choice, -jnp.inf)
        first = jnp.max(members, axis=1)
        at = jnp.min(jnp.where(members == first[:, None], ids, X), axis=1)
        sums.append(first + jnp.max(jnp.where(ids == at[:, None], -jnp.inf, members), axis=1))
    allowed = jnp.zeros(choice.shape, bool)
    for g, total in enumerate(sums):
        # Equal groups with lower numbers go first.
        ahead = [
            (other >= total if h < g else other > total).astype(jnp.int32) for h, other in enumerate(sums) if h != g
        ]
        beaten = functools.reduce(jnp.add, ahead)
        allowed |= (group == g) & (beaten < routing.chosen_groups)[:, None]
    return allowed
