"""What a rejection leaves: the mass of max(w p - q, 0), and a draw from it, read straight from the logits of p and q.

The draft's vocabulary may be narrower than the target's; q is 0 past its end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.pick import best_of, group_words, gumbel_block, pick_reference
from jspec.pallas.rows import Rows, group_size, in_groups, load_groups, num_groups, store_groups
from jspec.pallas.triton import block_ids, exp, expm1, kernel_call

_GROUPS = 2  # that one program sums
_WARPS = 4
_DRAW_WARPS = 8


class Residual(NamedTuple):
    """max(w p - q, 0) of J rows for each of B requests, without a token that may not be drawn.

    Attributes:
      p: laws of the target, T rows.
      q: laws of the draft, K rows.
      row: int32 ``[B, J]``, which row of p, in 0..T-1; q's row is the same one, where q is used.
      log_weight: float32 ``[B, J]``, log w <= 0, or None: w = 1.
      use_q: bool ``[B, J]``; False takes q = 0.
      excluded: int32 ``[B, J]``, a token that may not be drawn (a draft whose q is a point mass), or -1.
    """

    p: Rows
    q: Rows
    row: jax.Array
    log_weight: jax.Array | None
    use_q: jax.Array
    excluded: jax.Array


class Masses(NamedTuple):
    """Of the groups of each row, float32 ``[B, J, groups]``: ``left`` by the residual, and ``all`` of w p."""

    left: jax.Array
    all: jax.Array


def residual_masses(residual: Residual) -> Masses:
    """``residual_masses_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(residual_masses_kernel, residual_masses_reference, residual)


def residual_masses_reference(residual: Residual) -> Masses:
    """What the groups of every row weigh; over a row, ``left`` adds up to the probability of a rejection there."""
    log_p, log_left = _log_weights(residual)
    return Masses(*(jnp.sum(jnp.exp(in_groups(x)), axis=-1) for x in (log_left, log_p)))


def residual_draw(residual: Residual, masses: Masses, at, key_data, known):
    """``residual_draw_reference``, and on an NVIDIA GPU the kernel that decides alike."""
    return by_platform(residual_draw_kernel, residual_draw_reference, residual, masses, at, key_data, known)


def residual_draw_reference(residual: Residual, masses: Masses, at, key_data, known):
    """One token per request from the normalised residual of one of its rows.

    Args:
      residual: of J rows, and
      masses: of its groups.
      at: int32 ``[B]``, which of the J; what is past the last is the last.
      key_data: uint32 ``[B, 2]``, Threefry keys.
      known: int32 ``[B]``, the token where it needs no draw, elsewhere -1.

    Returns:
      int32 ``[B]``. Where rounding left the residual no mass at all, the draw is from p.
    """
    drawn = pick_reference(*residual_weights(residual, masses, at), key_data)
    return jnp.where(known >= 0, known, drawn)


def residual_weights(residual: Residual, masses: Masses, at):
    """What rows are drawn by: log weights of groups ``[B, groups]`` and of tokens ``[B, V]``, float32."""
    at = jnp.minimum(at, residual.row.shape[1] - 1)
    laws, (settings, masses) = (
        residual[:2],
        jax.tree.map(
            lambda x: jnp.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=1), (residual[2:], masses)
        ),
    )
    log_p, log_left = (x[:, 0] for x in _log_weights(Residual(*laws, *settings)))
    left, all_of_p = (x[:, 0] for x in masses)
    some = jnp.any(left > 0, axis=-1, keepdims=True)
    return jnp.log(jnp.where(some, left, all_of_p)), jnp.where(some, log_left, log_p)


def _log_weights(residual: Residual):
    """log w p and log max(w p - q, 0) of every token, float32 ``[B, J, V]``."""
    p, q, row, log_weight, use_q, excluded = residual
    V = p.logits.shape[2]
    log_p = _at(p, row).log_prob(V) + (0.0 if log_weight is None else log_weight[..., None])
    log_q = _at(q, jnp.minimum(row, q.logits.shape[1] - 1)).log_prob(V)
    log_q = jnp.where(use_q[..., None], log_q, -jnp.inf)
    kept = ~(log_q >= log_p) & (
        jnp.arange(V, dtype=jnp.int32)[None, None] != excluded[..., None]
    )  # so that a NaN stays
    gap = jnp.where(kept, log_q - log_p, -jnp.inf)  # log(w p - q) = log(w p) + log(1 - e^gap), finite for any gap < 0
    return log_p, jnp.where(kept, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)


def _at(rows: Rows, index) -> Rows:
    return Rows(*(jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1) for x in rows))


def residual_masses_kernel(residual: Residual, *, interpret=False) -> Masses:
    """``residual_masses_reference`` as a kernel over (request, row, some groups)."""
    (B, J), V = residual.row.shape, residual.p.logits.shape[2]
    groups, (leaves, tree) = num_groups(V), jax.tree.flatten(residual)
    masses = kernel_call(
        _weigh_residual,
        *leaves,
        grid=(B, J, pl.cdiv(groups, _GROUPS)),
        out_shape=[jax.ShapeDtypeStruct((B, J, groups), jnp.float32)] * 2,
        num_warps=_WARPS,
        interpret=interpret,
        tree=tree,
        shape=(_GROUPS, group_size(V)),
    )
    return Masses(*masses)


def residual_draw_kernel(residual: Residual, masses: Masses, at, key_data, known, *, interpret=False):
    """``residual_draw_reference`` as a kernel over requests, which reads one group of a row."""
    leaves, tree = jax.tree.flatten((residual, masses, at, key_data, known))
    return kernel_call(
        _draw_residual,
        *leaves,
        grid=at.shape,
        out_shape=jax.ShapeDtypeStruct(at.shape, jnp.int32),
        num_warps=_DRAW_WARPS,
        interpret=interpret,
        tree=tree,
        size=group_size(residual.p.logits.shape[2]),
    )


def _weigh_residual(*refs, tree, shape):
    *refs, left_ref, all_ref = refs
    residual = tree.unflatten(refs)
    at, block = (pl.program_id(0), pl.program_id(1)), pl.program_id(2)
    log_p, kept, gap = _block(residual, at, block, block_ids(block, shape[0] * shape[1]))
    p = exp(log_p)
    left = jnp.where(kept, p * -expm1(gap), 0.0)
    store_groups(left_ref, at, block, jnp.sum(left.reshape(shape), axis=1))
    store_groups(all_ref, at, block, jnp.sum(p.reshape(shape), axis=1))


def _draw_residual(*refs, tree, size):
    *refs, token_ref = refs
    residual, masses, at_ref, key_ref, known_ref = tree.unflatten(refs)
    b = pl.program_id(0)
    at = b, jnp.minimum(at_ref[b], residual.row.shape[1] - 1)
    V, groups = residual.p.logits.shape[2], masses.left.shape[2]
    left, ids = load_groups(masses.left, at, other=0.0)
    all_of_p, _ = load_groups(masses.all, at, other=0.0)
    some = jnp.max(left) > 0
    rank = jnp.log(jnp.where(some, left, all_of_p)) + gumbel_block(key_ref, (b,), group_words(ids))
    _, group = best_of(rank, ids, groups)
    ids = block_ids(group, size)
    log_p, kept, gap = _block(residual, at, group, ids)
    log_left = jnp.where(kept, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
    score = jnp.where(some, log_left, log_p) + gumbel_block(key_ref, (b,), ids.astype(jnp.uint32))
    _, token = best_of(score, ids, V)
    token_ref[b] = jnp.where(known_ref[b] >= 0, known_ref[b], token)


def _block(residual: Residual, at, block, ids):
    """log w p of a block of tokens, which of them the residual keeps, and log q - log w p of those."""
    b, row, K = at[0], residual.row[at], residual.q.logits.shape[1]
    log_p = residual.p.log_prob_block((b, row), block, ids)
    if residual.log_weight is not None:
        log_p += residual.log_weight[at]
    log_q = residual.q.log_prob_block((b, jnp.minimum(row, K - 1)), block, ids, when=residual.use_q[at])
    kept = ~(log_q >= log_p) & (ids != residual.excluded[at])
    return log_p, kept, jnp.where(kept, log_q - log_p, -jnp.inf)
