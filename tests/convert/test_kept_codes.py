"""Checkpoints in four bits with a scale for each group of inputs: kept as stored, through loading and converting."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from block_checkpoints import KEPT_CODES, KINDS, block_checkpoint, stored_as
from fp8_checkpoints import changed, raw_tensor
from mtp_checkpoints import with_layers
from packed_weights import gptq_config, pack_quantized
from stored_params import assert_live_bytes, assert_same, assert_stands_for, logits, refuses, rewrite, with_plain
from tiers import in_tiers

from convert import Refusal, convert, load_draft, load_folder
from convert.verify import compare
from jspec.checkpoints.checkpoint import Checkpoint, read_draft_config
from jspec.checkpoints.quantized.stored_codes import CodeScales
from jspec.models.params import abstract_params
from jspec.quantization.codes import pack_codes, unpack_codes

LLAMA, MIXTURE = "LlamaForCausalLM", "Qwen3MoeForCausalLM"
DOWN, V = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"
EXPERTS = ["gptq", "awq channel", "packed", "nvfp4", "mxfp4", "packed 8 bits, groups"]
DEQUANTISED_EXPERTS = ["gptq in another order", "gptq 8 bits in another order"]
FEW = ["gptq", "awq channel", "packed", "nvfp4"]


@pytest.mark.parametrize("name", in_tiers(KEPT_CODES, test=[name for name in KEPT_CODES if name != "packed 256"]))
def test_weights_are_those_of_the_files(tmp_path, name):
    """Number by number, without a warning, and they stay in their bits."""
    kind = KEPT_CODES[name]
    src = block_checkpoint(tmp_path / "src", kind, shards=2)
    config, params = load_folder(src)
    assert (config.quantization, config.quantized_head, config.plain_maps) == (kind.words, False, ())
    assert config == Checkpoint.open(src).target_config == read_draft_config(src)
    assert {n: (a.shape, a.dtype) for n, a in params.items()} == {
        n: (leaf.shape, leaf.dtype) for n, leaf in abstract_params(config, "bfloat16").items()
    }
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert params["layers.0.mlp.down.weight"].dtype == (np.int8 if "8 bits" in name else np.uint8)
    assert sum(array.nbytes for array in params.values()) == config.weight_bytes(2)


@pytest.mark.parametrize("name", in_tiers(KEPT_CODES, test=FEW))
def test_logits_are_those_of_the_numbers_in_the_files(tmp_path, name):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES[name])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


@pytest.mark.parametrize("inputs", [1, 64, 100, 128, 300])
def test_codes_are_packed_and_unpacked(inputs):
    codes = np.random.default_rng(inputs).integers(16, size=(2, 3, inputs), dtype=np.uint8)
    packed = pack_codes(codes)
    assert packed.shape == (2, 3, 64 * -(-inputs // 128))
    for array in (packed, jnp.asarray(packed)):
        np.testing.assert_array_equal(unpack_codes(array, inputs), codes)
        assert (unpack_codes(array, packed.shape[-1] * 2)[..., inputs:] == 8).all()


@pytest.mark.parametrize("name", ["gptq", "awq channel", "packed", "nvfp4", "mxfp4"])
def test_live_bytes_are_those_of_the_files(tmp_path, name):
    """Of inputs that fill whole blocks."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    assert_live_bytes(block_checkpoint(tmp_path / "src", KEPT_CODES[name], **sizes))


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


@pytest.mark.parametrize("name", in_tiers(KEPT_CODES, test=FEW))
def test_conversion_keeps_every_bit(tmp_path, name):
    src, out = block_checkpoint(tmp_path / "src", KEPT_CODES[name]), tmp_path / "out"
    report = convert(src, out, verify="shapes")
    assert (report.dtype, report.quantization) == ("bfloat16", KEPT_CODES[name].words)
    assert any("params are the source's, as they are stored" in note for note in report.notes)
    assert_same(load_folder(src), load_folder(out))


@pytest.mark.parametrize("kind", in_tiers(["int8", "fp8", "int4"], test=["int4"]))
def test_they_may_be_quantised_otherwise(tmp_path, kind):
    src, out = block_checkpoint(tmp_path / "src", KEPT_CODES["awq"]), tmp_path / "out"
    assert convert(src, out, quantize=kind, dtype="bfloat16", verify="shapes").quantization == kind
    convert(tmp_path / "src-wide", tmp_path / "wide", quantize=kind, dtype="bfloat16")
    assert_same(load_folder(out), load_folder(tmp_path / "wide"))


@pytest.mark.parametrize("name", ["gptq", "packed channel"])
def test_single_maps_may_be_plain(tmp_path, name):
    """What the tensors say decides, whether or not a list of modules says so."""
    src = with_plain(block_checkpoint(tmp_path / "src", KEPT_CODES[name]), DOWN)
    config, params = load_folder(src)
    assert config.plain_maps == ("layers.1.mlp.down",)
    assert params["layers.1.mlp.down.weight"].dtype == ml_dtypes.bfloat16
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    convert(src, tmp_path / "out", verify="shapes")
    assert_same(load_folder(src), load_folder(tmp_path / "out"))


def test_a_part_that_is_plain_has_its_neighbours_dequantised(tmp_path):
    src = with_plain(block_checkpoint(tmp_path / "src", KEPT_CODES["awq"]), V)
    words = r"src: model\.layers\.0\.self_attn\.q_proj, model\.layers\.0\.self_attn\.k_proj, stored in AWQ.* half a one"
    with pytest.warns(UserWarning, match=words):
        config, params = load_folder(src)
    assert config.plain_maps == ("layers.0.attention.qkv",)
    assert params["layers.1.attention.qkv.weight"].dtype == np.uint8
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])


@pytest.mark.parametrize("name", in_tiers(EXPERTS, test=["gptq", "nvfp4"]))
def test_experts_stay_as_they_are_stored(tmp_path, name):
    src, out = block_checkpoint(tmp_path / "src", KEPT_CODES[name], MIXTURE), tmp_path / "out"
    config, params = load_folder(src)
    assert params["layers.1.mlp.gate_up.weight"].dtype == (np.int8 if "8 bits" in name else np.uint8)
    convert(src, out, verify="shapes")
    assert_same((config, params), load_folder(out))
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


@pytest.mark.parametrize("name", in_tiers(DEQUANTISED_EXPERTS, test=["gptq in another order"]))
def test_other_experts_are_dequantised_with_a_warning(tmp_path, name):
    """While all other maps stay as they are stored."""
    src, out = block_checkpoint(tmp_path / "src", KEPT_CODES[name], MIXTURE), tmp_path / "out"
    with pytest.warns(UserWarning, match=r"model\.layers\.1\.mlp\.experts\.0\.gate_proj.* are dequantised as they are"):
        config, params = load_folder(src)
    assert params["layers.1.mlp.gate_up.weight"].dtype == ml_dtypes.bfloat16
    assert params["layers.1.attention.qkv.weight"].dtype == (np.int8 if "8 bits" in name else np.uint8)
    convert(src, out, verify="shapes")
    assert_same((config, params), load_folder(out))
    wide = load_folder(tmp_path / "src-wide")[1]
    of_experts = {
        n: wide[n].astype(ml_dtypes.bfloat16).astype(np.float32) for n in wide if n.startswith("layers.1.mlp.")
    }
    assert_stands_for(params, config, wide | of_experts)


@pytest.mark.parametrize("name", in_tiers(["packed channel", "nvfp4", "mxfp4"], test=["nvfp4", "mxfp4"]))
def test_an_output_head_may_be_stored_so(tmp_path, name):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES[name], head=True)
    config, params = load_folder(src)
    assert config.quantized_head
    assert params["head.weight"].dtype == np.uint8
    assert_stands_for(params, config, load_folder(tmp_path / "src-wide")[1])
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact
    convert(src, tmp_path / "out", draft_vocabulary=[3, 5], verify="shapes")
    _, some = load_draft(tmp_path / "out")
    for part in [part for part in params if part.startswith("head.")]:
        np.testing.assert_array_equal(some[part].view(np.uint8), params[part][[3, 5]].view(np.uint8))


def test_multi_token_prediction_layers(tmp_path):
    wide = with_layers(tmp_path / "wide", "Glm4MoeForCausalLM", intermediate_size=128)
    src, out = stored_as(tmp_path / "src", wide, KEPT_CODES["awq channel"]), tmp_path / "out"
    config, params = load_draft(src, mtp=True)
    assert config.layers.quantization == "int4_all_float16_zeros"
    assert params["layers.0.attention.qkv.weight"].dtype == np.uint8
    convert(src, out, verify="shapes")
    assert_same(load_folder(out), load_folder(src))
    assert_same(load_draft(out / "mtp"), (config, params))


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


def test_damaged_numbers_of_nvfp4_are_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["nvfp4"])
    scales, overall = (raw_tensor(src, DOWN + end).copy() for end in (".weight_scale", ".weight_global_scale"))
    for bits in (0x7F, 0xFF, 0x81):
        wrong = scales.copy()
        wrong.view(np.uint8)[-1, -1] = bits
        refuses(
            changed(src, **{f"{DOWN}.weight_scale": wrong}), f"'{DOWN}.weight_scale' holds numbers that are negative"
        )
    changed(src, **{f"{DOWN}.weight_scale": scales})
    for number in (0, np.nan, np.inf, -1):
        wrong = np.full_like(overall, number)
        refuses(changed(src, **{f"{DOWN}.weight_global_scale": wrong}), f"'{DOWN}.weight_global_scale' holds ")


SCALES = {"gptq": ".scales", "awq": ".scales", "packed channel": ".weight_scale", "packed zeros": ".weight_scale"}


@pytest.mark.parametrize(
    ("name", "number", "shown"),
    [
        *((name, np.nan, "nan") for name in SCALES),
        ("gptq", np.inf, "inf"),
        ("gptq", -np.inf, "-inf"),
        ("awq", 0, "0.0"),
    ],
)
def test_damaged_scales_are_refused(tmp_path, name, number, shown):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES[name])
    scales = raw_tensor(src, DOWN + SCALES[name]).copy()
    scales[-1, -1] = number
    refuses(
        changed(src, **{DOWN + SCALES[name]: scales}),
        f"tensor '{DOWN}{SCALES[name]}' holds {shown}: expected numbers other than 0",
    )
    refuses(changed(src, **{DOWN + SCALES[name]: scales[:-1]}), f"tensor '{DOWN}{SCALES[name]}' is ")
    refuses(changed(src, **{DOWN + SCALES[name]: None}), f"tensor '{DOWN}{SCALES[name]}' is missing, and ")


def test_other_zeros_beside_sym_are_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["gptq symmetric"])
    zeros = raw_tensor(src, f"{DOWN}.qzeros").copy()
    zeros[0, 0] += 1
    refuses(changed(src, **{f"{DOWN}.qzeros": zeros}), f"tensor '{DOWN}.qzeros' holds both 7 and 8")


def test_another_shape_is_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["packed zeros"])
    refuses(changed(src, **{f"{DOWN}.weight_shape": np.array([64, 64])}), f"'{DOWN}.weight_shape' holds [64, 64], but")


def test_a_list_that_contradicts_the_files_is_refused(tmp_path):
    src = block_checkpoint(tmp_path / "src", KEPT_CODES["awq"])
    rewrite(src, quantization_config={**KEPT_CODES["awq"].config, "modules_to_not_convert": ["lm_head", DOWN]})
    refuses(src, f"modules_to_not_convert says that '{DOWN}' is not quantised, but")


@pytest.mark.parametrize(
    ("place", "number", "words"), [(0, 0, "has a scale that is 0 or no number"), (1, 17, "has a zero that is no code")]
)
def test_damaged_numbers_of_a_converted_folder(tmp_path, monkeypatch, place, number, words):
    src, read = block_checkpoint(tmp_path / "src", KEPT_CODES["awq"]), CodeScales.read_part

    def damaged(tensor, index):
        found = read(tensor, index).copy()
        found[0, 0, place] = number
        return found

    monkeypatch.setattr(CodeScales, "read_part", damaged)
    convert(src, tmp_path / "out")
    with pytest.raises(Refusal, match=words):
        load_folder(tmp_path / "out")
