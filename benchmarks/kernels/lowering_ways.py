"""The ways to compute a product that ``benchmarks.kernels.lowerings`` compares, and weights of each form."""

import dataclasses
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
from jspec.quantization.formats import format_of
from jspec.quantization.weight import Weight, random_weight

KINDS = ("bf16", "int8", "fp8", "blocks", "mxfp8", "int4", "int4_zeros", "nvfp4", "nf4")
_NAMES = {"bf16": None, "blocks": "fp8_block", "int4_zeros": "int4_128_float16_zeros", "nf4": "nf4_64"}
FORMS = {kind: format_of(_NAMES.get(kind, kind)) for kind in (*KINDS, "mxfp4")}
BYTES = {"bf16": 2, **dict.fromkeys(("int4", "int4_zeros", "nvfp4", "nf4"), 0.5)}  # of a number; of other kinds 1
WAYS = ("mosaic", "triton", "xla", "cublas")
MOSAIC = jax.__version_info__ >= (0, 11)  # older versions have other names in this lowering


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

    @jax.jit
    def make(key) -> Weight:
        numbers, scales = jax.random.split(key)
        weight = random_weight(numbers, shape, shape[1] ** -0.5, dtype=jnp.bfloat16, form=FORMS[kind])
        if kind == "bf16":
            return weight
        if weight.scale.dtype == jnp.uint8:  # powers of two
            return dataclasses.replace(
                weight, scale=weight.scale + jax.random.randint(scales, weight.scale.shape, 0, 2, "uint8")
            )
        scale = weight.scale[::BLOCK] if kind == "blocks" else weight.scale
        factors = jax.random.uniform(scales, scale.shape, jnp.float32, 0.5, 1.5)
        if kind == "int4_zeros":
            scale = scale.at[..., 1].set(jax.random.randint(scales, scale.shape[:2], 0, 17))
            factors = factors.at[..., 1].set(1)
        return dataclasses.replace(weight, scale=(scale.astype(jnp.float32) * factors).astype(scale.dtype))

    return [make(key) for key in jax.random.split(jax.random.key(0), count)]


def with_scales_of_outputs(weight: Weight) -> Weight:
    """The same of blocks, with the scales of a block for each of its outputs, as models have them."""
    return dataclasses.replace(weight, scale=jnp.repeat(weight.scale, BLOCK, axis=0))


def _wide(weight: Weight) -> jax.Array:
    """What it stands for in float32."""
    return (with_scales_of_outputs(weight) if weight.form is FORMS["blocks"] else weight).dequantize(rounded=True)


def by_definition(x, weight: Weight):
    """The product in float32."""
    return matmul_reference(x.astype(jnp.float32), _wide(weight))


def by_xla(x, weight: Weight):
    """The product as a model would ask XLA for it."""
    if weight.form is None:
        return matmul_reference(x, weight.numbers, None)
    if weight.form.per_channel:
        return (matmul_reference(x, weight.numbers.astype(x.dtype)) * weight.scale[None]).astype(x.dtype)
    return matmul_reference(x, _wide(weight).astype(x.dtype), None)


def by_triton(x, weight: Weight, *, interpret: bool = False):
    """The product by today's kernels."""
    if weight.form is None:
        tiling = small_batch_tiling(len(x), *weight.shape, itemsize=weight.numbers.dtype.itemsize)
        return bf16_matmul_kernel(x, weight.numbers, tiling=tiling, interpret=interpret)
    if weight.form is FORMS["blocks"]:
        return block_product(x, weight.numbers, weight.scale, interpret=interpret)
    return weight_only_matmul_kernel(x, weight, x.dtype, interpret=interpret)


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

        def by_mosaic(tiling, x, weight):
            return few_tokens_matmul_kernel(x, weight, tiling=tiling, **how)

        small = SMALL_TILINGS if BYTES.get(kind, 1) == 1 and kind != "mxfp8" else SMALL_TILINGS[:1]
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
