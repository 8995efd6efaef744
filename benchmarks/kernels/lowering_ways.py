"""The ways to compute a product that ``benchmarks.kernels.lowerings`` compares, and weights of each form."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.kernels.triton_blocks import BLOCK, block_product
from jspec.pallas.matmul.bf16 import bf16_matmul_kernel
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.small_batch import small_batch_tiling
from jspec.pallas.matmul.weight_only import weight_only_matmul_kernel
from jspec.quantization import nvfp4
from jspec.quantization.codes import random_codes
from jspec.quantization.formats import GROUP, INT4, grouped
from jspec.quantization.weight import dequantize

KINDS = ("bf16", "int8", "fp8", "blocks", "int4", "int4_zeros", "nvfp4")
CODES = {"int4": INT4, "int4_zeros": grouped(4, GROUP, "float16", zeros=True)}
BYTES = {"bf16": 2, "int4": 0.5, "int4_zeros": 0.5, "nvfp4": 0.5}  # of a number; of other kinds 1
WAYS = ("mosaic", "triton", "xla", "cublas")
MOSAIC = jax.__version_info__ >= (0, 11)  # older versions have other names in this lowering

Weight = tuple[jax.Array, ...]  # and its scales, and in NVFP4 the numbers of its output channels


class Candidate(NamedTuple):
    """A product by one way, and what to call it."""

    way: str
    name: str
    product: Callable[..., jax.Array]
    in_order: bool = False
    options: dict[str, str | int | bool] = {}  # noqa: RUF012


@functools.cache
def weights_of(kind: str, shape: tuple[int, int], count: int) -> list[Weight]:
    """Random weights whose products with normal numbers are of order 1. Scales differ, or a wrong index would not show."""
    outputs, inputs = shape

    @jax.jit
    def make(key) -> Weight:
        numbers, scales = jax.random.split(key)
        if kind in CODES:
            packed, scale = random_codes(numbers, shape, inputs**-0.5, CODES[kind])
            factors = jax.random.uniform(scales, scale.shape, jnp.float32, 0.5, 1.5)
            if CODES[kind].zeros:
                scale = scale.at[..., 1].set(jax.random.randint(scales, scale.shape[:2], 0, 17))
                factors = factors.at[..., 1].set(1)
            return packed, (scale * factors).astype(scale.dtype)
        if kind == "nvfp4":
            packed, scale, channel_scale = nvfp4.random_codes(numbers, shape, inputs**-0.5)
            return (
                packed,
                jax.random.uniform(scales, scale.shape, jnp.float32, 0.5, 1.5).astype(scale.dtype),
                channel_scale,
            )
        weight = jax.random.normal(numbers, shape, jnp.bfloat16)
        if kind == "bf16":
            return ((weight * inputs**-0.5).astype(jnp.bfloat16),)
        scale_shape = (outputs // BLOCK, inputs // BLOCK) if kind == "blocks" else (outputs,)
        scale = jax.random.uniform(scales, scale_shape, jnp.float32, 0.5, 1.5) * inputs**-0.5 / 32
        if kind == "int8":
            return jnp.clip(jnp.round(weight * 32), -127, 127).astype(jnp.int8), scale
        return (weight * 32).astype(jnp.float8_e4m3fn), scale

    return [make(key) for key in jax.random.split(jax.random.key(0), count)]


def by_blocks(scale) -> jax.Array:
    """A scale for each number of the weight."""
    return jnp.repeat(jnp.repeat(scale, BLOCK, axis=0), BLOCK, axis=1)


def by_definition(x, weight, scale=None, channel_scale=None):
    """The product in float32."""
    if weight.dtype == jnp.uint8:
        return matmul_reference(x.astype(jnp.float32), dequantize(weight, scale, x.shape[1], channel_scale))
    wide = weight.astype(jnp.float32)
    if scale is not None:
        wide *= scale[:, None] if scale.ndim == 1 else by_blocks(scale)
    return matmul_reference(x.astype(jnp.float32), wide)


def by_xla(x, weight, scale=None, channel_scale=None):
    """The product as a model would ask XLA for it."""
    if scale is None:
        return matmul_reference(x, weight, None)
    if weight.dtype == jnp.uint8:
        return matmul_reference(x, dequantize(weight, scale, x.shape[1], channel_scale).astype(x.dtype), None)
    if scale.ndim == 1:
        return (matmul_reference(x, weight.astype(x.dtype)) * scale[None]).astype(x.dtype)
    return matmul_reference(x, (weight.astype(jnp.float32) * by_blocks(scale)).astype(x.dtype), None)


def by_triton(x, weight, scale=None, channel_scale=None, *, interpret: bool = False):
    """The product by today's kernels."""
    if scale is None:
        tiling = small_batch_tiling(len(x), *weight.shape, itemsize=weight.dtype.itemsize)
        return bf16_matmul_kernel(x, weight, tiling=tiling, interpret=interpret)
    if scale.ndim == 1 or weight.dtype == jnp.uint8:
        return weight_only_matmul_kernel(x, weight, scale, x.dtype, channel_scale, interpret=interpret)
    return block_product(x, weight, scale, interpret=interpret)


def candidates(
    kind: str, tokens: int, shape: tuple[int, int], in_parts: bool, ways, smoke: bool
) -> Iterator[Candidate]:
    """What is compared, the ways in their order. Only ``mosaic`` may compute ``in_parts``."""
    if "mosaic" in ways and MOSAIC:
        from benchmarks.kernels.mosaic_tilings import SMALL_TILINGS, tilings_for
        from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

        how: dict[str, Any] = {}
        if smoke:
            from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore

            how = {"instances": 3, "interpret": InterpretGPUParams()}

        def by_mosaic(tiling, x, weight, scale=None, channel_scale=None):
            return few_tokens_matmul_kernel(x, weight, scale, channel_scale=channel_scale, tiling=tiling, **how)

        small = SMALL_TILINGS if BYTES.get(kind, 1) == 1 else SMALL_TILINGS[:1]
        tilings = small if smoke else tilings_for(kind, tokens, shape, in_parts)
        for name, tiling in tilings:
            product = functools.partial(by_mosaic, tiling)
            yield Candidate("mosaic", f"{name} {tiling}".lstrip(), product, tiling.ordered)
    if "triton" in ways:
        yield Candidate("triton", "", functools.partial(by_triton, interpret=smoke))
    if "xla" in ways:
        yield Candidate("xla", "", by_xla)
    if "cublas" in ways and kind == "bf16":
        yield Candidate("cublas", "", by_xla, options={"xla_gpu_enable_triton_gemm": False})
