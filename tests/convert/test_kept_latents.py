"""Checkpoints in codes with latent attention and with several shared experts in one tensor: both are kept as they are
stored."""

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_CODES, block_checkpoint
from fp8_checkpoints import FP8, changed, raw_tensor
from stored_params import assert_live_bytes, assert_same, assert_stands_for, logits, refuses
from tiers import in_tiers

from convert import convert, load_folder
from convert.verify import compare
from jspec.quantization.formats import group_size

DEEPSEEK = "DeepseekV3ForCausalLM"
KINDS = ["gptq", "gptq symmetric", "gptq v2 in order", "awq", "packed", "packed channel", "packed 8 bits, groups"]
KINDS += ["nvfp4", "nvfp4 modelopt", "mxfp4"]


def latents_checkpoint(path, name: str):
    """A checkpoint with latents whose numbers make three groups, where inputs have groups; with two shared experts."""
    kind = KEPT_CODES[name]
    group = max(group_size(kind.words) or 32, 32)
    sizes = {"kv_lora_rank": 3 * group, "q_lora_rank": group, "v_head_dim": 3 * group // 4}
    return block_checkpoint(path, kind, DEEPSEEK, **sizes)


@pytest.mark.parametrize("name", in_tiers(KINDS, test=["gptq", "nvfp4 modelopt"]))
def test_latent_attention_and_shared_experts_stay_as_they_are_stored(tmp_path, name):
    """Rows of queries, latents, keys and values are in another order in the params, and their scales with them. Shared
    experts are in one tensor."""
    src, out = latents_checkpoint(tmp_path / "src", name), tmp_path / "out"
    config, params = load_folder(src)
    assert (config.quantization, config.plain_maps) == (KEPT_CODES[name].words, ())
    maps = [f"attention.{part}" for part in ("compress", "queries", "keys", "values", "out")]
    for part in (*maps, "mlp.gate_up", "mlp.down"):
        assert params[f"layers.1.{part}.weight"].dtype == (np.int8 if "8 bits" in name else np.uint8)
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert sum(array.nbytes for array in params.values()) == config.weight_bytes(2)
    convert(src, out, verify="shapes")
    assert_same((config, params), load_folder(out))
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


def test_a_map_of_latents_in_another_order(tmp_path):
    """Whose experts are dequantised."""
    src = latents_checkpoint(tmp_path / "src", "gptq in another order")
    with pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp\.experts\.0\.gate_proj.* are dequantised as they are"):
        config, params = load_folder(src, "float32")
    for part in ("keys", "values"):
        assert params[f"layers.1.attention.{part}.weight"].dtype == np.uint8
        order = params[f"layers.1.attention.{part}.order"]
        assert order.shape == (96,)
        assert not np.array_equal(order, np.arange(96))
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


def test_experts_in_one_tensor_that_begin_within_a_group_are_dequantised(tmp_path):
    """With all experts that are read together with them."""
    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], DEEPSEEK, n_shared_experts=2)
    words = r"model\.layers\.1\.mlp\.experts\.0\.down_proj.* stored in FP8 .* are dequantised as they are read"
    with pytest.warns(UserWarning, match=words):
        config, params = load_folder(src)
    assert config.plain_maps == ("layers.1.mlp.down",)
    assert params["layers.1.mlp.down.weight"].dtype == ml_dtypes.bfloat16
    assert params["layers.1.mlp.gate_up.weight"].dtype == FP8


def test_live_bytes_are_those_of_the_files(tmp_path):
    """Of inputs that fill whole blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    latents = {"kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32}
    experts = {"moe_intermediate_size": 128, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
    assert_live_bytes(block_checkpoint(tmp_path / "src", KEPT_CODES["gptq"], DEEPSEEK, **sizes, **latents, **experts))


def test_damaged_scales_of_parts_are_refused(tmp_path):
    """Of a map whose rows go into two parameters, and of one whose columns are experts: by the names in the files."""
    src = latents_checkpoint(tmp_path / "src", "packed channel")
    for module in ("self_attn.kv_b_proj", "mlp.shared_experts.down_proj"):
        name = f"model.layers.1.{module}.weight_scale"
        scales = raw_tensor(src, name).copy()
        wrong = scales.copy()
        wrong[-1, -1] = np.nan
        refuses(changed(src, **{name: wrong}), f"tensor '{name}' holds nan: expected numbers other than 0")
        refuses(changed(src, **{name: scales[:-1]}), f"tensor '{name}' is ")
        changed(src, **{name: scales})
