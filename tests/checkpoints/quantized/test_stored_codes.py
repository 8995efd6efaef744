"""Checkpoints in four bits with a scale for each group of inputs: kept as stored, through loading and converting."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, KINDS, block_checkpoint
from fp8_checkpoints import changed, raw_tensor
from packed_weights import gptq_config, pack_quantized
from stored_params import assert_same, assert_stands_for, refuses, rewrite, stored_checkpoint
from tiers import in_tiers

from convert import Refusal, convert, load_folder
from jspec.checkpoints.quantized.packed_codes import PackedCodes
from jspec.quantization.codes import pack_codes, unpack_codes

MIXTURE, DEEPSEEK = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
DEQUANTISED_EXPERTS = ["gptq in another order", "gptq 8 bits in another order", "awq modelopt"]


@pytest.mark.parametrize("inputs", [1, 64, 100, 128, 300])
def test_codes_are_packed_and_unpacked(inputs):
    codes = np.random.default_rng(inputs).integers(16, size=(2, 3, inputs), dtype=np.uint8)
    packed = pack_codes(codes)
    assert packed.shape == (2, 3, 64 * -(-inputs // 128))
    for array in (packed, jnp.asarray(packed)):
        np.testing.assert_array_equal(unpack_codes(array, inputs), codes)
        assert (unpack_codes(array, packed.shape[-1] * 2)[..., inputs:] == 8).all()


def test_other_readings_give_other_weights(tmp_path):
    """Zeros that are stored less one, or are not."""
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["gptq"])
    _, right = load_folder(src)
    rewrite(src, quantization_config=gptq_config(group_size=32, checkpoint_format="gptq_v2"))
    _, wrong = load_folder(src)
    for name in ("layers.0.mlp.down", "layers.1.attention.qkv"):
        assert np.array_equal(right[f"{name}.weight"], wrong[f"{name}.weight"])
        scale, other = (params[f"{name}.scale"].astype(np.float32) for params in (right, wrong))
        assert np.array_equal(scale[..., 0], other[..., 0])
        assert (scale[..., 1] != other[..., 1]).all()


@pytest.mark.parametrize("name", in_tiers(DEQUANTISED_EXPERTS, test=["gptq in another order"]))
def test_other_experts_are_dequantised_with_a_warning(tmp_path, name):
    """While all other maps stay as they are stored, those of experts with a single group of inputs among them."""
    src, out = block_checkpoint(tmp_path / "src", KEPT_CODES[name], MIXTURE), tmp_path / "out"
    with pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp\.experts\.0\.gate_proj.* are dequantised as they are"):
        config, params = load_folder(src)
    assert params["layers.1.mlp.gate_up.weight"].dtype == ml_dtypes.bfloat16
    assert params["layers.1.attention.qkv.weight"].dtype == (np.int8 if "8 bits" in name else np.uint8)
    convert(src, out, verify="shapes")
    assert_same((config, params), load_folder(out))
    wide = load_folder(tmp_path / "src-wide")[1]
    name = "layers.1.mlp.gate_up.weight"
    assert_stands_for(params, config, wide | {name: wide[name].astype(ml_dtypes.bfloat16).astype(np.float32)})


def test_one_scale_for_each_output_channel_in_eight_bits_is_int8(tmp_path):
    """Where scales are positive, as llm-compressor chooses them: the weights have the kernels of int8."""

    def store(weight):
        parts, wide = pack_quantized(weight, -1, bits=8)
        return parts | {".weight_scale": np.abs(parts[".weight_scale"])}, wide * np.sign(parts[".weight_scale"])

    kind = KEPT_CODES["packed 8 bits"]
    src = block_checkpoint(tmp_path / "src", kind._replace(store=store))
    config, params = load_folder(src)
    assert config.quantization == "int8"
    assert params["layers.0.attention.qkv.scale"].dtype == np.float32
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


def test_groups_for_which_there_is_no_kernel_are_dequantised(tmp_path):
    for name in ("gptq", "gptq order", "awq"):
        with pytest.warns(UserWarning, match="for which there is no kernel, so they are dequantised as they are read"):
            assert load_folder(block_checkpoint(tmp_path / name, KINDS[name]))[0].quantization is None


def test_each_of_stacked_maps_has_its_number(tmp_path):
    """Queries, keys and values, whose numbers of NVFP4 differ."""
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["nvfp4"])
    numbers = [raw_tensor(src, f"model.layers.0.self_attn.{part}_proj.weight_global_scale")[0] for part in "qkv"]
    assert len(set(numbers)) == 3
    _, params = load_folder(src)
    found = params["layers.0.attention.qkv.channel_scale"]
    np.testing.assert_array_equal(found[:, 1], np.repeat(np.array(numbers), [64, 32, 32]))
    np.testing.assert_array_equal(found[:, 0], 1)


@pytest.mark.parametrize(
    ("place", "number", "words"), [(0, 0, "has a scale that is 0 or no number"), (1, 17, "has a zero that is no code")]
)
def test_damaged_numbers_of_a_converted_folder(tmp_path, monkeypatch, place, number, words):
    src, read = block_checkpoint(tmp_path / "src", KEPT_CODES["awq"]), PackedCodes.scales_of_groups

    def damaged(*args):
        found = read(*args).copy()
        found[0, 0, place] = number
        return found

    monkeypatch.setattr(PackedCodes, "scales_of_groups", damaged)
    convert(src, tmp_path / "out")
    with pytest.raises(Refusal, match=words):
        load_folder(tmp_path / "out")


def test_a_map_of_latents_in_another_order(tmp_path):
    """Whose experts are dequantised."""
    src = stored_checkpoint(tmp_path / "src", "gptq in another order", DEEPSEEK)
    with pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp\.experts\.0\.gate_proj.* are dequantised as they are"):
        config, params = load_folder(src, "float32")
    for part in ("keys", "values"):
        assert params[f"layers.1.attention.{part}.weight"].dtype == np.uint8
        order = params[f"layers.1.attention.{part}.order"]
        assert order.shape == (96,)
        assert not np.array_equal(order, np.arange(96))
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


def test_damaged_scales_of_parts_are_refused(tmp_path):
    """Of a map whose rows go into two parameters, and of one whose columns are experts: by the names in the files."""
    src = stored_checkpoint(tmp_path / "src", "packed channel", DEEPSEEK)
    for module in ("self_attn.kv_b_proj", "mlp.shared_experts.down_proj"):
        name = f"model.layers.1.{module}.weight_scale"
        scales = raw_tensor(src, name).copy()
        wrong = scales.copy()
        wrong[-1, -1] = np.nan
        refuses(changed(src, **{name: wrong}), f"tensor '{name}' holds nan: expected numbers other than 0")
        refuses(changed(src, **{name: scales[:-1]}), f"tensor '{name}' is ")
        changed(src, **{name: scales})
