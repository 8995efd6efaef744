"""Checkpoints in FP8 with blocks of 128 x 128: kept as they are stored, through loading and converting."""

import json

import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_SIZES, block_checkpoint
from fp8_checkpoints import FP8, changed, names_in, raw_tensor
from stored_params import assert_same, assert_stands_for, rewrite

from convert import Refusal, load_folder
from jspec.checkpoints.files.fp8_numbers import has_nan
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

DOWN = "model.layers.1.mlp.down_proj"  # [160, 264]


@pytest.mark.parametrize("name", KEPT)
def test_bits_are_those_of_the_files(tmp_path, name):
    """Scales are repeated for each output channel. Queries, keys and values have their own."""
    src = block_checkpoint(tmp_path / "src", KEPT[name])
    _, params = load_folder(src)
    end = "weight_scale" if name == "compressed" else "weight_scale_inv"
    for param, tensors in (
        ("attention.qkv", [f"self_attn.{part}_proj" for part in "qkv"]),
        ("mlp.gate_up", ["mlp.gate_proj", "mlp.up_proj"]),
        ("mlp.down", ["mlp.down_proj"]),
    ):
        numbers = [raw_tensor(src, f"model.layers.0.{tensor}.weight") for tensor in tensors]
        scales = [raw_tensor(src, f"model.layers.0.{tensor}.{end}").astype(np.float32) for tensor in tensors]
        found = params[f"layers.0.{param}.weight"], params[f"layers.0.{param}.scale"]
        assert [array.dtype for array in found] == [FP8, np.float32]
        np.testing.assert_array_equal(found[0].view(np.uint8), np.concatenate(numbers).view(np.uint8))
        each = [np.repeat(s, 128, axis=0)[: len(n)] for n, s in zip(numbers, scales, strict=True)]
        np.testing.assert_array_equal(found[1], np.concatenate(each))
        assert found[1].shape[1] == -(-numbers[0].shape[1] // 128) > 1


@pytest.mark.parametrize("beside", [False, True])
def test_blocks_of_model_optimizer(tmp_path, beside):
    """Its scales have four axes."""
    src = block_checkpoint(tmp_path / "src", KEPT["compressed"])
    expected = load_folder(src)
    scales = {name: raw_tensor(src, name)[:, None, :, None] for name in names_in(src) if name.endswith(".weight_scale")}
    changed(src, **{name.replace(".", "__"): array for name, array in scales.items()})
    described = {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head*"], "kv_cache_quant_algo": None}
    own = None if beside else {"quant_method": "modelopt", **described}
    if beside:
        (src / "hf_quant_config.json").write_text(json.dumps({"quantization": described}))
    rewrite(src, quantization_config=own)
    assert_same(load_folder(src), expected)


def test_a_block_as_older_files_write_it(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT["compressed"])
    expected, config = load_folder(src), KEPT["compressed"].config
    weights = {**config["config_groups"]["group_0"]["weights"], "block_structure": "128x128"}
    groups = {"group_0": {**config["config_groups"]["group_0"], "weights": weights}}
    rewrite(src, quantization_config={**config, "config_groups": groups})
    assert_same(load_folder(src), expected)


def dequantized(numbers, scale) -> np.ndarray:
    return Weight(numbers, scale, form=known_format("fp8_block")).dequantize()


def test_other_readings_of_the_scales_give_other_weights(tmp_path):
    """Scales that are divided by, as their name ``inv`` might suggest, and blocks that are transposed."""
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"], hidden_size=256, intermediate_size=256)
    _, wide = load_folder(tmp_path / "src-wide")
    _, params = load_folder(src)
    numbers, scale = params["layers.0.mlp.down.weight"], params["layers.0.mlp.down.scale"]
    expected = wide["layers.0.mlp.down.weight"]
    np.testing.assert_array_equal(dequantized(numbers, scale), expected)
    grid = scale[::128]
    for wrong in (1 / grid, grid.T):
        assert not np.allclose(dequantized(numbers, np.repeat(wrong, 128, axis=0)), expected, rtol=1e-3)


def test_the_numbers_are_those_that_transformers_reads(tmp_path):
    """Of weights that whole blocks fill, because it takes no others."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], hidden_size=256, intermediate_size=384)
    _, params = load_folder(src)
    numbers = torch.from_numpy(raw_tensor(src, f"{DOWN}.weight").view(np.uint8).copy()).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(raw_tensor(src, f"{DOWN}.weight_scale_inv").astype(np.float32))
    wanted = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32).numpy()
    found = dequantized(params["layers.1.mlp.down.weight"], params["layers.1.mlp.down.scale"])
    np.testing.assert_array_equal(found, wanted)


def test_the_map_of_latents_to_keys_and_values_is_kept_by_rows(tmp_path):
    """Rows of queries and latents are in another order in the params, and those of keys and values apart, and their scales
    with them."""
    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], "DeepseekV3ForCausalLM")
    config, params = load_folder(src)  # without a warning
    up, heads, own, value, rank = "model.layers.1.self_attn.kv_b_proj.weight", 4, 40, 56, 160
    numbers, stored = raw_tensor(src, up), raw_tensor(src, f"{up}_scale_inv").astype(np.float32)
    assert stored.shape == (3, 2)
    for name, start, size in (("keys", 0, own), ("values", own, value)):
        of_map = f"layers.1.attention.{name}"
        found, scale = params[f"{of_map}.weight"], params[f"{of_map}.scale"]
        assert (found.dtype, found.shape, scale.dtype) == (FP8, (heads * size, rank), np.float32)
        for row in range(heads * size):
            at = row // size * (own + value) + start + row % size
            np.testing.assert_array_equal(found[row].view(np.uint8), numbers[at].view(np.uint8))
            np.testing.assert_array_equal(scale[row], stored[at // 128])
    for name in ("compress", "queries", "out"):
        assert params[f"layers.1.attention.{name}.weight"].dtype == FP8
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


def test_every_number_but_nan_is_one():
    for code in range(256):
        numbers = np.full(19, 0x3C, np.uint8)
        numbers[code % 19] = code
        assert has_nan(numbers.view(FP8)) == (code & 0x7F == 0x7F)


def test_two_descriptions_that_disagree_are_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"])
    expected = load_folder(src)
    rewrite(src, compression_config=KEPT["deepseek"].config)
    assert_same(load_folder(src), expected)
    rewrite(src, compression_config=KEPT["compressed"].config)
    with pytest.raises(
        Refusal, match="quantization_config and compression_config contradict each other; remove the one"
    ):
        load_folder(src)


def test_sizes_are_those_of_several_blocks():
    assert all(size > 128 and size % 128 for size in KEPT_SIZES.values())
