"""Checkpoints with a scale for each block of a weight: dequantised exactly while they are read, with a warning."""

import functools
import json

import ml_dtypes
import numpy as np
import pytest
import tiny_heads
from block_checkpoints import KINDS, Kind, block_checkpoint, stored_as
from mtp_checkpoints import with_layers
from packed_weights import fp8, fp8_config, pack_config, pack_quantized
from safetensors.numpy import load_file
from stored_params import assert_same, with_values_apart
from tiny import SMALL, tiny_config, write_weights

import jspec
from convert import Refusal, convert, load_draft, load_folder
from convert.cli import main
from convert.folders import read_draft_config
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.tensor import NUMPY_DTYPES
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.quantized.packed_codes import unpacked
from jspec.checkpoints.quantized.scaled import ScaledWeight
from jspec.models.quantization import quantize
from jspec.quantization.formats import known_format

LLAMA, MIXTURE, DEEPSEEK = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"


def warned(path, dtype="float32", kind="dequantised as they are read"):
    """``load_folder``, which has to warn."""
    with pytest.warns(UserWarning, match=kind):
        return load_folder(path, dtype)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("architecture", [LLAMA, MIXTURE])
def test_logits_are_those_of_dequantised_weights(tmp_path, name, architecture):
    src = block_checkpoint(tmp_path / "src", KINDS[name], architecture, shards=2)
    with pytest.warns(UserWarning, match="in bfloat16 they take two bytes each instead of") as found:
        loaded = load_folder(src)
    [warning] = found
    assert str(warning.message).startswith(f"{src}: the weights are stored in ")
    assert KINDS[name].words in str(warning.message)
    assert loaded[0].quantization is None
    assert loaded[0] == Checkpoint.open(src).target_config == read_draft_config(src)
    for dtype in NUMPY_DTYPES:
        assert_same(warned(src, dtype), load_folder(tmp_path / "src-wide", dtype))
    assert_same(loaded, load_folder(tmp_path / "src-wide", "bfloat16"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("architecture", [LLAMA, MIXTURE])
def test_a_converted_folder_holds_the_same(tmp_path, name, architecture):
    src, out = block_checkpoint(tmp_path / "src", KINDS[name], architecture), tmp_path / "out"
    report = convert(src, out, dtype="bfloat16", verify="shapes")
    assert any(KINDS[name].words in note for note in report.notes)
    assert "weights are rounded to bfloat16" in report.notes
    assert_same(load_folder(out), load_folder(tmp_path / "src-wide", "bfloat16"))


def test_dequantised_weights_are_rounded_unless_float32_is_asked_for(tmp_path):
    src, wide = block_checkpoint(tmp_path / "src", KINDS["awq"]), tmp_path / "src-wide"
    report = convert(src, tmp_path / "rounded")
    words = "dequantised weights are rounded to bfloat16; --dtype float32 keeps them exactly, in twice the bytes"
    assert report.dtype == "bfloat16"
    assert words in report.notes
    assert_same(load_folder(tmp_path / "rounded"), load_folder(wide, "bfloat16"))
    assert convert(src, tmp_path / "exact", dtype="float32").dtype == "float32"
    assert_same(load_folder(tmp_path / "exact"), load_folder(wide, "float32"))


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("name", ["fp8", "gptq", "packed"])
def test_dequantised_weights_may_be_quantised_again(tmp_path, name, kind):
    """From the numbers that they stand for, in float32."""
    src, out = block_checkpoint(tmp_path / "src", KINDS[name], MIXTURE), tmp_path / "out"
    report = convert(src, out, quantize=kind, dtype="bfloat16", verify="shapes")
    config, params = load_folder(out)
    assert report.quantization == config.formats
    wide = with_values_apart(load_folder(tmp_path / "src-wide")[1], config)
    assert config.quantization == kind
    stored = config.stored_params()
    assert params["layers.1.mlp.down.weight"].dtype == known_format(kind).numbers
    for part in ("attention.qkv", "mlp.gate_up"):
        expected = quantize(wide[f"layers.1.{part}.weight"], stored[f"layers.1.{part}.weight"].form.name)
        for end, array in zip(("weight", "scale"), expected, strict=True):
            np.testing.assert_array_equal(params[f"layers.1.{part}.{end}"].view(np.uint8), array.view(np.uint8))


@pytest.mark.parametrize("name", KINDS)
def test_an_output_head_may_be_stored_so(tmp_path, name):
    rows = {"vocab_size": 96}  # codes of eight output channels are in one number
    src = block_checkpoint(tmp_path / "src", KINDS[name], head=True, **rows)
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


@pytest.mark.parametrize(
    "architecture",
    ["Phi3ForCausalLM", "OPTForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "MiniMaxM2ForCausalLM"],
)
@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_other_families(tmp_path, architecture, name):
    src = block_checkpoint(tmp_path / "src", KINDS[name], architecture)
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


def test_names_without_a_prefix(tmp_path):
    src = block_checkpoint(tmp_path / "src", KINDS["gptq"], "OPTForCausalLM")
    write_weights(src, {name.removeprefix("model."): array for name, array in stored(src).items()})
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


def test_widths_that_eight_does_not_divide(tmp_path):
    kind = Kind(pack_config(group_size=4, symmetric=False), lambda weight: pack_quantized(weight, 4, False), "")
    src = block_checkpoint(tmp_path / "src", kind, intermediate_size=100)
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


def test_a_draft_model(tmp_path):
    """A PARD model, of which jspec stores the config in the manifest."""
    src = block_checkpoint(tmp_path / "src", KINDS["gptq"], pard_token=tiny_heads.MASK)
    convert(src, tmp_path / "out", verify="shapes")
    with pytest.warns(UserWarning, match="GPTQ"):
        loaded = load_draft(src)
    assert_same(loaded, load_draft(tmp_path / "out"))


def test_the_text_model_of_a_multimodal_one(tmp_path):
    """The other parts are left out, however they are stored."""
    src = block_checkpoint(tmp_path / "src", KINDS["awq"], "Gemma3ForCausalLM")
    tensors = {f"language_model.{name}": array for name, array in stored(src).items()}
    write_weights(src, {**tensors, "vision_tower.fc1.qweight": np.ones((3, 3), np.int32)})
    text = json.loads((src / "config.json").read_text())
    outer = {"quantization_config": text.pop("quantization_config"), "text_config": {**text, "architectures": None}}
    outer["architectures"] = ["Gemma3ForConditionalGeneration"]
    (src / "config.json").write_text(json.dumps(outer))
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


@pytest.mark.parametrize("name", KINDS)
def test_rearranged_tensors_are_dequantised(tmp_path, name):
    """Those of DeepSeek's attention and shared experts are, after they were dequantised."""
    src = block_checkpoint(tmp_path / "src", KINDS[name], DEEPSEEK)
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


@pytest.mark.parametrize("name", ["fp8", "gptq", "awq"])
@pytest.mark.parametrize("architecture", [DEEPSEEK, "Glm4MoeLiteForCausalLM", "Glm4MoeForCausalLM"])
def test_multi_token_prediction_layers(tmp_path, name, architecture):
    wide = with_layers(tmp_path / "wide", architecture)
    src, out = stored_as(tmp_path / "src", wide, KINDS[name]), tmp_path / "out"
    assert_same(warned(src), load_folder(wide, "float32"))
    with pytest.warns(UserWarning, match="dequantised"):
        drafts = load_draft(src, "float32", mtp=True)
    assert_same(drafts, load_draft(wide, "float32", mtp=True))
    report = convert(src, out, "float32", verify="shapes")
    assert "multi-token prediction layers are kept in mtp/" in report.notes
    assert_same(load_folder(out), load_folder(wide, "float32"))
    assert_same(load_draft(out / "mtp"), drafts)


def test_multi_token_prediction_layers_with_a_draft_vocabulary(tmp_path):
    """Its rows are those of the model: float32 in one conversion, quantised from the same numbers in another."""
    wide, ids = with_layers(tmp_path / "wide", DEEPSEEK), [3, 5]
    src, rows = stored_as(tmp_path / "src", wide, KINDS["fp8"]), load_folder(wide)[1]["head.weight"][ids]
    convert(src, tmp_path / "out", "float32", mtp=True, draft_vocabulary=ids, verify="shapes")
    assert_same(load_folder(tmp_path / "out"), load_folder(wide, "float32"))
    assert np.array_equal(load_draft(tmp_path / "out" / "mtp")[1]["head.weight"], rows)
    convert(src, tmp_path / "int8", mtp=True, draft_vocabulary=ids, quantize="int8", verify="shapes")
    model, layers = (load_draft(tmp_path / path)[1] for path in ("int8", "int8/mtp"))
    for name in ("head.weight", "head.scale"):
        assert np.array_equal(layers[name], model[name][ids])


def test_multi_token_prediction_layers_that_are_not_quantised(tmp_path):
    """Nothing is dequantised of them, so that there is no warning."""
    wide = with_layers(tmp_path / "wide", DEEPSEEK)
    layer = f"model.layers.{load_folder(wide)[0].num_layers}."
    plain = {name: array for name, array in stored(wide).items() if name.startswith(layer)}
    src = stored_as(tmp_path / "src", wide, KINDS["gptq"])
    others = {name: array for name, array in stored(src).items() if not name.startswith(layer)}
    write_weights(src, others | plain)
    write_weights(wide, stored(wide) | plain)
    assert_same(load_draft(src, mtp=True), load_draft(wide, mtp=True))


def test_a_dequantised_model_generates(tmp_path):
    src = block_checkpoint(tmp_path / "src", KINDS["gptq order"])
    with pytest.warns(UserWarning, match="GPTQ, four bits") as warnings:
        llm = jspec.load(src, **SMALL)
    assert warnings[0].filename == __file__
    found, wanted = (one.logits([3, 4, 5, 6]) for one in (llm, jspec.load(tmp_path / "src-wide", **SMALL)))
    np.testing.assert_array_equal(found, wanted)


def test_scales_of_activations_are_left_out(tmp_path, capsys):
    src = block_checkpoint(tmp_path / "src", KINDS["fp8"])
    scale = {"model.layers.0.mlp.down_proj.input_scale": np.ones(1, np.float32)}
    with_raw(src, scale)
    assert main([str(src), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert (
        "note: the weights are stored in FP8 with a scale for each block of 40 x 24, for which there is no" in printed
    )
    assert "note: no parameters of the model: 1 scale of activations or of the cache" in printed


@pytest.mark.parametrize("number", [0, 1])
def test_biases_that_are_zero_are_left_out(tmp_path, number):
    """AutoGPTQ once wrote one for each linear map."""
    src = block_checkpoint(tmp_path / "src", KINDS["gptq"])
    bias = np.full(64, number, np.float16)
    write_weights(src, {**stored(src), "model.layers.0.self_attn.q_proj.bias": bias})
    if number:
        with pytest.raises(
            Refusal, match=r"q_proj\.bias' is a bias other than 0, for which the model has no place; is att"
        ):
            load_folder(src)
        return
    assert_same(warned(src), load_folder(tmp_path / "src-wide", "float32"))


@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_transformers_computes_something_else(tmp_path, name):
    with pytest.raises(
        Refusal, match="which computes in fewer bits with weights that are stored quantised; ask for sh"
    ):
        convert(block_checkpoint(tmp_path / "src", KINDS[name]), tmp_path / "out", verify="logits")


@pytest.mark.parametrize("name", KINDS)
def test_experts_in_one_tensor_are_not_read(tmp_path, name):
    config = {**tiny_config("GptOssForCausalLM"), "quantization_config": KINDS[name].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match="which is not read of GptOssForCausalLM, whose experts are in one tensor"):
        read_config(Folder(tmp_path))


def stored(folder) -> dict[str, np.ndarray]:
    """The tensors of model.safetensors, none of which is FP8."""
    return load_file(folder / "model.safetensors")


def with_raw(folder, tensors):
    """Add ``tensors`` to a checkpoint in a second file."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write_weights(folder, tensors)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    names = dict.fromkeys(open_names(folder), "model-00001-of-00002.safetensors")
    index = {"weight_map": names | dict.fromkeys(tensors, "model-00002-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def open_names(folder) -> list[str]:
    """Names of the tensors in the first of two files, from its header."""
    data = (folder / "model-00001-of-00002.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


ANY = np.random.default_rng(3).integers(-(2**31), 2**31, (6, 5), dtype=np.int32)


@pytest.mark.parametrize(("bits", "order"), [(4, None), (4, (0, 2, 4, 6, 1, 3, 5, 7)), (8, None)])
def test_every_code_of_every_number(bits, order):
    """Negative numbers too, bit by bit."""
    rows, columns = unpacked(ANY, 0, bits, order), unpacked(ANY, 1, bits, order)
    n = 32 // bits
    assert rows.shape == (6 * n, 5)
    assert columns.shape == (6, 5 * n)
    for i, j in np.ndindex(ANY.shape):
        word = f"{int(ANY[i, j]) % 2**32:032b}"
        for number, place in enumerate(order or range(n)):
            code = int(word[32 - bits * (number + 1) : 32 - bits * number], 2)
            assert rows[n * i + place, j] == columns[i, n * j + place] == code


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_packed_as_compressed_tensors_packs_them(bits):
    torch, helpers = map(pytest.importorskip, ("torch", "compressed_tensors.compressors.pack_quantized.helpers"))
    middle = 1 << (bits - 1)
    numbers = np.random.default_rng(0).integers(-middle, middle, (6, 19))
    for axis in (0, 1):
        theirs = helpers.pack_to_int32(torch.from_numpy(numbers.astype(np.int8)), bits, packed_dim=axis).numpy()
        codes = unpacked(theirs, axis, bits).astype(int)
        np.testing.assert_array_equal(codes[:6, :19] - middle, numbers)


def test_fp8_is_that_of_transformers(tmp_path):
    """In blocks that divide every weight, because transformers takes no others."""
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    kind = Kind(fp8_config(weight_block_size=[16, 32]), functools.partial(fp8, block=(16, 32)), "")
    source, dequantize = Checkpoint.open(block_checkpoint(tmp_path / "src", kind)).hugging_face, Fp8Dequantize(None)
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        weight = source.tensors[name]
        assert isinstance(weight, ScaledWeight)
        numbers = torch.from_numpy(weight.numbers.read().view(np.uint8)).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(weight.scales.read())
        wanted = dequantize._dequantize_one(numbers, scales, torch.float32).numpy()
        np.testing.assert_array_equal(weight.read().view(np.uint32), wanted.view(np.uint32))
        wanted = dequantize._dequantize_one(numbers, scales, torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(weight.read().astype(ml_dtypes.bfloat16).view(np.uint16), wanted)


def test_one_in_each_zero_borrows_as_it_was_written(tmp_path):
    """The first version of GPTQ subtracts from whole numbers, so that zeros 0 and 5 are stored as 15 and 3."""
    src = block_checkpoint(tmp_path / "src", KINDS["gptq"])
    tensors = stored(src)
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qzeros"] = np.full_like(tensors[f"{name}.qzeros"], 0x05050505 - 0x11111111)
    tensors[f"{name}.qweight"] = np.zeros_like(tensors[f"{name}.qweight"])
    tensors[f"{name}.scales"] = np.ones_like(tensors[f"{name}.scales"])
    write_weights(src, tensors)
    _, params = warned(src)
    up = params["layers.0.mlp.gate_up.weight"][96:]
    np.testing.assert_array_equal(-up[:8, 0], [5, 0, 5, 0, 5, 0, 5, 0])
