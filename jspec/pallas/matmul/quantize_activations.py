"""Quantises the activations of each token to eight bits, which tensor cores multiply by weights of eight bits as they are.

A *kind* is ``int8``, for weights of int8, or ``fp8``, float8_e4m3fn, for weights of FP8. Each token has one scale, its
largest magnitude divided by 127 or 448, and its numbers are rounded to the nearest after they are divided by that."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import encode
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import block_ids, kernel_call, largest_magnitude, load_block, store_block

LARGEST = {"int8": 127, "fp8": 448}  # the largest magnitude of a quantised number, by kind
_WRITTEN = {"int8": jnp.int8, "fp8": jnp.uint8}  # what kernels write: of FP8 its bits
_NUMBERS = 512  # of a token that one warp quantises
_LONGEST = 2**15  # vectors that a program instance holds in its registers are at most this long


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedActivations:
    """A vector for each token, in eight bits. That of token t stands for ``scale[t] * numbers[t]``.

    Attributes:
      numbers: int8 or float8_e4m3fn ``[..., D]``. Their largest magnitude is 127 or 448, unless all of them are zero.
      scale: float32 ``[...]``.
      dtype: that of the vectors before, and of products with them.
    """

    numbers: jax.Array
    scale: jax.Array
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the vectors, ``[..., D]``."""
        return self.numbers.shape

    def reshape(self, *shape: int) -> "QuantizedActivations":
        """The same vectors along other leading axes; the last axis stays."""
        numbers = self.numbers.reshape(*shape)
        return dataclasses.replace(self, numbers=numbers, scale=self.scale.reshape(numbers.shape[:-1]))


def quantize_tokens(x, kind: str = "int8", reduce_axis: str | None = None) -> QuantizedActivations:
    """``quantize_tokens_reference``, and on an NVIDIA GPU the kernel where it needs no other shards. Quantised activations
    stay as they are."""
    if isinstance(x, QuantizedActivations):
        return x
    if reduce_axis is not None or pl.next_power_of_2(x.shape[-1]) > _LONGEST:
        return quantize_tokens_reference(x, kind, reduce_axis)
    return by_platform(quantize_tokens_kernel, quantize_tokens_reference, x, kind=kind)


def quantize_tokens_reference(x, kind: str = "int8", reduce_axis: str | None = None) -> QuantizedActivations:
    """Vectors ``[..., D]`` in eight bits, each with a scale of its own: its largest magnitude becomes 127, or 448 in FP8.

    A vector whose scale would be subnormal has scale 1. If a number of a vector is not finite, its scale is not
    either.

    Args:
      x: ``[..., D]``.
      kind: ``int8`` or ``fp8``.
      reduce_axis: the mesh axis whose shards have a part of each vector. The scale is then that of the whole vector, the
        same in each shard, so that numbers do not depend on how many shards there are. None takes x to be whole.
    """
    numbers, scale = _quantize(x, x.ndim - 1, kind, reduce_axis)
    return QuantizedActivations(_numbers(numbers), scale[..., 0], x.dtype)


def activate_and_quantize(
    gate_up, activate: Callable, kind: str = "int8", reduce_axis: str | None = None
) -> QuantizedActivations:
    """``activate_and_quantize_reference``, and on an NVIDIA GPU the kernel, in one launch, where it needs no other
    shards."""
    if reduce_axis is not None or pl.next_power_of_2(gate_up.shape[-1] // 2) > _LONGEST:
        return activate_and_quantize_reference(gate_up, activate, kind, reduce_axis)
    functions = activate_and_quantize_kernel, activate_and_quantize_reference
    return by_platform(*functions, gate_up, activate=activate, kind=kind)


def activate_and_quantize_reference(
    gate_up, activate: Callable, kind: str = "int8", reduce_axis: str | None = None
) -> QuantizedActivations:
    """``activate(gate) * up`` in float32, quantised: the inputs of ``down`` of a gated MLP. ``gate_up`` is ``[...,
    2F]``; other arguments as for ``quantize_tokens_reference``."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    quantised = quantize_tokens_reference(activate(gate) * up, kind, reduce_axis)
    return dataclasses.replace(quantised, dtype=gate_up.dtype)


def _quantize(x, axis: int, kind: str, reduce_axis: str | None = None):
    """The numbers of x as kernels write them, and the scales of vectors along ``axis``, which stays with one element; in
    a kernel or not."""
    x32 = x.astype(jnp.float32)
    peak = largest_magnitude(x32, axis)
    if reduce_axis is not None:  # of integers, whose maximum drops no NaN, and which are ordered as these floats are
        bits = jax.lax.pmax(jax.lax.bitcast_convert_type(peak, jnp.int32), reduce_axis)
        peak = jax.lax.bitcast_convert_type(bits, jnp.float32)
    scale = peak / LARGEST[kind]  # NaN if a number is: in int8 it may become anything
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    if kind == "fp8":
        return encode(x32 / scale), scale
    return jnp.floor(x32 / scale + 0.5).astype(jnp.int32).astype(jnp.int8), scale


def _numbers(written) -> jax.Array:
    """The numbers that kernels have written, int8 or the bits of FP8."""
    return written if written.dtype == jnp.int8 else jax.lax.bitcast_convert_type(written, jnp.float8_e4m3fn)


def quantized_outputs(written, scale, dtype, *shape: int) -> QuantizedActivations:
    """The vectors ``shape = [..., D]`` in the outputs of a kernel, whose shapes are ``quantized_output_shapes``."""
    return QuantizedActivations(_numbers(written).reshape(shape), scale.reshape(shape[:-1]), dtype)


def store_quantized(numbers_ref, scale_ref, token, ids, x):
    """In a kernel: quantise the vector x of ``token`` and store it, as the kind that ``numbers_ref`` is for."""
    kind = next(kind for kind, dtype in _WRITTEN.items() if dtype == numbers_ref.dtype)
    numbers, scale = _quantize(x, 0, kind)
    store_block(numbers_ref, (token,), 0, ids, numbers_ref.shape[1], numbers)
    pltriton.store(scale_ref.at[token + jnp.arange(1)], scale)


def quantized_output_shapes(tokens: int, width: int, kind: str) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a kernel's outputs of which ``quantized_outputs`` makes ``QuantizedActivations``."""
    return [jax.ShapeDtypeStruct((tokens, width), _WRITTEN[kind]), jax.ShapeDtypeStruct((tokens,), jnp.float32)]


@functools.partial(jax.jit, static_argnames=("kind", "interpret"))  # layers share one trace
def quantize_tokens_kernel(x, *, kind: str = "int8", interpret=False) -> QuantizedActivations:
    """``quantize_tokens_reference`` as a kernel; a program instance has one token."""
    return _run_by_token(_quantize_tokens, x, x.shape[-1], kind, interpret)


@functools.partial(jax.jit, static_argnames=("activate", "kind", "interpret"))
def activate_and_quantize_kernel(
    gate_up, activate: Callable, *, kind: str = "int8", interpret=False
) -> QuantizedActivations:
    """``activate_and_quantize_reference`` as a kernel; a program instance has one token."""
    return _run_by_token(_activate_and_quantize, gate_up, gate_up.shape[-1] // 2, kind, interpret, activate=activate)


def _run_by_token(kernel, x, width: int, kind: str, interpret: bool, **static) -> QuantizedActivations:
    tokens, size = x.size // x.shape[-1], pl.next_power_of_2(width)
    outputs = kernel_call(
        kernel,
        x.reshape(tokens, x.shape[-1]),
        grid=(tokens,),
        out_shape=quantized_output_shapes(tokens, width, kind),
        num_warps=min(max(size // _NUMBERS, 1), 16),
        interpret=interpret,
        size=size,
        **static,
    )
    return quantized_outputs(*outputs, x.dtype, *x.shape[:-1], width)


def _quantize_tokens(x_ref, numbers_ref, scale_ref, *, size: int):
    token, ids = pl.program_id(0), block_ids(0, size)
    store_quantized(numbers_ref, scale_ref, token, ids, load_block(x_ref, (token,), 0, ids, x_ref.shape[1], other=0.0))


def _activate_and_quantize(x_ref, numbers_ref, scale_ref, *, size: int, activate: Callable):
    token, ids, F = pl.program_id(0), block_ids(0, size), numbers_ref.shape[1]
    gate, up = (pltriton.load(x_ref.at[token, at + ids], mask=ids < F, other=0.0).astype(jnp.float32) for at in (0, F))
    store_quantized(numbers_ref, scale_ref, token, ids, activate(gate) * up)
