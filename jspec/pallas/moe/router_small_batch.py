"""The router for few tokens, in one launch: a single program instance chooses the experts of all tokens and sorts the
assignments by expert."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.config import Experts
from jspec.pallas.moe.router_logits import in_pairs
from jspec.pallas.moe.router_reference import TINY, Routed
from jspec.pallas.triton import kernel_call

MOST_TOKENS = 4  # for more, two kernels are faster: a single instance chooses for one token after the other


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))  # layers share one trace
def route_small_batch_kernel(logits, bias, routing: Experts, *, interpret=False) -> Routed:
    """``route_reference`` as a kernel, for at most ``MOST_TOKENS`` tokens. Logits may be in parts, as for
    ``choose_experts``."""
    M, X = logits.shape[-2:]
    assert M <= MOST_TOKENS, M
    Y, shared = routing.per_token, routing.shared
    shapes = ((M, Y), jnp.int32), ((M, Y), jnp.float32), ((X + shared,), jnp.int32), ((M * Y,), jnp.int32)
    return Routed(
        *kernel_call(
            _route_small_batch,
            logits,
            bias,
            grid=(1,),
            out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
            num_warps=4,
            interpret=interpret,
            routing=routing,
        )
    )


def _route_small_batch(logits_ref, bias_ref, expert_ref, weight_ref, sizes_ref, order_ref, *, routing: Experts):
    (M, Y), X = expert_ref.shape, sizes_ref.shape[0]
    token, ids = (jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32) for n in (M, X))
    real = token < M
    experts = choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, routing)
    experts = [jnp.where(real, expert, X) for expert in experts]  # X stands behind the last expert

    all_ids = jnp.broadcast_to(ids[None, :], (token.shape[0], ids.shape[0]))
    sizes = jnp.sum(sum((expert[:, None] == all_ids).astype(jnp.int32) for expert in experts), axis=0)
    pltriton.store(sizes_ref.at[ids], sizes, mask=ids < X)
    # An assignment stands behind those of earlier experts, and behind the earlier ones of its own expert. A token has an
    # expert twice only if its logits are no numbers.
    earlier, not_later = (compare(token[None, :], token[:, None]) for compare in (jnp.less, jnp.less_equal))
    for c, expert in enumerate(experts):
        before = jnp.zeros(earlier.shape, jnp.int32)
        for other_c, other in enumerate(experts):
            same = (other[None, :] == expert[:, None]) & (not_later if other_c < c else earlier)
            before += ((other[None, :] < expert[:, None]) | same).astype(jnp.int32)
        # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
        place = jnp.where(real, jnp.sum(before, axis=1), M * Y)
        pltriton.store(order_ref.at[place], token * Y + c, mask=real)


def choose_experts(token, logits_ref, bias_ref, expert_ref, weight_ref, routing: Experts) -> list[jax.Array]:
    """In a kernel: write the experts of some tokens and their weights.

    Args:
      token: int32 ``[m]``, where m is a power of two; those past the last token are ignored.
      logits_ref, bias_ref, routing: as ``route_reference`` has them. Logits may be in parts, those of
        ``router_logits_kernel``.
      expert_ref, weight_ref: of ``Routed``.

    Returns:
      the Y experts of each token, int32 ``[m]`` each.
    """
    M, X = logits_ref.shape[-2:]
    real, shape = token < M, (token.shape[0], pl.next_power_of_2(X))
    row, ids = jnp.broadcast_to(token[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    places = [(jnp.full(shape, part),) for part in range(logits_ref.shape[0])] if len(logits_ref.shape) == 3 else [()]
    mask = real[:, None] & (ids < X)
    logits = in_pairs([pltriton.load(logits_ref.at[(*at, row, ids)], mask=mask, other=-jnp.inf) for at in places])
    probability = jax.nn.sigmoid(logits) if routing.scores == "sigmoid" else None
    choice = logits if probability is None else jnp.where(ids < X, probability, -jnp.inf)
    if bias_ref is not None:
        choice += pltriton.load(bias_ref.at[ids], mask=ids < X, other=0.0).astype(jnp.float32)
    left = choice if routing.groups == 1 else jnp.where(_in_best_groups(choice, ids, X, routing), choice, -jnp.inf)
    experts, maxima = [], []
    for _ in range(routing.chosen):
        best = jnp.max(left, axis=1)
        expert = jnp.min(jnp.where(left == best[:, None], ids, X), axis=1)
        expert = jnp.minimum(expert, X - 1)  # no id is there if a logit is NaN
        experts.append(expert)
        maxima.append(best)
        left = jnp.where(ids == expert[:, None], -jnp.inf, left)

    if probability is None:
        weights = [jnp.exp(best - maxima[0]) for best in maxima]
        total = _row_sums(jnp.exp(choice - maxima[0][:, None]))
    else:
        weights = [jnp.sum(jnp.where(ids == expert[:, None], probability, 0.0), axis=1) for expert in experts]
        total = None
    if routing.renormalise:
        total = functools.reduce(jnp.add, weights) + (0.0 if probability is None else TINY)
    weights = [(weight if total is None else weight / total) * routing.scale for weight in weights]
    # The maxima above drop a NaN. One of integers does not.
    is_nan = jnp.max((choice != choice).astype(jnp.int32), axis=1) > 0
    weights = [jnp.where(is_nan, jnp.nan, weight) for weight in weights]
    experts += [jnp.full(token.shape, X + i, jnp.int32) for i in range(routing.shared)]
    weights += [jnp.ones(token.shape, jnp.float32)] * routing.shared
    for c, (expert, weight) in enumerate(zip(experts, weights, strict=True)):
        at = token, jnp.full(token.shape, c, jnp.int32)
        pltriton.store(expert_ref.at[at], expert, mask=real)
        pltriton.store(weight_ref.at[at], weight, mask=real)
    return experts


def _row_sums(x):
    """In a kernel: sums over lines of ``[m, n]``, by halves. ``jnp.sum`` adds in an order that follows from m and the
    number of warps."""
    while x.shape[1] > 1:
        x = jnp.sum(x.reshape(x.shape[0], 2, x.shape[1] // 2), axis=1)
    return x.reshape(-1)


def _in_best_groups(choice, ids, X: int, routing: Experts):
    """In a kernel: which experts each token may choose, bool of the shape of ``choice`` and ``ids``."""
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
