"""Norms, and a residual sum together with its norm, in one launch.

A norm is one of four kinds. ``rms`` is the root-mean-square norm (Zhang and Sennrich, 2019), computed in fp32, rounded
to the dtype of x, and then multiplied by the weight. ``rms_wide`` multiplies in fp32, before it rounds, and
``rms_offset`` does so with 1 + weight. ``layer`` (Ba et al., 2016) subtracts the mean first, and adds a bias, all in
fp32."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.partial_sums import PartialSums, reduce_partial_sums
from jspec.pallas.matmul.quantize_activations import (
    quantize_tokens_reference,
    quantized_output_shapes,
    quantized_outputs,
    store_quantized,
)
from jspec.pallas.sums import add, row_sum
from jspec.pallas.triton import block_ids, kernel_call, load_block, store_block

_NUMBERS = 512  # of a token that one warp has


class SumOptions(NamedTuple):
    """What else ``add_norm`` does to the numbers that it adds.

    Attributes:
      weight, bias: of a norm of y before it is added, of the same kind and epsilon; None without one.
      scale: ``[1]``, what the sum is multiplied by; None for nothing.
    """

    weight: Any = None
    bias: Any = None
    scale: Any = None


PLAIN_SUM = SumOptions()


def add_norm(x, y, weight, bias, eps: float, kind: str, quantize: str | None = None, options: SumOptions = PLAIN_SUM):
    """``add_norm_reference``, and on an NVIDIA GPU the kernel. Summands of shards are added up before."""
    if isinstance(y, PartialSums) and y.reduce_axis is not None:
        y = y.total(x.dtype)
    args = x, y, weight, bias, options
    return differentiable(add_norm_kernel, add_norm_reference, *args, eps=eps, kind=kind, quantize=quantize)


def add_norm_reference(
    x, y, weight, bias, options: SumOptions = PLAIN_SUM, *, eps: float, kind: str, quantize: str | None = None
):
    """x + y ``[..., D]`` in the dtype of x, and its ``norm``, quantised to the kind ``quantize`` unless that
    is None (``jspec.pallas.matmul.quantize_activations``). y may be ``PartialSums``, and
    ``options`` may have it normed first, and the sum multiplied. Each step is rounded."""
    y = reduce_partial_sums(y, x.dtype)
    x = add(x, y if options.weight is None else norm(y, options.weight, options.bias, eps, kind))
    x = x if options.scale is None else x * options.scale[0]
    normed = norm(x, weight, bias, eps, kind)
    return x, normed if quantize is None else quantize_tokens_reference(normed, quantize)


def norm(x, weight, bias, eps: float, kind: str, reduce_axis: str | None = None, sum_row=row_sum):
    """The norm of ``[..., D]``, in the dtype of x.

    Args:
      x: ``[..., D]``.
      weight: ``[D]``, or with further axes before, which are those of x.
      bias: of the shape of ``weight`` for the kind ``layer``, None for the others.
      eps: added to the mean square, or to the variance.
      kind: ``rms``, ``rms_wide``, ``rms_offset`` or ``layer``; see above.
      reduce_axis: the mesh axis whose shards have equally many of the numbers each; None if all are here.
      sum_row: adds up numbers ``[..., D] -> [..., 1]``.
    """
    mean = lambda x: sum_row(x) / x.shape[-1]  # noqa: E731
    if reduce_axis is not None:
        mean = lambda x: jax.lax.pmean(sum_row(x) / x.shape[-1], reduce_axis)  # noqa: E731
    per_number = lambda array: array.reshape((1,) * (x.ndim - array.ndim) + array.shape)  # noqa: E731
    x32 = x.astype(jnp.float32)
    if kind == "layer":
        x32 = x32 - mean(x32)
    normed = x32 * jax.lax.rsqrt(mean(x32 * x32) + eps)
    if kind == "rms":
        return normed.astype(x.dtype) * per_number(weight)
    return scale_in_float32(normed, per_number(weight), None if bias is None else per_number(bias), kind).astype(
        x.dtype
    )


def scale_in_float32(normed, weight, bias, kind: str):
    """``normed`` times the weight, plus the bias, in fp32."""
    weight = weight.astype(jnp.float32)
    scaled = normed * (1 + weight if kind == "rms_offset" else weight)
    return scaled if bias is None else scaled + bias.astype(jnp.float32)


def norm_tokens(x, weight, bias, eps: float, kind: str):
    """``norm``, and on an NVIDIA GPU the kernel of ``add_norm``: XLA's sum over a token has other orders for other numbers
    of tokens."""
    return differentiable(norm_kernel, norm, x, weight, bias, eps=eps, kind=kind)


def norm_kernel(x, weight, bias, *, eps: float, kind: str, interpret=False):
    """``norm`` as a kernel."""
    return add_norm_kernel(x, None, weight, bias, eps=eps, kind=kind, interpret=interpret)[1]


@functools.partial(jax.jit, static_argnames=("eps", "kind", "quantize", "interpret"))  # layers share one trace
def add_norm_kernel(
    x,
    y,
    weight,
    bias,
    options: SumOptions = PLAIN_SUM,
    *,
    eps: float,
    kind: str,
    quantize: str | None = None,
    interpret=False,
):
    """``add_norm_reference`` as a kernel; a program instance has one token. Without y nothing is added, and x is not given
    back."""
    D = x.shape[-1]
    size = pl.next_power_of_2(D)
    tokens = x.size // D
    partials, y = (y.summands.shape[-2], y.summands) if isinstance(y, PartialSums) else (None, y)
    shape = jax.ShapeDtypeStruct((tokens, D), x.dtype)
    normed_shapes = [shape] if quantize is None else quantized_output_shapes(tokens, D, quantize)
    y = None if y is None else y.reshape(tokens * (partials or 1), D)
    made: Any = kernel_call(
        _add_norm,
        *(x.reshape(tokens, D), y, weight, bias, options),
        grid=(tokens,),
        out_shape=[*([] if y is None else [shape]), *normed_shapes],
        num_warps=min(max(size // _NUMBERS, 1), 16),
        interpret=interpret,
        size=size,
        partials=partials,
        eps=eps,
        kind=kind,
    )
    added, normed = (None, made) if y is None else (made[0].reshape(x.shape), made[1:])
    out = normed[0].reshape(x.shape) if quantize is None else quantized_outputs(*normed, x.dtype, *x.shape)
    return added, out


def _add_norm(
    x_ref,
    y_ref,
    weight_ref,
    bias_ref,
    options: SumOptions,
    *out_refs,
    size: int,
    partials: int | None,
    eps: float,
    kind: str,
):
    i, D, ids = pl.program_id(0), x_ref.shape[1], block_ids(0, size)
    token = (i,)

    def normed(x, *vector_refs):
        weight, bias = (None if ref is None else load_block(ref, (), 0, ids, D, other=0.0) for ref in vector_refs)
        return _normed_token(x, weight, bias, ids, D, eps, kind)

    def summand():
        if partials is None:
            return load_block(y_ref, token, 0, ids, D, other=0.0)
        at = ((i * partials + p,) for p in range(partials))
        summands = [load_block(y_ref, line, 0, ids, D, other=0.0).astype(jnp.float32) for line in at]
        return functools.reduce(jnp.add, summands).astype(x.dtype)

    x = load_block(x_ref, token, 0, ids, D, other=0.0)
    normed_refs = out_refs
    if y_ref is not None:
        added_ref, *normed_refs = out_refs
        y = summand()
        x = x + (y if options.weight is None else normed(y, options.weight, options.bias))
        x = x if options.scale is None else x * options.scale[0]
        store_block(added_ref, token, 0, ids, D, x)
    out = normed(x, weight_ref, bias_ref)
    if len(normed_refs) == 2:
        store_quantized(normed_refs[0], normed_refs[1], i, ids, out)
    else:
        store_block(normed_refs[0], token, 0, ids, D, out)


def _normed_token(x, weight, bias, ids, D: int, eps: float, kind: str):
    """``norm`` of the D numbers of a token, which are followed by zeros."""
    x32 = x.astype(jnp.float32)
    if kind == "layer":
        x32 = jnp.where(ids < D, x32 - jnp.sum(x32) / D, 0.0)
    normed = x32 * jax.lax.rsqrt(jnp.sum(x32 * x32) / D + eps)
    if kind == "rms":
        return normed.astype(x.dtype) * weight
    return scale_in_float32(normed, weight, bias, kind).astype(x.dtype)
