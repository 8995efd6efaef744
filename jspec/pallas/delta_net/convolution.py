"""The short causal convolution of a gated delta net, with the inputs that it keeps of each row, its columns.

Each channel is convolved by itself: output t is the silu of the sum of W products, of weights and of inputs t - W + 1
to t. Products are added in float32, and the result is rounded to the dtype of the inputs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.delta_net.state import PrefillRows, VerifyRows, per_row
from jspec.pallas.dispatch import by_platform
from jspec.pallas.sums import add
from jspec.pallas.triton import block_ids, kernel_call, load_block, multiply_add, sigmoid, store_block

_CHANNELS = 128  # that an instance of the verify kernel has; one warp, so that its reads all come before its writes
_PREFILL_CHANNELS, _PREFILL_TOKENS = 256, 16  # that an instance of the prefill kernel has
_PREFILL_WARPS = 2  # whose threads read 8 bytes at a time, in 80 registers; those of one would read 16, and take 200


def convolve(before, x, weight) -> jax.Array:
    """silu of the convolution of T tokens, ``[B, T, Cc]`` in the dtype of x.

    Args:
      before: ``[B, W - 1, Cc]``, the inputs before them; zeros where a text begins.
      x: ``[B, T, Cc]``.
      weight: ``[W, Cc]``, the last tap that of the token itself. Checkpoints store it as ``[Cc, 1, W]``.
    """
    T, inputs = x.shape[1], jnp.concatenate([before, x], axis=1).astype(jnp.float32)
    return _convolved([inputs[:, j : j + T] for j in range(len(weight))], weight).astype(x.dtype)


def _convolved(window, weight) -> jax.Array:
    """silu of the sum of W inputs ``[..., Cc]`` times the taps of ``[W, Cc]``, in float32."""
    taps = weight.astype(jnp.float32).reshape(len(weight), *(1,) * (window[0].ndim - 1), -1)
    total = window[0].astype(jnp.float32) * taps[0]
    for x, tap in zip(window[1:], taps[1:], strict=True):
        total = add(total, x.astype(jnp.float32) * tap)
    return jax.nn.silu(total)


def convolve_prefill(columns, rows: PrefillRows, x, weight) -> tuple[jax.Array, jax.Array]:
    """``convolve_prefill_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(convolve_prefill_kernel, convolve_prefill_reference, columns, rows, x, weight)


def convolve_prefill_reference(columns, rows: PrefillRows, x, weight) -> tuple[jax.Array, jax.Array]:
    """``convolve`` of the segments of a pass, and the columns behind the valid tokens of each chain.

    Args:
      columns: ``[Bs, W - 1 + Tm, Cc]``, of ``DeltaState``.
      rows: of the pass.
      x: ``[B, T, Cc or more]``, of which the first Cc channels are convolved.
      weight: ``[W, Cc]``.

    Returns:
      ``[B, T, Cc]``, any numbers for tokens that are not valid, and the columns.
    """
    before = _inputs(columns, rows, x, jnp.zeros_like(rows.tokens), len(weight) - 1)
    return convolve(before, x[:, :, : columns.shape[2]], weight), _newest_columns(columns, rows, x, len(weight) - 1)


def _newest_columns(columns, rows: PrefillRows, x, kept: int) -> jax.Array:
    """The columns with the last ``kept`` inputs of each chain in its row."""
    newest = _inputs(columns, rows, x, rows.tokens, kept)
    return columns.at[rows.written(len(columns)), :kept].set(newest, mode="drop")


def _inputs(columns, rows: PrefillRows, x, token, kept: int) -> jax.Array:
    """The ``kept`` inputs before a token of each segment, int32 ``[B]``: ``[B, kept, Cc]``.

    Those before the first token are in the columns, or are the last of the entry before if the segment follows it."""
    (Bs, _, Cc), (B, T, _) = columns.shape, x.shape
    place = token[:, None] - kept + jnp.arange(kept, dtype=jnp.int32)[None]
    in_pass = (place >= 0) | rows.follows[:, None]
    at = jnp.clip(jnp.arange(B, dtype=jnp.int32)[:, None] * T + place, 0, B * T - 1)
    known = columns[jnp.clip(rows.row, 0, Bs - 1)[:, None], jnp.clip(place + kept, 0, kept - 1)]
    known = jnp.where(rows.fresh[:, None, None], 0, known)
    return jnp.where(in_pass[:, :, None], x.reshape(B * T, -1)[at, :Cc], known)


def convolve_verify(columns, rows: VerifyRows, x, weight) -> tuple[jax.Array, jax.Array]:
    """``convolve_verify_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(convolve_verify_kernel, convolve_verify_reference, columns, rows, x, weight)


def convolve_verify_reference(columns, rows: VerifyRows, x, weight) -> tuple[jax.Array, jax.Array]:
    """``convolve`` of T query tokens behind the accepted tokens of the last verify pass, and the columns of this pass.

    Args:
      columns, x, weight: as of ``convolve_prefill_reference``; T is at most Tm.
      rows: of the pass.

    Returns:
      ``[B, T, Cc]``, 0 for query tokens that are not valid, and the columns.
    """
    (Bs, slots, Cc), T, kept = columns.shape, x.shape[1], weight.shape[0] - 1
    x, at = x[:, :, :Cc], jnp.clip(rows.row, 0, Bs - 1)
    before = jnp.where(per_row(rows.fresh, x), 0, _window(columns[at], rows.accepted, kept))
    valid = (jnp.arange(T)[None] < rows.tokens[:, None]) & rows.is_live(Bs)[:, None]
    new = jnp.concatenate([before, x], axis=1)
    assert kept + T <= slots, (kept, T, slots)

    def convolve_token(t, y):
        window = [jax.lax.dynamic_index_in_dim(new, t + j, axis=1, keepdims=False) for j in range(kept + 1)]
        return jax.lax.dynamic_update_index_in_dim(y, _convolved(window, weight).astype(y.dtype), t, axis=1)

    # A token at a time, as the kernel does it: code for [B, T, Cc] would round by T, and by the place of a channel in it.
    y = jax.lax.fori_loop(0, jnp.max(rows.tokens, initial=0), convolve_token, jnp.zeros_like(x))
    y = jnp.where(valid[:, :, None], y, 0)
    if rows.append:
        slot = kept + rows.accepted[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        return y, columns.at[rows.written(Bs)[:, None], slot].set(x, mode="drop")
    return y, columns.at[rows.written(Bs), : kept + T].set(new, mode="drop")


def _window(inputs, start, width: int) -> jax.Array:
    """``width`` of the inputs of each row from ``start`` on: ``[B, n, Cc]`` and int32 ``[B]`` to ``[B, width, Cc]``."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, width))(inputs, start)


@functools.partial(jax.jit, static_argnames=("tokens", "interpret"))  # layers share one trace
def convolve_prefill_kernel(
    columns, rows: PrefillRows, x, weight, *, tokens: int = _PREFILL_TOKENS, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """``convolve_prefill_reference`` with a kernel for the convolution; a program instance has some channels of some
    tokens of a segment.

    XLA updates the columns, in place if the caller donates them: an instance of the kernel would write what others read.
    They go through the kernel, which leaves them as they are; if it only read them, XLA would update a copy."""
    (B, T, C), Cc = x.shape, columns.shape[2]
    fresh, follows = (flags.astype(jnp.int32) for flags in (rows.fresh, rows.follows))
    numbers = dataclasses.replace(rows, fresh=fresh, follows=follows), x.reshape(B * T, C), weight
    outputs: Any = kernel_call(
        _convolve_segments,
        *numbers,
        columns,
        grid=(pl.cdiv(Cc, _PREFILL_CHANNELS), pl.cdiv(T, tokens), B),
        out_shape=[jax.ShapeDtypeStruct((B * T, Cc), x.dtype), jax.ShapeDtypeStruct(columns.shape, columns.dtype)],
        num_warps=_PREFILL_WARPS,
        interpret=interpret,
        aliases={len(jax.tree.leaves(numbers)): 1},
        tokens=tokens,
    )
    y, columns = outputs
    return y.reshape(B, T, Cc), _newest_columns(columns, rows, x, len(weight) - 1)


def _convolve_segments(rows: PrefillRows, x_ref, weight_ref, columns_ref, y_ref, _, *, tokens: int):
    (Bs, _, Cc), W, B, b = columns_ref.shape, weight_ref.shape[0], rows.row.shape[0], pl.program_id(2)
    T, block, start = x_ref.shape[0] // B, pl.program_id(0), pl.program_id(1) * tokens
    channel = block_ids(block, _PREFILL_CHANNELS)
    row, fresh, follows = jnp.clip(rows.row[b], 0, Bs - 1), rows.fresh[b] != 0, rows.follows[b] != 0

    def load(ref, *at, when=True):
        return load_block(ref, at, block, channel, Cc, when=when, other=0.0).astype(jnp.float32)

    def load_before(j):
        place = start - (W - 1) + j
        in_pass = (place >= 0) | follows  # those before the first token are the last of the entry before
        in_columns = ~in_pass & ~fresh
        known = load(columns_ref, row, jnp.where(in_columns, place + W - 1, 0), when=in_columns)
        return jnp.where(in_pass, load(x_ref, jnp.where(in_pass, b * T + place, 0), when=in_pass), known)

    token = [start + i for i in range(tokens)]
    taps = [load(weight_ref, jnp.int32(j)) for j in range(W)]
    inputs = [load_before(j) for j in range(W - 1)] + [load(x_ref, b * T + t, when=t < T) for t in token]
    for i, t in enumerate(token):
        y = _convolved_in_kernel(inputs[i : i + W], taps).astype(y_ref.dtype)
        store_block(y_ref, (b * T + t,), block, channel, Cc, y, when=t < T)


def _convolved_in_kernel(window, taps):
    """In a kernel: ``_convolved`` of W inputs and taps in float32, added in the same order in every kernel."""
    total = window[0] * taps[0]
    for x, tap in zip(window[1:], taps[1:], strict=True):
        total = multiply_add(x, tap, total)
    return total * sigmoid(total)


@functools.partial(jax.jit, static_argnames="interpret")  # layers share one trace
def convolve_verify_kernel(columns, rows: VerifyRows, x, weight, *, interpret=False) -> tuple[jax.Array, jax.Array]:
    """``convolve_verify_reference`` as a kernel; a program instance has some channels of one row.

    The columns are updated in place if the caller donates them."""
    (B, T, _), Cc = x.shape, columns.shape[2]
    numbers = dataclasses.replace(rows, fresh=rows.fresh.astype(jnp.int32)), x, weight
    outputs: Any = kernel_call(
        _convolve_delta_net,
        *numbers,
        columns,
        grid=(pl.cdiv(Cc, _CHANNELS), B),
        out_shape=[jax.ShapeDtypeStruct((B, T, Cc), x.dtype), jax.ShapeDtypeStruct(columns.shape, columns.dtype)],
        num_warps=1,
        interpret=interpret,
        aliases={len(jax.tree.leaves(numbers)): 1},
    )
    y, columns = outputs
    return y, columns


def _convolve_delta_net(rows: VerifyRows, x_ref, weight_ref, columns_ref, y_ref, columns_out_ref):
    (Bs, _, Cc), T, W, b = columns_ref.shape, x_ref.shape[1], weight_ref.shape[0], pl.program_id(1)
    channel = pl.program_id(0) * _CHANNELS + jnp.arange(_CHANNELS, dtype=jnp.int32)
    real = channel < Cc
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    channel = jnp.where(real, channel, Cc)
    row, tokens, fresh = rows.row[b], rows.tokens[b], rows.fresh[b] != 0
    is_live = (row >= 0) & (row < Bs) & (tokens > 0)
    tokens, row = jnp.where(is_live, tokens, 0), jnp.where(is_live, row, 0)
    start = jnp.where(is_live & ~fresh, rows.accepted[b], 0)
    known = real & is_live & ~fresh
    load = lambda ref, at, mask: pltriton.load(ref.at[(*at, channel)], mask=mask, other=0.0)  # noqa: E731
    taps = [load(weight_ref, (j,), real).astype(jnp.float32) for j in range(W)]
    before = tuple(load(columns_ref, (row, start + j), known) for j in range(W - 1))
    for j, x in enumerate(() if rows.append else before):
        pltriton.store(columns_out_ref.at[row, j, channel], x, mask=real & is_live)
    first = W - 1 + (start if rows.append else 0)

    def convolve_token(t, before):
        window = (*before, load(x_ref, (b, t), real))
        y = _convolved_in_kernel([x.astype(jnp.float32) for x in window], taps)
        pltriton.store(y_ref.at[b, t, channel], y.astype(y_ref.dtype), mask=real)
        pltriton.store(columns_out_ref.at[row, first + t, channel], window[-1], mask=real)
        return window[1:]

    def write_zeros(t, _):
        pltriton.store(y_ref.at[b, t, channel], jnp.zeros(channel.shape, y_ref.dtype), mask=real)

    jax.lax.fori_loop(jnp.int32(0), tokens, convolve_token, before)
    jax.lax.fori_loop(tokens, jnp.int32(T), write_zeros, None)
