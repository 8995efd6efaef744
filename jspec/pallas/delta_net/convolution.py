"""The short causal convolution of a gated delta net, with the inputs that it keeps of each row, its columns.

Each channel is convolved by itself: output t is the silu of the sum of W products, of weights and of inputs t - W + 1
to t. Products are added in float32, and the result is rounded to the dtype of the inputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.delta_net.state import PrefillRows, VerifyRows, per_row
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import kernel_call, multiply_add

_CHANNELS = 128  # that a program instance has; one warp, so that its reads all come before its writes


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
        total = total + x.astype(jnp.float32) * tap
    return jax.nn.silu(total)


def convolve_prefill(columns, rows: PrefillRows, x, weight) -> tuple[jax.Array, jax.Array]:
    """``convolve`` of the segments of a pass, and the columns behind the valid tokens of each chain.

    Args:
      columns: ``[Bs, W - 1 + Tm, Cc]``, of ``DeltaState``.
      rows: of the pass.
      x: ``[B, T, Cc or more]``, of which the first Cc channels are convolved.
      weight: ``[W, Cc]``.
    """
    (Bs, _, Cc), T, kept = columns.shape, x.shape[1], weight.shape[0] - 1
    x = x[:, :, :Cc]
    before = jnp.where(per_row(rows.fresh, x), 0, columns[jnp.clip(rows.row, 0, Bs - 1), :kept])
    behind = jnp.concatenate([before, x], axis=1)[:, T:]  # the last inputs of each segment, if all of it is valid
    before = jnp.where(per_row(rows.follows, x), jnp.roll(behind, 1, axis=0), before)
    newest = _window(jnp.concatenate([before, x], axis=1), rows.tokens, kept)
    return convolve(before, x, weight), columns.at[rows.written(Bs), :kept].set(newest, mode="drop")


def convolve_verify(columns, rows: VerifyRows, x, weight, *, append: bool = False) -> tuple[jax.Array, jax.Array]:
    """``convolve_verify_reference``, and on an NVIDIA GPU the kernel."""
    kernel, reference = (
        functools.partial(f, append=append) for f in (convolve_verify_kernel, convolve_verify_reference)
    )
    return by_platform(kernel, reference, columns, rows, x, weight)


def convolve_verify_reference(
    columns, rows: VerifyRows, x, weight, *, append: bool = False
) -> tuple[jax.Array, jax.Array]:
    """``convolve`` of T query tokens behind the accepted tokens of the last verify pass, and the columns of this pass.

    Args:
      columns: ``[Bs, W - 1 + Tm, Cc]``, of ``DeltaState``.
      rows: of the pass.
      x: ``[B, T, Cc or more]``, T at most Tm, of which the first Cc channels are convolved.
      weight: ``[W, Cc]``.
      append: whether the columns of these tokens are put behind those of the accepted ones, which stay where they are.

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
    if append:
        slot = kept + rows.accepted[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
        return y, columns.at[rows.written(Bs)[:, None], slot].set(x, mode="drop")
    return y, columns.at[rows.written(Bs), : kept + T].set(new, mode="drop")


def _window(inputs, start, width: int) -> jax.Array:
    """``width`` of the inputs of each row from ``start`` on: ``[B, n, Cc]`` and int32 ``[B]`` to ``[B, width, Cc]``."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, width))(inputs, start)


@functools.partial(jax.jit, static_argnames=("append", "interpret"))  # layers share one trace
def convolve_verify_kernel(
    columns, rows: VerifyRows, x, weight, *, append: bool = False, interpret=False
) -> tuple[jax.Array, jax.Array]:
    """``convolve_verify_reference`` as a kernel; a program instance has some channels of one row.

    The columns are updated in place if the caller donates them."""
    (B, T, _), Cc = x.shape, columns.shape[2]
    numbers = rows._replace(fresh=rows.fresh.astype(jnp.int32)), x, weight
    outputs: Any = kernel_call(
        _convolve_delta_net,
        *numbers,
        columns,
        grid=(pl.cdiv(Cc, _CHANNELS), B),
        out_shape=[jax.ShapeDtypeStruct((B, T, Cc), x.dtype), jax.ShapeDtypeStruct(columns.shape, columns.dtype)],
        num_warps=1,
        interpret=interpret,
        aliases={len(jax.tree.leaves(numbers)): 1},
        append=append,
    )
    y, columns = outputs
    return y, columns


def _convolve_delta_net(rows: VerifyRows, x_ref, weight_ref, columns_ref, y_ref, columns_out_ref, *, append: bool):
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
    for j, x in enumerate(() if append else before):
        pltriton.store(columns_out_ref.at[row, j, channel], x, mask=real & is_live)
    first = W - 1 + (start if append else 0)

    def convolve_token(t, before):
        window = (*before, load(x_ref, (b, t), real))
        total = window[0].astype(jnp.float32) * taps[0]
        for x, tap in zip(window[1:], taps[1:], strict=True):
            total = multiply_add(x.astype(jnp.float32), tap, total)
        pltriton.store(y_ref.at[b, t, channel], (total * jax.nn.sigmoid(total)).astype(y_ref.dtype), mask=real)
        pltriton.store(columns_out_ref.at[row, first + t, channel], window[-1], mask=real)
        return window[1:]

    def write_zeros(t, _):
        pltriton.store(y_ref.at[b, t, channel], jnp.zeros(channel.shape, y_ref.dtype), mask=real)

    jax.lax.fori_loop(jnp.int32(0), tokens, convolve_token, before)
    jax.lax.fori_loop(tokens, jnp.int32(T), write_zeros, None)
