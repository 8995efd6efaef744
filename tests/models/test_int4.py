"""Weights of four bits: the codes against exact arithmetic, the choice of scales, and the products."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from engines import TARGET, error_in_shards
from flax import nnx
from normals import normal_numbers
from weight_only_problems import assert_product_is_rounded_once

from jspec.config import Experts, Latent, Shards
from jspec.config.model_fields import PLAIN_HEAD
from jspec.models import Decoder
from jspec.models.layers import Linear
from jspec.quantization import codes
from jspec.quantization.formats import INT4
from jspec.quantization.int4 import quantize
from jspec.quantization.weight import Weight, random_weight


def dequantize(packed, scale, inputs: int):
    return Weight(packed, scale, form=INT4, inputs=inputs).dequantize()


@pytest.mark.parametrize("inputs", [1, 37, 64, 65, 128, 129, 300])
def test_groups_that_are_not_full_are_padded(inputs):
    packed, scale = quantize(normal_numbers((5, inputs)))
    groups = -(-inputs // 128)
    assert (packed.shape, packed.dtype) == ((5, 64 * groups), np.uint8)
    assert (scale.shape, scale.dtype) == ((5, groups), ml_dtypes.bfloat16)
    assert dequantize(packed, scale, inputs).shape == (5, inputs)
    assert not dequantize(packed, scale, 128 * groups)[:, inputs:].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_number_becomes_the_nearest(dtype):
    """Of the sixteen that a code and the scale of the group can stand for."""
    weight = normal_numbers((7, 200), dtype=dtype)
    packed, scale = quantize(weight)
    actual = dequantize(packed, scale, 200)
    steps = np.repeat(np.asarray(scale, np.float32), 128, axis=1)[:, :200]
    able = steps[..., None] * np.arange(-8, 8, dtype=np.float32)
    least = np.abs(able - np.asarray(weight, np.float32)[..., None]).min(axis=-1)
    np.testing.assert_allclose(np.abs(actual - np.asarray(weight, np.float32)), least, rtol=1e-5, atol=1e-7)


def test_no_other_peak_is_better():
    """The scale of a group is the one of four with the least error, in which large numbers count more, and that is less than
    with peak / 7."""
    weight = normal_numbers((64, 128))
    packed, scale = quantize(weight)
    peak = np.take_along_axis(weight, np.abs(weight).argmax(axis=1)[:, None], axis=1)

    def error(numbers):
        return (np.square(numbers - weight) * np.abs(weight)).sum(axis=1)

    def with_scale(scale, low):
        scale = scale.astype(ml_dtypes.bfloat16).astype(np.float32)
        return error(np.clip(np.rint(weight / scale), low, 7) * scale)

    least = np.min([with_scale(peak / -largest, -8) for largest in (7.5, 8, 8.5, 9)], axis=0)
    found = error(dequantize(packed, scale, 128))
    np.testing.assert_allclose(found, least, rtol=1e-5)
    assert found.sum() < 0.8 * with_scale(np.abs(peak) / 7, -7).sum()


def test_extreme_groups_are_exact():
    """A group whose numbers are of one sign and size, zeros, and numbers whose scale a GPU would take for zero."""
    weight = np.zeros((4, 130), np.float32)
    weight[0], weight[1], weight[2, 5], weight[3, 129] = 2.0, -2.0, 1e-38, -0.5
    packed, scale = quantize(weight)
    assert np.asarray(scale[:, 0], np.float32).tolist() == [-0.25, 0.25, 1, 1]
    expected = weight.copy()
    expected[2, 5] = 0
    np.testing.assert_array_equal(dequantize(packed, scale, 130), expected)


def test_the_largest_numbers_have_scales():
    packed, scale = quantize(np.array([[-3e38, 1.0]], np.float32))
    np.testing.assert_array_equal(dequantize(packed, scale, 2), [[-8 * np.float32(scale[0, 0]), 0]])
    np.testing.assert_allclose(np.float32(scale), 3e38 / 8, rtol=2**-8)


@pytest.mark.parametrize("rows", [(1, 1), (2, 3)])
@pytest.mark.parametrize("inputs", [64, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_agree_with_dequantised_weights(dtype, inputs, rows):
    """Of the numbers that the codes stand for, rounded to the dtype of the inputs; the sum is rounded once."""
    packed, scale = (jnp.asarray(array) for array in quantize(normal_numbers((13, inputs))))
    assert_product_is_rounded_once(Weight(packed, scale, form=INT4, inputs=inputs), rows, dtype)


def test_a_bias_is_added():
    linear = Linear(130, 8, bias=True, quantization="int4", dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert linear.bias is not None
    without = linear(jnp.ones((2, 130)))
    linear.bias[...] = jnp.arange(8.0)
    np.testing.assert_allclose(linear(jnp.ones((2, 130))), without + jnp.arange(8.0)[None], rtol=1e-6)


# Sizes of which two shards have whole groups of inputs.
WIDE = dataclasses.replace(TARGET, num_heads=4, num_kv_heads=2, head_dim=64, intermediate_size=256, quantization="int4")


SHARDED = {
    "int4": {},
    "tied int4": {"tie_embeddings": True},
    "a scale for each output channel": {"quantization": "int4_all_float16_zeros"},
    "groups of 32": {"quantization": "int4_32_bfloat16_zeros"},
    "another order": {"quantization": "int4_64_float16_ordered", "other_formats": PLAIN_HEAD},
    "nvfp4": {"quantization": "nvfp4"},
    "mxfp4": {"quantization": "mxfp4"},
    "several formats": {
        "other_formats": (
            ("layers.0.attention.qkv", "int8"),
            ("layers.0.attention.out", "nvfp4"),
            ("layers.0.mlp.down", "fp8_block"),
            ("layers.1.mlp.gate_up", "int8_32_float16_zeros"),
            ("layers.1.mlp.down", "fp8"),
            ("layers.2.mlp.down", None),
            ("head", "int8_32_float16"),
        )
    },
    "latents": {"quantization": "nvfp4", "num_kv_heads": 4, "windows": (), "latent": Latent(160, 16, 64, 24)},
}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_have_entire_groups(name):
    config, rng = dataclasses.replace(WIDE, **SHARDED[name]), np.random.default_rng(0)
    model = Decoder(config, rngs=nnx.Rngs(1))
    for layer in model.layers:
        for _, linear in nnx.iter_modules(layer):
            if isinstance(linear, Linear) and linear.order is not None:
                linear.order[...] = jnp.asarray(rng.permutation(linear.order.size), jnp.int32)
    assert error_in_shards(model) < 1e-5


def test_shards_that_would_cut_a_group_are_refused():
    words = r"tensor_parallel=4: expected a divisor of the groups of 128 inputs .* which has 256 inputs; int8 and fp8"
    with pytest.raises(ValueError, match=words):
        Shards(4).local(dataclasses.replace(WIDE, num_kv_heads=4))
    assert Shards(4).local(dataclasses.replace(WIDE, num_kv_heads=4, quantization="int8")).num_heads == 1


EXPERTS = dataclasses.replace(WIDE, experts=Experts(4, 2, 256))


def test_shards_of_experts_have_whole_groups():
    stored = EXPERTS.stored_params()
    assert all(stored[f"layers.0.mlp.{part}.weight"].form.name == "int4" for part in ("gate_up", "down"))
    assert Shards(2).local(EXPERTS).experts == Experts(4, 2, 128)
    assert Shards(2, by_expert=True).local(dataclasses.replace(EXPERTS, experts=Experts(4, 2, 32))).num_heads
    with pytest.raises(ValueError, match=r"tensor_parallel=2: .* layers\.i\.mlp\.down\.weight stores together"):
        Shards(2).local(dataclasses.replace(EXPERTS, experts=Experts(4, 2, 128)))


@pytest.mark.parametrize(("kind", "by_expert"), [("int4", False), ("nvfp4", True), ("nvfp4", False)])
def test_experts_in_shards_have_the_logits_of_the_whole(kind, by_expert):
    model = Decoder(dataclasses.replace(EXPERTS, quantization=kind), rngs=nnx.Rngs(0))
    assert error_in_shards(model, by_expert=by_expert) < 1e-5


def test_inputs_in_the_order_of_codes_are_where_place_of_says():
    x = jnp.arange(2 * 256.0).reshape(2, 256)
    side_by_side = jnp.concatenate(codes.in_code_order(x), axis=1)
    np.testing.assert_array_equal(side_by_side[:, codes.place_of(jnp.arange(256), 256)], x)
    packed = codes.pack_codes((np.arange(256) % 16).astype(np.uint8))
    halves = np.concatenate([packed & 15, packed >> 4])
    in_order = jnp.concatenate(codes.in_code_order(jnp.arange(256)[None] % 16), axis=1)
    np.testing.assert_array_equal(halves, in_order[0])


def test_random_codes_are_of_all_sizes():
    weight = random_weight(jax.random.key(0), (64, 128), 0.5, form=INT4, dtype=jnp.float32)
    numbers = weight.dequantize() / float(weight.scale[0, 0])
    assert set(np.unique(numbers)) == set(range(-8, 8))
