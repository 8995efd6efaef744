"""Checkpoints in FP8 with blocks of 128 x 128: kept as they are stored, through loading and converting."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT, KEPT_SIZES, block_checkpoint, sizes_of, stored_as
from fp8_checkpoints import FP8, changed, fp8_checkpoint, names_in, raw_tensor
from mtp_checkpoints import with_layers
from stored_params import assert_same, assert_stands_for, logits, rewrite
from tiers import in_tiers
from tiny import SMALL, write_weights

import jspec
from convert import Refusal, convert, load_draft, load_folder
from convert.verify import compare
from jspec.checkpoints.checkpoint import Checkpoint, read_draft_config
from jspec.checkpoints.files.fp8_numbers import has_nan
from jspec.models.params import abstract_params
from jspec.quantization import fp8_block

LLAMA, MIXTURE, DEEPSEEK = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
FAMILIES = [LLAMA, MIXTURE, "Phi3ForCausalLM", "OPTForCausalLM", "MiniMaxM2ForCausalLM", "Gemma3ForCausalLM", DEEPSEEK]
DOWN = "model.layers.1.mlp.down_proj"  # [160, 264]


CASES = [(architecture, name) for architecture in FAMILIES for name in KEPT]


@pytest.mark.parametrize(
    "case",
    in_tiers(CASES, test=[(LLAMA, "deepseek"), (MIXTURE, "compressed"), (DEEPSEEK, "qwen instruct")]),
    ids=" in ".join,
)
def test_logits_are_those_of_the_numbers_in_the_files(tmp_path, case):
    architecture, name = case
    src = block_checkpoint(tmp_path / "src", KEPT[name], architecture, shards=2)
    config, params = load_folder(src)  # without a warning
    assert (config.quantization, config.quantized_head, config.plain_maps) == ("fp8_block", False, ())
    assert config == Checkpoint.open(src).target_config == read_draft_config(src)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


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


def test_other_readings_of_the_scales_give_other_weights(tmp_path):
    """Scales that are divided by, as their name ``inv`` might suggest, and blocks that are transposed."""
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"], hidden_size=256, intermediate_size=256)
    _, wide = load_folder(tmp_path / "src-wide")
    _, params = load_folder(src)
    numbers, scale = params["layers.0.mlp.down.weight"], params["layers.0.mlp.down.scale"]
    expected = wide["layers.0.mlp.down.weight"]
    np.testing.assert_array_equal(fp8_block.dequantize(numbers, scale), expected)
    grid = scale[::128]
    for wrong in (1 / grid, grid.T):
        assert not np.allclose(fp8_block.dequantize(numbers, np.repeat(wrong, 128, axis=0)), expected, rtol=1e-3)


def test_the_numbers_are_those_that_transformers_reads(tmp_path):
    """Of weights that whole blocks fill, because it takes no others."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], hidden_size=256, intermediate_size=384)
    _, params = load_folder(src)
    numbers = torch.from_numpy(raw_tensor(src, f"{DOWN}.weight").view(np.uint8).copy()).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(raw_tensor(src, f"{DOWN}.weight_scale_inv").astype(np.float32))
    wanted = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32).numpy()
    found = fp8_block.dequantize(params["layers.1.mlp.down.weight"], params["layers.1.mlp.down.scale"])
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("architecture", [LLAMA, DEEPSEEK])
def test_live_bytes_are_those_of_the_files(tmp_path, architecture):
    latents = {"kv_lora_rank": 256, "q_lora_rank": 128} if architecture == DEEPSEEK else {}
    sizes = {"hidden_size": 256, "intermediate_size": 512, **latents}
    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], architecture, **sizes)
    config, params = load_folder(src)
    size = sum(array.nbytes for array in params.values())
    assert size <= 1.1 * (src / "model.safetensors").stat().st_size
    assert size == config.weight_bytes(2)


@pytest.mark.parametrize("architecture", in_tiers([LLAMA, MIXTURE, DEEPSEEK], test=[DEEPSEEK]))
def test_conversion_keeps_every_bit(tmp_path, architecture):
    src, out = block_checkpoint(tmp_path / "src", KEPT["qwen"], architecture), tmp_path / "out"
    report = convert(src, out, verify="shapes")
    assert (report.dtype, report.quantization) == ("bfloat16", "fp8_block")
    assert any("params are the source's, as they are stored" in note for note in report.notes)
    assert_same(load_folder(src), load_folder(out))


@pytest.mark.parametrize("kind", in_tiers(["int8", "fp8", "int4"], test=["int8"]))
def test_they_may_be_quantised_otherwise(tmp_path, kind):
    src, out = block_checkpoint(tmp_path / "src", KEPT["deepseek"]), tmp_path / "out"
    assert convert(src, out, quantize=kind, dtype="bfloat16", verify="shapes").quantization == kind
    convert(tmp_path / "src-wide", tmp_path / "wide", quantize=kind, dtype="bfloat16")
    assert_same(load_folder(out), load_folder(tmp_path / "wide"))


def with_plain(folder, pattern: str):
    """The checkpoint with bfloat16 in place of FP8 for the linear maps whose names match."""
    wide, changes = load_wide(folder), {}
    for name in names_in(folder):
        if re.fullmatch(f"{pattern}\\.weight", name):
            changes |= {name: wide[name].astype(ml_dtypes.bfloat16), f"{name}_scale_inv": None}
            wide[name] = changes[name].astype(np.float32)
    assert changes
    write_weights(folder.with_name(f"{folder.name}-wide"), wide)
    return changed(folder, **changes)


def load_wide(folder) -> dict[str, np.ndarray]:
    wide = folder.with_name(f"{folder.name}-wide")
    return {name: raw_tensor(wide, name).copy() for name in names_in(wide)}


@pytest.mark.parametrize(
    ("architecture", "pattern", "plain"),
    [
        (LLAMA, re.escape(DOWN), ["layers.1.mlp.down"]),
        (
            LLAMA,
            r"model\.layers\.0\..*",
            [f"layers.0.{n}" for n in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")],
        ),
        (MIXTURE, r".*experts\..*\.down_proj", ["layers.1.mlp.down"]),
    ],
)
def test_single_maps_may_be_plain(tmp_path, architecture, pattern, plain):
    """What the tensors say decides, whether or not a list of modules says so."""
    src = with_plain(block_checkpoint(tmp_path / "src", KEPT["deepseek"], architecture), pattern)
    config, params = load_folder(src)
    assert config.quantization == "fp8_block"
    assert sorted(config.plain_maps) == sorted(plain)
    assert params[f"{plain[0]}.weight"].dtype == ml_dtypes.bfloat16
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(src), load_folder(tmp_path / "out"))


def test_a_part_that_is_plain_has_its_neighbours_dequantised(tmp_path):
    src = with_plain(block_checkpoint(tmp_path / "src", KEPT["deepseek"]), r"model\.layers\.0\.self_attn\.v_proj")
    words = (
        r"src: model\.layers\.0\.self_attn\.q_proj, model\.layers\.0\.self_attn\.k_proj, stored in FP8 .*128, are deq"
    )
    with pytest.warns(UserWarning, match=words):
        config, params = load_folder(src)
    assert config.plain_maps == ("layers.0.attention.qkv",)
    assert params["layers.1.attention.qkv.weight"].dtype == FP8
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_head_may_be_stored_so(tmp_path, tied):
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"], head=not tied, tie_word_embeddings=tied)
    config, params = load_folder(src)
    assert config.quantized_head is not tied
    assert params["embedding" if tied else "head.weight"].dtype == (ml_dtypes.bfloat16 if tied else FP8)
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


def test_the_map_of_latents_to_keys_and_values_is_kept_by_rows(tmp_path):
    """Rows of queries and latents are in another order in the params, and those of keys and values apart, and their scales
    with them."""
    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], DEEPSEEK)
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


@pytest.mark.parametrize("architecture", in_tiers([DEEPSEEK, "Glm4MoeForCausalLM"], test=["Glm4MoeForCausalLM"]))
def test_multi_token_prediction_layers(tmp_path, architecture):
    """Their maps are kept too, but for that of embedding and feature, which checkpoints do not quantise."""
    wide = with_layers(tmp_path / "wide", architecture, **sizes_of(KEPT["deepseek"], architecture))
    src, out = stored_as(tmp_path / "src", wide, KEPT["deepseek"]), tmp_path / "out"
    config, params = load_draft(src, mtp=True)
    assert config.layers.quantization == "fp8_block"
    assert "fuse_in.0" in config.layers.plain_maps
    assert params["layers.0.mlp.gate_up.weight"].dtype == FP8
    assert_stands_for(params, config, load_draft(wide, "float32", mtp=True)[1])
    convert(src, out, verify="shapes")
    assert_same(load_folder(out), load_folder(src))
    assert_same(load_draft(out / "mtp"), (config, params))


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [DEEPSEEK, "Glm4MoeForCausalLM"])
def test_multi_token_prediction_layers_draft(tmp_path, architecture):
    wide = with_layers(tmp_path / "wide", architecture, **sizes_of(KEPT["deepseek"], architecture))
    src = stored_as(tmp_path / "src", wide, KEPT["deepseek"])
    llm = jspec.load(src, draft="mtp", num_draft_tokens=2, **SMALL)
    [result] = jspec.generate(llm, [[7, 8, 9] * 3], temperature=0, max_tokens=6, ignore_eos=True)
    assert result.stats.num_draft_tokens > 0


@pytest.mark.parametrize("quantize", in_tiers([None, "int8"], test=[None]))
def test_a_draft_vocabulary(tmp_path, quantize):
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"], head=True)
    convert(src, tmp_path / "out", draft_vocabulary=[3, 5], quantize=quantize, dtype="bfloat16", verify="shapes")
    config, params = load_draft(tmp_path / "out")
    assert config.quantization == (quantize or "fp8_block")
    assert params["head.weight"].shape[0] == 2
    if quantize is None:
        _, whole = load_folder(src)
        for name in ("head.weight", "head.scale"):
            np.testing.assert_array_equal(params[name].view(np.uint8), whole[name][[3, 5]].view(np.uint8))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_numbers_that_are_nan_are_refused(tmp_path, code):
    for kind in ("blocks", "channels"):
        (tmp_path / kind).mkdir()
        path = tmp_path / kind / "src"
        src = block_checkpoint(path, KEPT["deepseek"]) if kind == "blocks" else fp8_checkpoint(path)
        numbers = raw_tensor(src, f"{DOWN}.weight").copy()
        numbers.view(np.uint8)[-1, -1] = code
        changed(src, **{f"{DOWN}.weight".replace(".", "__"): numbers})
        with pytest.raises(Refusal, match=rf"tensor '{re.escape(DOWN)}\.weight' holds NaN \(0x7f or 0xff\)"):
            load_folder(src)


def test_every_number_but_nan_is_one():
    for code in range(256):
        numbers = np.full(19, 0x3C, np.uint8)
        numbers[code % 19] = code
        assert has_nan(numbers.view(FP8)) == (code & 0x7F == 0x7F)


def test_a_kept_model_generates(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT["qwen"], MIXTURE)
    found, wanted = (
        jspec.load(path, dtype="float32", **SMALL).logits([3, 4, 5, 6]) for path in (src, tmp_path / "src-wide")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_list_that_contradicts_the_files_is_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"])
    rewrite(src, quantization_config={**KEPT["deepseek"].config, "modules_to_not_convert": ["lm_head", DOWN]})
    with pytest.raises(Refusal, match=f"modules_to_not_convert says that '{re.escape(DOWN)}' is not quantised, but"):
        load_folder(src)


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


@pytest.mark.parametrize(
    ("end", "array", "words"),
    [
        (".weight_scale_inv", None, f"src: tensor '{DOWN}.weight_scale_inv' is missing, and '{DOWN}.weight' needs it"),
        (".weight_scale_inv", np.ones((3, 2), np.float32), "is float32 [3, 2], but config.json asks for float32 or bf"),
        (
            ".weight_scale_inv",
            np.ones((2, 3), np.uint8),
            "is uint8 [2, 3], but config.json asks for float32 or bfloat16",
        ),
        (
            ".weight_scale",
            np.ones((2, 3), np.float32),
            f"tensor '{DOWN}.weight_scale' has no place in LlamaForCausalLM",
        ),
        *(
            (
                ".weight_scale_inv",
                np.full((2, 3), wrong, np.float32),
                f"{DOWN}.weight_scale_inv' holds {shown}: expected",
            )
            for wrong, shown in ((np.nan, "nan"), (np.inf, "inf"), (0, "0.0"), (-1, "-1.0"))
        ),
    ],
)
def test_damaged_scales_are_refused(tmp_path, end, array, words):
    """By their name, and before any weight is read."""
    src = block_checkpoint(tmp_path / "src", KEPT["deepseek"])
    changed(src, **{f"{DOWN}{end}".replace(".", "__"): array})
    with pytest.raises(Refusal) as refusal:
        Checkpoint.open(src).params()
    assert words in str(refusal.value)


def test_sizes_are_those_of_several_blocks():
    assert all(size > 128 and size % 128 for size in KEPT_SIZES.values())
