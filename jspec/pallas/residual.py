"""What a rejection leaves: the mass of max(w p - q, 0), and a draw from it, read straight from the logits of p and q.

Laws are given as in ``draw``: p(v) = exp(scale * logit[v] - lse) where logit[v] >= threshold, else 0. The draft's
vocabulary may be narrower than the target's; q is 0 past its end.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.draw import best_of, gumbel_block
from jspec.pallas.noise import gumbel_of_bits, random_bits
from jspec.pallas.triton import block_ids, block_size, exp, kernel_call, load_block

_MASS_BLOCK = 4096
_BLOCK = 1024
_WARPS = 4


class Rows(NamedTuple):
    """Laws of J rows for each of B requests: logits ``[B, J, V]`` as stored; scale, threshold, lse float32 ``[B, J]``."""

    logits: jax.Array
    scale: jax.Array
    threshold: jax.Array
    lse: jax.Array


def residual_mass(p: Rows, q: Rows, log_weight):
    """``residual_mass_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(residual_mass_kernel, residual_mass_reference, p, q, log_weight)


def residual_mass_reference(p: Rows, q: Rows, log_weight):
    """sum over v of max(w p_i(v) - q_i(v), 0) for every draft row i.

    Args:
      p: laws of the target, at least K rows (further ones are not read).
      q: laws of the draft, K rows.
      log_weight: float32 ``[B, K]``, log w <= 0.

    Returns:
      float32 ``[B, K]``.
    """
    K, V = q.logits.shape[1], p.logits.shape[2]
    log_p = _log_prob(Rows(*(x[:, :K] for x in p)), V) + log_weight[:, :, None]
    return jnp.sum(jnp.maximum(jnp.exp(log_p) - jnp.exp(_log_prob(q, V)), 0.0), axis=-1)


def residual_draw(p: Rows, q: Rows, row, log_weight, use_q, excluded, key_data, noisy):
    """``residual_draw_reference``, and on an NVIDIA GPU the kernel that decides alike."""
    args = (p, q, row, log_weight, use_q, excluded, key_data, noisy)
    return by_platform(residual_draw_kernel, residual_draw_reference, *args)


def residual_draw_reference(p: Rows, q: Rows, row, log_weight, use_q, excluded, key_data, noisy):
    """One token per request from the normalised max(w p - q, 0) of one row.

    Args:
      p: laws of the target, T rows.
      q: laws of the draft, K rows.
      row: int32 ``[B]`` in 0..T-1, the row to draw from; q's row is the same one, where q is used.
      log_weight: float32 ``[B]``, log w <= 0.
      use_q: bool ``[B]``; False takes q = 0.
      excluded: int32 ``[B]``, a token that may not be drawn (a draft whose q is a point mass), or -1.
      key_data: uint32 ``[B, 2]``, Threefry keys.
      noisy: bool ``[B]``; False takes the most likely token of the residual.

    Returns:
      int32 ``[B]``. Where rounding left the residual no mass at all, the draw is from p.
    """
    score = residual_scores(p, q, row, log_weight, use_q, excluded, key_data, noisy)
    return jnp.argmax(score, axis=-1).astype(jnp.int32)


def residual_scores(p: Rows, q: Rows, row, log_weight, use_q, excluded, key_data, noisy):
    """What ``residual_draw_reference`` maximises, float32 ``[B, V]``; a token's lead is how firmly it was decided."""
    V = p.logits.shape[2]
    log_p = _log_prob(_at(p, row), V)[:, 0] + log_weight[:, None]
    log_q = _log_prob(_at(q, jnp.minimum(row, q.logits.shape[1] - 1)), V)[:, 0]
    log_q = jnp.where(use_q[:, None], log_q, -jnp.inf)
    kept = (log_q < log_p) & (jnp.arange(V, dtype=jnp.int32)[None, :] != excluded[:, None])
    gap = jnp.where(kept, log_q - log_p, -jnp.inf)  # log(w p - q) = log(w p) + log(1 - e^gap), finite for any gap < 0
    score = jnp.where(kept, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
    score = jnp.where(jnp.any(kept, axis=-1, keepdims=True), score, log_p)
    noise = jnp.where(noisy[:, None], gumbel_of_bits(random_bits(key_data, V)), 0.0)
    return score + noise


def _at(rows: Rows, index) -> Rows:
    return Rows(*(jnp.take_along_axis(x, index.reshape(-1, *(1,) * (x.ndim - 1)), axis=1) for x in rows))


def _log_prob(rows: Rows, width: int):
    """float32 ``[B, J, width]``; -inf for tokens that are cut or past the end of a narrower vocabulary."""
    z = rows.logits.astype(jnp.float32)
    log_prob = jnp.where(z >= rows.threshold[..., None], z * rows.scale[..., None] - rows.lse[..., None], -jnp.inf)
    return jnp.pad(log_prob, ((0, 0), (0, 0), (0, width - z.shape[2])), constant_values=-jnp.inf)


def residual_mass_kernel(p: Rows, q: Rows, log_weight, *, interpret=False):
    """``residual_mass_reference`` as a kernel over (draft row, block of the vocabulary); XLA adds the blocks up."""
    (B, K), V = log_weight.shape, p.logits.shape[2]
    size = block_size(V, _MASS_BLOCK)
    blocks = pl.cdiv(V, size)
    masses = kernel_call(
        _mass_block,
        *(*p, *q, log_weight),
        grid=(B * K, blocks),
        out_shape=jax.ShapeDtypeStruct((B, K, blocks), jnp.float32),
        num_warps=_WARPS,
        interpret=interpret,
        size=size,
    )
    return jnp.sum(masses, axis=-1)


def residual_draw_kernel(p: Rows, q: Rows, row, log_weight, use_q, excluded, key_data, noisy, *, interpret=False):
    """``residual_draw_reference`` as a kernel over (request, block of the vocabulary), and one that merges the blocks."""
    B, V = row.shape[0], p.logits.shape[2]
    size = block_size(V, _BLOCK)
    blocks = pl.cdiv(V, size)
    partial = lambda dtype: jax.ShapeDtypeStruct((B, blocks), dtype)  # noqa: E731
    of_blocks = kernel_call(
        _residual_block,
        *(*p, *q, row, log_weight, use_q, excluded, key_data, noisy),
        grid=(B, blocks),
        out_shape=[partial(jnp.float32), partial(jnp.int32), partial(jnp.float32), partial(jnp.int32)],
        num_warps=_WARPS,
        interpret=interpret,
        size=size,
    )
    return kernel_call(
        _residual_merge,
        *of_blocks,
        grid=(B,),
        out_shape=jax.ShapeDtypeStruct((B,), jnp.int32),
        num_warps=1,
        interpret=interpret,
        width=V,
        blocks=blocks,
    )


def _mass_block(*refs, size):
    p_refs, q_refs, (log_weight_ref, mass_ref) = Rows(*refs[:4]), Rows(*refs[4:8]), refs[8:]
    _, K, _ = q_refs.logits.shape
    row, block = pl.program_id(0), pl.program_id(1)
    b, i = row // K, row % K
    ids = block_ids(block, size)
    log_p = _log_prob_block(p_refs, (b, i), block, ids) + log_weight_ref[b, i]
    excess = exp(log_p) - exp(_log_prob_block(q_refs, (b, i), block, ids))
    mass_ref[b, i, block] = jnp.sum(jnp.where(excess < 0, 0.0, excess))  # a NaN stays, as it does in jnp.maximum


def _residual_block(*refs, size):
    p_refs, q_refs, refs = Rows(*refs[:4]), Rows(*refs[4:8]), refs[8:]
    row_ref, log_weight_ref, use_q_ref, excluded_ref, key_ref, noisy_ref, *out_refs = refs
    best_ref, token_ref, fallback_best_ref, fallback_token_ref = out_refs
    (_, K, _), V = q_refs.logits.shape, p_refs.logits.shape[2]
    b, block = pl.program_id(0), pl.program_id(1)
    row = row_ref[b]
    ids = block_ids(block, size)
    log_p = _log_prob_block(p_refs, (b, row), block, ids) + log_weight_ref[b]
    log_q = _log_prob_block(q_refs, (b, jnp.minimum(row, K - 1)), block, ids, when=use_q_ref[b])
    kept = (log_q < log_p) & (ids != excluded_ref[b])
    gap = jnp.where(kept, log_q - log_p, -jnp.inf)
    score = jnp.where(kept, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
    noise = gumbel_block(key_ref, b, ids, noisy_ref[b] & (jnp.max(log_p) > -jnp.inf))
    best_ref[b, block], token_ref[b, block] = best_of(score + noise, ids, V)
    fallback_best_ref[b, block], fallback_token_ref[b, block] = best_of(log_p + noise, ids, V)


def _residual_merge(best_ref, token_ref, fallback_best_ref, fallback_token_ref, out_ref, *, width, blocks):
    b, ids = pl.program_id(0), block_ids(0, pl.next_power_of_2(blocks))

    def merged(best_ref, token_ref):
        best = load_block(best_ref, (b,), 0, ids, blocks)
        return best_of(best, load_block(token_ref, (b,), 0, ids, blocks, other=width - 1), width)

    best, token = merged(best_ref, token_ref)
    _, fallback = merged(fallback_best_ref, fallback_token_ref)
    out_ref[b] = jnp.where(best > -jnp.inf, token, fallback)


def _log_prob_block(refs: Rows, at, block, ids, when=True):
    z = load_block(refs.logits, at, block, ids, refs.logits.shape[2], when=when).astype(jnp.float32)
    log_prob = jnp.where(z >= refs.threshold[at], z * refs.scale[at] - refs.lse[at], -jnp.inf)
    return jnp.where(when, log_prob, -jnp.inf)
