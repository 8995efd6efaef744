"""Which products, and which quantisations of their inputs, lower to kernels for CUDA on a machine without a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import for_cuda, kernels_of, mosaic_kernels_of
from flax import nnx
from matmul_rows import abstract_weight

from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS, Linear
from jspec.pallas.matmul import few_tokens, matmul
from jspec.pallas.matmul.bf16 import bf16_matmul_kernel
from jspec.pallas.matmul.quantize_activations import (
    LARGEST,
    QuantizedActivations,
    activate_and_quantize,
    quantize_tokens,
)
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.matmul.weight_only import weight_only_matmul_kernel
from jspec.pallas.norm.rms_norm import add_norm


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """jax 0.10 lowers for the GPU of this machine, and there is none."""
    if jax.__version_info__ < (0, 11):
        monkeypatch.setattr("jspec.pallas.matmul.table.on_hopper", lambda: True)


def _weight_only(M, out, inputs, stored):
    """x and a weight of few bits."""
    return jax.ShapeDtypeStruct((M, inputs), jnp.bfloat16), abstract_weight(stored, (out, inputs))


@pytest.mark.parametrize("stored", ["int4", "int8", "fp8", "fp8_block"])
@pytest.mark.parametrize(("out", "inputs"), [(6144, 4096), (1000, 100), (2880, 2880)])
@pytest.mark.parametrize("M", [1, 40, 320])
def test_weight_only_matmul_lowers_for_cuda(M, out, inputs, stored):
    assert kernels_of(for_cuda(weight_only_matmul_kernel, _weight_only(M, out, inputs, stored))) == [
        "weight_only_matmul"
    ]


@pytest.mark.parametrize(
    "stored",
    [
        *("int4_32_float16_zeros", "int4_all_float32", "int8_64_bfloat16_zeros", "nvfp4", "mxfp4", "nf4_64", "fp4_32"),
        *("int4_32_float16_offsets", "int5_32_float16", "int6_16_levels", "int4_32_levels_offsets", "int4_16_levels"),
        *("iq4_32_float16", "iq4_32_levels", "int8_32_float16", "int8_16_levels"),
    ],
)
@pytest.mark.parametrize("M", [1, 320])
def test_groups_lower_for_cuda(M, stored):
    found = for_cuda(lambda *args: weight_only_matmul_kernel(*args, jnp.bfloat16), _weight_only(M, 1000, 416, stored))
    assert kernels_of(found) == ["weight_only_matmul"]


@pytest.mark.parametrize(("M", "dtype", "kernels"), [(1, "bfloat16", 1), (2048, "bfloat16", 1), (5, "float32", 0)])
def test_tokens_of_bfloat16_have_the_kernel_for_four_bits(M, dtype, kernels):
    x, weight = _weight_only(M, 256, 512, "int4")
    assert len(kernels_of(for_cuda(matmul, (x.update(dtype=jnp.dtype(dtype)), weight)))) == kernels


@pytest.mark.parametrize(
    ("M", "out", "stored", "kernels"),
    [
        *((2, 8192, "int8", 1), (64, 8192, "int8", 1), (65, 8192, "int8", 0), (1, 8192, "int8", 0)),
        *((16, 8191, "int8", 0), (16, 8192, "fp8", 0)),
    ],
)
def test_several_tokens_have_the_kernel_for_large_weights_of_int8(M, out, stored, kernels, monkeypatch):
    """Where there is no kernel of Pallas' Mosaic GPU lowering."""
    monkeypatch.setattr(few_tokens, "LOWERS", False)
    assert len(kernels_of(for_cuda(matmul, _weight_only(M, out, 4096, stored)))) == kernels


@pytest.mark.parametrize(
    ("M", "dtype", "kernels"), [(1, "bfloat16", 1), (32, "bfloat16", 1), (600, "bfloat16", 1), (5, "float32", 0)]
)
@pytest.mark.parametrize("stored", ["fp8_block", "mxfp8"])
def test_blocks_of_fp8_have_the_kernel_for_bfloat16(M, dtype, kernels, stored):
    x, weight = _weight_only(M, 256, 512, stored)
    assert len(kernels_of(for_cuda(matmul, (x.update(dtype=jnp.dtype(dtype)), weight)))) == kernels


@pytest.mark.skipif(not few_tokens.LOWERS, reason="jax 0.10 does not lower the kernel")
@pytest.mark.parametrize(
    ("out", "inputs", "how", "splits"),
    [
        *[(6144, 4096, {}, 1), (28672, 4096, {}, 1), (128256, 4096, {"dtype": jnp.float32}, 1)],
        *[(4096, 14336, {"allow_partial_sums": True}, 4), (2048, 8192, {"allow_partial_sums": True}, 4)],
    ],
)
@pytest.mark.parametrize(
    ("M", "stored"),
    [
        *itertools.product([16, 80], ["int8", "fp8"]),
        *itertools.product([1, 80], ["fp8_block", "mxfp8"]),
        *itertools.product([1, 16], ["int4"]),
        (1, "nf4_64"),
        *itertools.product([1, 80], ["int4_32_levels_offsets", "int6_16_levels"]),
        *(
            (1, stored)
            for stored in ("int5_32_float16", "int5_32_levels_offsets", "iq4_32_levels", "int4_32_float16_zeros")
        ),
    ],
)
def test_few_tokens_have_the_kernel_for_few_bits(M, out, inputs, how, splits, stored):
    product, args = functools.partial(matmul, **how), _weight_only(M, out, inputs, stored)
    text = for_cuda(lambda *args: product(*args), args)  # not traced before
    assert mosaic_kernels_of(text) == ["few_tokens_matmul"]
    assert "triton" not in text
    assert (f"tensor<{M}x{splits}x{out}xf32>" in text) == (splits > 1)


@pytest.mark.skipif(not few_tokens.LOWERS, reason="jax 0.10 does not lower the kernel")
@pytest.mark.parametrize("M", [16, 33, 80, 321])
@pytest.mark.parametrize("stored", ["int4", "int6_16_levels", "fp8_block", "int8_32_float16"])
def test_several_tokens_have_that_kernel_for_small_weights(M, stored):
    text = for_cuda(lambda *args: matmul(*args), _weight_only(M, 1024, 4096, stored))
    several = 33 <= M <= 320
    assert mosaic_kernels_of(text) == ["few_tokens_matmul"] * several
    assert kernels_of(text) == ["weight_only_matmul"] * (not several)


@pytest.mark.skipif(not few_tokens.LOWERS, reason="jax 0.10 does not lower the kernel")
def test_other_gpus_have_the_kernel_of_many_gpus(monkeypatch):
    monkeypatch.setattr("jspec.pallas.matmul.table.on_hopper", lambda: False)
    text = for_cuda(lambda *args: matmul(*args), _weight_only(16, 8192, 4096, "int8"))  # not traced before
    assert kernels_of(text) == ["weight_only_matmul"]
    assert not mosaic_kernels_of(text)


def test_weight_only_matmul_elsewhere_is_the_reference():
    assert not kernels_of(jax.jit(matmul).lower(*_weight_only(5, 256, 512, "int4")).as_text())


def _w8a8(M, out, inputs):
    """Quantised tokens and a weight of int8 with its scales."""
    array = jax.ShapeDtypeStruct
    x = QuantizedActivations(array((M, inputs), jnp.int8), array((M,), jnp.float32), jnp.dtype("bfloat16"))
    return x, abstract_weight("int8", (out, inputs))


@pytest.mark.parametrize("allow_partial_sums", [False, True])
@pytest.mark.parametrize(("out", "inputs"), [(28672, 4096), (2048, 8192), (1000, 100)])
@pytest.mark.parametrize(("M", "kernels"), [(1, 1), (64, 1), (80, 1), (320, 1), (513, 0)])
def test_w8a8_matmul_lowers_for_cuda(M, kernels, out, inputs, allow_partial_sums):
    function = functools.partial(matmul, allow_partial_sums=allow_partial_sums)
    assert kernels_of(for_cuda(function, _w8a8(M, out, inputs))) == ["w8a8_matmul"] * kernels
    assert not kernels_of(jax.jit(function).lower(*_w8a8(M, out, inputs)).as_text())


@pytest.mark.parametrize(
    "tiling", [MatmulTiling(64, 64, 128, 4, 5, True, 2), MatmulTiling(32, 64, 128, 4, 5, False)], ids=str
)
def test_bf16_matmul_lowers_for_cuda(tiling):
    args = (jax.ShapeDtypeStruct((size, 4096), jnp.bfloat16) for size in (64, 6144))
    assert kernels_of(for_cuda(functools.partial(bf16_matmul_kernel, tiling=tiling), args)) == ["bf16_matmul"]


@pytest.mark.parametrize(
    ("tokens", "out", "inputs", "how", "kernels"),
    [
        (1, 4096, 4096, {"allow_partial_sums": True}, 0),
        (5, 4096, 4096, {"allow_partial_sums": True}, 1),
        (5, 6144, 4096, {}, 1),
        (5, 6144, 4096, {"bias": True}, 0),
        (64, 4096, 14336, {"allow_partial_sums": True}, 1),
        (80, 4096, 14336, {"allow_partial_sums": True}, 0),
        (5, 28672, 4096, {}, 0),
        (5, 4096, 2048, {}, 0),
    ],
)
def test_maps_of_bfloat16_have_the_kernel_for_some_tokens(tokens, out, inputs, how, kernels):
    def mapped(weight, x):
        linear = Linear(8, out, **how, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        linear.weight = nnx.Param(weight)
        return linear(x)

    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((out, inputs), (1, tokens, inputs))]
    assert kernels_of(for_cuda(mapped, args)) == ["bf16_matmul"] * kernels
    assert not kernels_of(jax.jit(mapped).lower(*args).as_text())


@pytest.mark.parametrize("D", [100, 4096, 14336])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantizing_lowers_for_cuda(dtype, D):
    array = jax.ShapeDtypeStruct
    x, vector, many = array((2, 5, D), dtype), array((D,), dtype), array((2, 5, 40_000), dtype)
    for kind in LARGEST:
        quantize = functools.partial(quantize_tokens, kind=kind)
        assert kernels_of(for_cuda(quantize, (x,))) == ["quantize_tokens"]
        assert kernels_of(for_cuda(quantize, (many,))) == []
        with_norm = functools.partial(add_norm, eps=1e-5, kind="rms", quantize=kind)
        assert kernels_of(for_cuda(with_norm, (x, x, vector, None))) == ["add_norm"]


@pytest.mark.parametrize(("name", "kind"), [*((name, "int8") for name in ACTIVATED_IN_KERNELS), ("silu", "fp8")])
def test_activations_lower_for_cuda(name, kind):
    function = functools.partial(activate_and_quantize, activate=ACTIVATE[name], kind=kind)
    assert kernels_of(for_cuda(function, (jax.ShapeDtypeStruct((2, 5, 600), jnp.bfloat16),))) == [
        "activate_and_quantize"
    ]
