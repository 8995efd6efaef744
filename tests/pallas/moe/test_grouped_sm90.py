"""``jspec.pallas.moe.grouped_sm90``, interpreted, against the same in float64, and which weights it multiplies."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, mosaic_kernels_of
from test_grouped_mlp import by_token, layer, regrouped

from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.moe.grouped_sm90 import grouped_mlp_sm90_kernel, suits_sm90, tile_size
from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.moe.tiles import ExpertWeights

newer = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 does not interpret Mosaic kernels of this kind"
)
KINDS = ("fp8_block", "int4", "int4_64_float16_zeros", "nvfp4", "int8")


def mlp(x, routed, gate_up, down, **how):
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

    how |= {"interpret": InterpretGPUParams(), "instances": 2, "size": 8}
    return PartialSums(grouped_mlp_sm90_kernel(x, routed, gate_up, down, **how)).total(jnp.float32)


def check(got, args, **how):
    wanted = by_token(*args, **how)
    np.testing.assert_allclose(got, wanted, atol=0.01 * np.abs(wanted).max())


@newer
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_float64(kind):
    args = layer(3, 128, 128, 3, 1, "bfloat16", kind)
    check(mlp(*args), args)


@newer
def test_tiles_of_any_number_of_assignments():
    """Of an expert that has two tiles, of one that has none, and of one whose tile has one line; and gpt-oss' activation."""
    x, routed, *weights = layer(10, 256, 128, 3, 1, "bfloat16", "fp8_block")
    expert = jnp.array([[0]] * 4 + [[2]] + [[0]] * 5)
    args = x, regrouped(expert, routed.weight, 3), *weights
    check(mlp(*args, clamp=0.5), args, clamp=0.5)


@newer
def test_a_token_that_is_not_finite_leaves_the_others_alone():
    x, routed, *weights = layer(3, 128, 128, 2, 1, "bfloat16", "int4")
    routed = regrouped(jnp.zeros((3, 1), jnp.int32), routed.weight, 2)
    clean, got = (mlp(of_tokens, routed, *weights) for of_tokens in (x, x.at[1, 7].set(jnp.nan)))
    assert jnp.isnan(got[1]).any()
    np.testing.assert_array_equal(got[jnp.array([0, 2])], clean[jnp.array([0, 2])])


STORED = {  # dtypes of weights and scales, inputs in an element, inputs of a group or None, and further axes of scales
    "int8": ("int8", 1, "float32", None, ()),
    "fp8_block": ("float8_e4m3fn", 1, "float32", 128, ()),
    "int8 with zeros": ("int8", 1, "float32", 128, (2,)),
    "int4": ("uint8", 2, "float16", 128, ()),
    "int4_64 with zeros": ("uint8", 2, "float16", 64, (2,)),
    "int4_32": ("uint8", 2, "float16", 32, ()),
    "linear mxfp4": ("uint8", 2, "uint8", 32, ()),
    "nvfp4": ("uint8", 2, "float8_e4m3fn", 16, ()),
}


def shapes_of(kind: str, X: int, lines: int, inputs: int) -> ExpertWeights:
    dtype, packed, scale_dtype, group, more = STORED[kind]
    groups = () if group is None else (inputs // group, *more)
    shape: Any = jax.ShapeDtypeStruct
    channels = shape((X, lines, 2), "float32") if kind == "nvfp4" else None
    return ExpertWeights(
        shape((X, lines, inputs // packed), dtype), shape((X, lines, *groups), scale_dtype), None, channels
    )


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 11), reason="jax 0.12 finds no layouts for the product of down")
@pytest.mark.parametrize("kind", ["fp8_block", "int4", "nvfp4"])
def test_lowers_for_hopper(kind):
    """With the sizes of Qwen3-30B-A3B and 16 tokens."""
    shape: Any = jax.ShapeDtypeStruct
    routed = [shape((16, 8), "int32"), shape((16, 8), "float32"), shape((128,), "int32"), shape((128,), "int32")]
    weights = shapes_of(kind, 128, 1536, 2048), shapes_of(kind, 128, 2048, 768)
    text = for_cuda(
        lambda *args: grouped_mlp_sm90_kernel(*args, size=8), (shape((16, 2048), "bfloat16"), Routed(*routed), *weights)
    )
    assert mosaic_kernels_of(text) == ["grouped_hidden", "grouped_down"]


def test_which_weights_suit():
    suits = {kind for kind in STORED if suits_sm90(shapes_of(kind, 2, 256, 256), 256)}
    assert suits == {"int8", "fp8_block", "int4", "int4_64 with zeros", "nvfp4"}
    weights = shapes_of("int8", 2, 256, 256)
    assert not suits_sm90(shapes_of("int8", 2, 256, 192), 192)
    assert not suits_sm90(shapes_of("int8", 2, 192, 256), 256)
    assert not suits_sm90(weights._replace(scale=None), 256)
    assert not suits_sm90(weights._replace(bias=jnp.zeros((2, 256))), 256)


def test_tiles_have_room_for_the_assignments_of_most_experts():
    assert [tile_size(A, 128) for A in (8, 512, 513, 1536, 3072, 3073)] == [8, 8, 16, 16, 32, None]
