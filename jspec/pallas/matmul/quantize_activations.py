"""Quantises the activations of each token to int8, which tensor cores multiply by int8 weights as they are."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import block_ids, kernel_call, largest_magnitude, load_block, store_block

LARGEST = 127  # the largest magnitude of a quantised number
_NUMBERS = 512  # of a token that one warp quantises
_LONGEST = 2**15  # vectors that a program instance holds in its registers are at most this long


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedActivations:
    """A vector for each token, in int8. That of token t stands for ``scale[t] * numbers[t]``.

    Attributes:
      numbers: int8 ``[..., D]``. Their largest magnitude is 127, unless all of them are zero.
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


def quantize_tokens(x) -> QuantizedActivations:
    """``quantize_tokens_reference``, and on an NVIDIA GPU the kernel. Quantised activations stay as they are."""
    if isinstance(x, QuantizedActivations):
        return x
    if pl.next_power_of_2(x.shape[-1]) > _LONGEST:
        return quantize_tokens_reference(x)
    return by_platform(quantize_tokens_kernel, quantize_tokens_reference, x)


def quantize_tokens_reference(x) -> QuantizedActivations:
    """Vectors ``[..., D]`` in int8, each with a scale of its own: its largest magnitude becomes 127.

    A vector whose scale would be subnormal has scale 1. If a number of a vector is not finite, its scale is not
    either."""
    numbers, scale = _quantize(x, x.ndim - 1)
    return QuantizedActivations(numbers, scale[..., 0], x.dtype)


def activate_and_quantize(gate_up, activate: Callable) -> QuantizedActivations:
    """``activate_and_quantize_reference``, and on an NVIDIA GPU the kernel, in one launch."""
    kernel, reference = (
        functools.partial(f, activate=activate) for f in (activate_and_quantize_kernel, activate_and_quantize_reference)
    )
    if pl.next_power_of_2(gate_up.shape[-1] // 2) > _LONGEST:
        return reference(gate_up)
    return by_platform(kernel, reference, gate_up)


def activate_and_quantize_reference(gate_up, activate: Callable) -> QuantizedActivations:
    """``activate(gate) * up`` in float32, quantised: the inputs of ``down`` of a gated MLP. ``gate_up`` is ``[...,
    2F]``."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return dataclasses.replace(quantize_tokens_reference(activate(gate) * up), dtype=gate_up.dtype)


def _quantize(x, axis: int):
    """The int8 numbers of x, and the scales of vectors along ``axis``, which stays with one element; in a kernel or
    not."""
    x32 = x.astype(jnp.float32)
    scale = largest_magnitude(x32, axis) / LARGEST  # NaN if a number is: in int8 it may become anything
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    return jnp.floor(x32 / scale + 0.5).astype(jnp.int32).astype(jnp.int8), scale


def store_quantized(numbers_ref, scale_ref, token, ids, x):
    """In a kernel: quantise the vector x of ``token`` and store it."""
    numbers, scale = _quantize(x, 0)
    store_block(numbers_ref, (token,), 0, ids, numbers_ref.shape[1], numbers)
    pltriton.store(scale_ref.at[token + jnp.arange(1)], scale)


def quantized_output_shapes(tokens: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """The shapes of a kernel's outputs that are ``QuantizedActivations``."""
    return [jax.ShapeDtypeStruct((tokens, width), jnp.int8), jax.ShapeDtypeStruct((tokens,), jnp.float32)]


@functools.partial(jax.jit, static_argnames="interpret")  # layers share one trace
def quantize_tokens_kernel(x, *, interpret=False) -> QuantizedActivations:
    """``quantize_tokens_reference`` as a kernel; a program instance has one token."""
    return _run_by_token(_quantize_tokens, x, x.shape[-1], interpret)


@functools.partial(jax.jit, static_argnames=("activate", "interpret"))
def activate_and_quantize_kernel(gate_up, activate: Callable, *, interpret=False) -> QuantizedActivations:
    """``activate_and_quantize_reference`` as a kernel; a program instance has one token."""
    return _run_by_token(_activate_and_quantize, gate_up, gate_up.shape[-1] // 2, interpret, activate=activate)


def _run_by_token(kernel, x, width: int, interpret: bool, **static) -> QuantizedActivations:
    tokens, size = x.size // x.shape[-1], pl.next_power_of_2(width)
    numbers, scale = kernel_call(
        kernel,
        x.reshape(tokens, x.shape[-1]),
        grid=(tokens,),
        out_shape=quantized_output_shapes(tokens, width),
        num_warps=min(max(size // _NUMBERS, 1), 16),
        interpret=interpret,
        size=size,
        **static,
    )
    return QuantizedActivations(numbers.reshape(*x.shape[:-1], width), scale.reshape(x.shape[:-1]), x.dtype)


def _quantize_tokens(x_ref, numbers_ref, scale_ref, *, size: int):
    token, ids = pl.program_id(0), block_ids(0, size)
    store_quantized(numbers_ref, scale_ref, token, ids, load_block(x_ref, (token,), 0, ids, x_ref.shape[1], other=0.0))


def _activate_and_quantize(x_ref, numbers_ref, scale_ref, *, size: int, activate: Callable):
    token, ids, F = pl.program_id(0), block_ids(0, size), numbers_ref.shape[1]
    gate, up = (pltriton.load(x_ref.at[token, at + ids], mask=ids < F, other=0.0).astype(jnp.float32) for at in (0, F))
    store_quantized(numbers_ref, scale_ref, token, ids, activate(gate) * up)
