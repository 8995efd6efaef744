"""Temperature, log-normaliser and a draw from every row of logits, in one pass over the vocabulary.

The law of a row is p(v) = exp(scale * logit[v] - lse) on the tokens whose logit is at least the threshold.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.noise import gumbel_of_bits, random_bits, threefry_bits
from jspec.pallas.triton import block_ids, block_size, exp, kernel_call, load_block

_BLOCK = 2048
_WARPS = 4


def draw(logits, scale, threshold, key_data=None, noisy=None):
    """``draw_reference``, and on an NVIDIA GPU the kernel that decides alike."""
    return by_platform(draw_kernel, draw_reference, logits, scale, threshold, key_data, noisy)


def draw_reference(logits, scale, threshold, key_data=None, noisy=None):
    """One token of each row by the Gumbel-max trick (Gumbel, 1954), and the row's log-normaliser.

    Args:
      logits: ``[R, V]``, float32 or bfloat16, as stored.
      scale: float32 ``[R]``, 1 / temperature (1 for a greedy row).
      threshold: float32 ``[R]``, the lowest surviving logit.
      key_data: uint32 ``[R, 2]``, Threefry keys; token v takes the v-th word. None: no row draws.
      noisy: bool ``[R]``; False takes the most likely token, the lowest id among equals.

    Returns:
      token int32 ``[R]`` and lse float32 ``[R]``, which is NaN or infinite if the row has a number that is no logit.
    """
    z = logits.astype(jnp.float32)
    scaled = z * scale[:, None]
    cut = z < threshold[:, None]  # False for NaN, so that a NaN reaches the sum
    peak = jnp.max(scaled, axis=-1)
    lse = peak + jnp.log(jnp.sum(jnp.where(cut, 0.0, jnp.exp(scaled - peak[:, None])), axis=-1))
    score = draw_scores(logits, scale, threshold, key_data, noisy)
    return jnp.argmax(score, axis=-1).astype(jnp.int32), lse


def draw_scores(logits, scale, threshold, key_data=None, noisy=None):
    """What ``draw_reference`` maximises, float32 ``[R, V]``; the lead of a token is how firmly it was decided."""
    z = logits.astype(jnp.float32)
    score = jnp.where(z < threshold[:, None], -jnp.inf, z * scale[:, None])
    if key_data is None or noisy is None:
        return score
    noise = gumbel_of_bits(random_bits(key_data, logits.shape[1]))
    return score + jnp.where(noisy[:, None], noise, 0.0)


def draw_kernel(logits, scale, threshold, key_data=None, noisy=None, *, interpret=False):
    """``draw_reference`` as a kernel over (row, block of the vocabulary), and one that merges the blocks of a row."""
    R, V = logits.shape
    size = block_size(V, _BLOCK)
    blocks = pl.cdiv(V, size)
    partial = lambda dtype: jax.ShapeDtypeStruct((R, blocks), dtype)  # noqa: E731
    total = lambda dtype: jax.ShapeDtypeStruct((R,), dtype)  # noqa: E731
    of_blocks = kernel_call(
        _draw_block,
        *(logits, scale, threshold, *(() if key_data is None else (key_data, noisy))),
        grid=(R, blocks),
        out_shape=[partial(jnp.float32), partial(jnp.float32), partial(jnp.float32), partial(jnp.int32)],
        num_warps=_WARPS,
        interpret=interpret,
        width=V,
        size=size,
    )
    token, lse = kernel_call(
        _draw_merge,
        *of_blocks,
        grid=(R,),
        out_shape=[total(jnp.int32), total(jnp.float32)],
        num_warps=1,
        interpret=interpret,
        width=V,
        blocks=blocks,
    )
    return token, lse


def best_of(score, ids, width: int):
    """The best score and its id, the lowest among equals and in 0..width-1 whatever the scores are."""
    best = jnp.max(score)
    return best, jnp.min(jnp.where(score == best, ids, width - 1))


def gumbel_block(key_ref, row, ids, wanted):
    """The noise of some tokens of a row, or zeros: it costs four times what reading the logits does."""
    column = jnp.int32(0)  # a literal index does not trace in interpret mode of jax 0.10

    def noise():
        bits = threefry_bits(key_ref[row, column], key_ref[row, column + 1], ids.astype(jnp.uint32))
        return gumbel_of_bits(bits)

    return jax.lax.cond(wanted, noise, lambda: jnp.zeros(ids.shape, jnp.float32))


def _draw_block(logits_ref, scale_ref, threshold_ref, *refs, width, size):
    *noise_refs, peak_ref, total_ref, best_ref, token_ref = refs
    row, block = pl.program_id(0), pl.program_id(1)
    ids = block_ids(block, size)
    z = load_block(logits_ref, (row,), block, ids, width).astype(jnp.float32)
    scaled = z * scale_ref[row]
    cut = z < threshold_ref[row]
    peak = jnp.max(scaled)
    shift = jnp.where(peak > -jnp.inf, peak, 0.0)  # -inf everywhere is normal in a block, not in a row
    peak_ref[row, block] = peak
    total_ref[row, block] = jnp.sum(jnp.where(cut, 0.0, exp(scaled - shift)))
    score = jnp.where(cut, -jnp.inf, scaled)
    if noise_refs:
        key_ref, noisy_ref = noise_refs
        score = score + gumbel_block(key_ref, row, ids, noisy_ref[row] & (jnp.max(score) > -jnp.inf))
    best_ref[row, block], token_ref[row, block] = best_of(score, ids, width)


def _draw_merge(peak_ref, total_ref, best_ref, token_ref, out_token_ref, out_lse_ref, *, width, blocks):
    row, ids = pl.program_id(0), block_ids(0, pl.next_power_of_2(blocks))
    load = functools.partial(load_block, row=(row,), block=0, ids=ids, width=blocks)
    peaks = load(peak_ref)
    peak = jnp.max(peaks)
    out_lse_ref[row] = peak + jnp.log(jnp.sum(load(total_ref, other=0.0) * jnp.exp(peaks - peak)))
    _, out_token_ref[row] = best_of(load(best_ref), load(token_ref, other=width - 1), width)
