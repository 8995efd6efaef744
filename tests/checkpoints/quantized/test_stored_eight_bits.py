"""Checkpoints whose weights are FP8 or int8 already: read and converted as they are stored, or refused by name."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import tiny_heads
from fp8_checkpoints import (
    DOWN,
    FP8,
    KINDS,
    changed,
    compressed_tensors,
    fp8_checkpoint,
    names_in,
    raw_tensor,
    vllm_fp8,
)
from packed_weights import gptq_config
from stored_params import assert_same, logits
from tiny import tiny_config, write_weights

from convert import Refusal, convert, load_draft, load_folder
from convert.cli import main
from convert.verify import compare
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.config.model_fields import PLAIN_HEAD


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_files(tmp_path, kind):
    src = fp8_checkpoint(tmp_path / "src", quantization=KINDS[kind], scale_dtype=np.float32)
    _, params = load_folder(src)
    parts = [raw_tensor(src, f"model.layers.0.self_attn.{part}_proj.weight") for part in "qkv"]
    scales = [raw_tensor(src, f"model.layers.0.self_attn.{part}_proj.weight_scale").reshape(-1) for part in "qkv"]
    weight, scale = params["layers.0.attention.qkv.weight"], params["layers.0.attention.qkv.scale"]
    np.testing.assert_array_equal(weight.view(np.uint8), np.concatenate(parts).view(np.uint8))
    expected = [np.broadcast_to(one, len(part)) for one, part in zip(scales, parts, strict=True)]
    np.testing.assert_array_equal(scale, np.concatenate(expected))
    assert len(set(scale.tolist())) == (128 if kind in ("channel", "int8") else 3)


@pytest.mark.parametrize("ignore", [(), ("lm_head",), ("re:.*lm_head",)])
def test_a_tied_output_head_is_not(tmp_path, ignore):
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors(ignore=ignore), tie_word_embeddings=True)
    config, params = load_folder(src)
    assert config.head_quantization is None
    assert params["embedding"].dtype == ml_dtypes.bfloat16
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


def test_scales_of_activations_are_left_out(tmp_path, capsys):
    src = fp8_checkpoint(tmp_path / "src", quantization=compressed_tensors("tensor", kv_cache_scheme={"num_bits": 8}))
    attention = "model__layers__0__self_attn"
    one = np.ones(1, np.float32)
    changed(
        src, **{f"{attention}__q_proj__input_scale": one, f"{attention}__k_scale": one, f"{attention}__v_scale": one}
    )
    assert main([str(src), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "note: no parameters of the model: 3 scales of activations or of the cache" in printed
    for name, end in (
        ("weight", "qkv.weight[64:96]  [32, 64]  float8_e4m3fn -> float8_e4m3fn"),
        ("weight_scale", "qkv.scale[64:96]  [32]  bfloat16 -> float32"),
    ):
        [line] = [line for line in printed.splitlines() if line.startswith(f"model.layers.0.self_attn.k_proj.{name} ")]
        assert line.endswith(end)
    assert printed.splitlines()[-1].startswith("35 tensors -> 15 params and 8 scales, 74,176 parameters, bfloat16")
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "re:.*mlp.gate$"],
        ["re:.*lm_head", "model.layers.1.mlp.gate"],
        ["lm_head", r"re:^.*\.mlp\.(gate|shared_expert_gate)$", "re:visual.*", "re:.*layers\\.[0-9]+\\.mlp\\.gate$"],
    ],
)
def test_routers_may_be_ignored(tmp_path, ignore):
    src = fp8_checkpoint(tmp_path / "src", "Qwen3MoeForCausalLM", quantization=compressed_tensors(ignore=ignore))
    assert load_folder(src)[1]["layers.1.mlp.router.weight"].dtype == ml_dtypes.bfloat16


PLAIN = {  # what is not quantised, by quantization_config; and the maps that are not
    "a map": (compressed_tensors(ignore=["lm_head", DOWN]), re.escape(DOWN)),
    "a map, by a method": (vllm_fp8(["lm_head", DOWN]), re.escape(DOWN)),
    "a map, of int8": (
        compressed_tensors(format="int-quantized", weights__type="int", ignore=["lm_head", DOWN]),
        re.escape(DOWN),
    ),
    "a kind of map": (compressed_tensors(ignore=["lm_head", "re:.*self_attn.*"]), r".*self_attn\..*_proj"),
    "all but a kind": (compressed_tensors(group__targets=["re:.*down_proj$"]), r".*(?<!down)_proj"),
    "a layer, a scale for each weight": (
        compressed_tensors("tensor", ignore=["lm_head", "re:.*layers.0.*"]),
        r".*layers\.0\..*_proj",
    ),
}


@pytest.mark.parametrize("what", PLAIN)
def test_maps_that_are_plain_beside_others_that_are_kept(tmp_path, what):
    quantization, plain = PLAIN[what]
    src = fp8_checkpoint(tmp_path / "src", quantization=quantization)
    changes = {}
    for name in names_in(src):
        if re.fullmatch(f"{plain}\\.weight", name):
            wide = raw_tensor(src, name).astype(np.float32) * raw_tensor(src, f"{name}_scale").astype(
                np.float32
            ).reshape(-1, 1)
            changes |= {name: wide, f"{name}_scale": None}
    assert changes
    changed(src, **changes)
    config, params = load_folder(src)
    assert config == Checkpoint.open(src).target_config
    assert config.quantization == ("int8" if "int8" in what else "fp8")
    layers = [name.removeprefix("model.").split(".")[1] for name in changes if name.endswith(".weight")]
    plain = [name for name, form in config.other_formats if form is None and name != "head"]
    assert {name.split(".")[1] for name in plain} == set(layers)
    assert {params[f"{name}.weight"].dtype.itemsize for name in plain} == {2}
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact
    convert(src, tmp_path / "out", verify="shapes")
    again, kept = load_folder(tmp_path / "out")
    assert config == again
    assert all(np.array_equal(array.view(np.uint8), kept[name].view(np.uint8)) for name, array in params.items())


def test_the_text_model_of_a_multimodal_one(tmp_path):
    """Its modules have other names there, by which ``ignore`` may mean them."""
    text = {**tiny_config("Gemma3ForCausalLM"), "architectures": None}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    for ignore, kept in (
        (["language_model.lm_head", "re:vision_tower.*"], "fp8"),
        (["re:.*lm_head", "re:language_model.model.layers.0.*"], None),
        (["model.language_model.layers.1.mlp.up_proj"], None),
    ):
        quantization = compressed_tensors(ignore=ignore)
        (tmp_path / "config.json").write_text(json.dumps({**outer, "quantization_config": quantization}))
        assert read_config(Folder(tmp_path)).quantization == kept


def test_the_weights_of_a_multimodal_one(tmp_path):
    src = fp8_checkpoint(tmp_path / "src", "Gemma3ForCausalLM")
    tensors = {f"language_model.{name}": raw_tensor(src, name) for name in names_in(src)}
    vision = {
        "vision_tower.fc1.weight": np.ones((3, 3), FP8),
        "vision_tower.fc1.weight_scale": np.ones((3, 1), np.float32),
    }
    write_weights(src, {**tensors, **vision})
    text = json.loads((src / "config.json").read_text())
    outer = {"quantization_config": text.pop("quantization_config"), "text_config": {**text, "architectures": None}}
    outer["architectures"] = ["Gemma3ForConditionalGeneration"]
    (src / "config.json").write_text(json.dumps(outer))
    assert compare(logits(tmp_path / "src-wide"), logits(src)).exact
    notes = convert(src, tmp_path / "out").notes
    assert "2 tensors of other parts than the text model were left out" in notes
    assert "the fp8 weights and their scales are kept as they are stored" in notes
    wanted, own = load_folder(src), outer.pop("quantization_config")

    def within(said):
        """What stands in ``text_config`` counts unless something stands outside, as in transformers."""
        changed = {**outer, "text_config": {**outer["text_config"], "compression_config": said}}
        (src / "config.json").write_text(json.dumps(changed))
        return changed

    within(own)
    assert_same(load_folder(src), wanted)
    outside = {**within(gptq_config(bits=3)), "quantization_config": own}
    with pytest.raises(Refusal, match=r"text_config\.compression_config\.bits=3: expected 4 or 8"):
        load_folder(src)
    (src / "config.json").write_text(json.dumps(outside))
    assert_same(load_folder(src), wanted)
    within({**own, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert Checkpoint.open(src).cache_scheme is not None


def test_the_scales_of_ministral_3(tmp_path):
    """They have the name that transformers has for them, where those of blocks have it too, and the weights are in a
    multimodal checkpoint whose activations have fixed scales."""
    src = fp8_checkpoint(tmp_path / "src", "Ministral3ForCausalLM", quantization=vllm_fp8())
    expected, tensors = load_folder(src), {}
    for name in names_in(src):
        module, end = name.removesuffix(".weight_scale"), ".weight_scale"
        outer = f"language_model.{module}"
        if name.endswith(end):
            tensors[f"{outer}.activation_scale"] = np.ones((), np.float32)
            tensors[f"{outer}.weight_scale_inv"] = raw_tensor(src, name).reshape(())
        else:
            tensors[outer] = raw_tensor(src, name)
    write_weights(src, tensors)
    text = {**json.loads((src / "config.json").read_text()), "model_type": "ministral3"}
    own = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    own["modules_to_not_convert"] = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "quantization_config": own, "text_config": text}
    del text["quantization_config"], text["architectures"]
    (src / "config.json").write_text(json.dumps(outer))
    config, params = load_folder(src)
    assert config == expected[0]
    assert all(np.array_equal(params[name], array) for name, array in expected[1].items())


def test_a_draft_model(tmp_path):
    """A PARD model, of which jspec stores the config in the manifest."""
    src = fp8_checkpoint(tmp_path / "src", pard_token=tiny_heads.MASK)
    convert(src, tmp_path / "out", verify="shapes")
    (config, params), (again, kept) = load_draft(src), load_draft(tmp_path / "out")
    assert config == again
    assert (config.decoder.quantization, config.decoder.other_formats) == ("fp8", PLAIN_HEAD)
    assert params.keys() == kept.keys()


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_stored_fp8_is_not_quantised_again(tmp_path, capsys, quantize, more):
    src = fp8_checkpoint(tmp_path / "src")
    assert main([str(src), str(tmp_path / "out"), "--quantize", quantize, *more]) == 2
    words = f"quantize='{quantize}': expected None, because its weights are fp8 already (quantization_config)"
    assert words in capsys.readouterr().err


def test_transformers_computes_something_else(tmp_path):
    with pytest.raises(
        Refusal, match="which rounds activations to eight bits where it reads quantised weights; ask for"
    ):
        convert(fp8_checkpoint(tmp_path / "src"), tmp_path / "out", verify="logits")


@pytest.mark.parametrize(
    "more", [{}, {"weight_block_size": None}, {"fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}]
)
def test_other_spellings_of_fp8_are_read(tmp_path, more):
    src = fp8_checkpoint(tmp_path / "src", quantization=vllm_fp8(**more))
    assert Checkpoint.open(src).target_config.head_quantization is None


def test_the_former_key(tmp_path):
    quantization = compressed_tensors()
    src = fp8_checkpoint(tmp_path / "src", quantization=quantization)
    config = json.loads((src / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (src / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(src).target_config.quantization == "fp8"


def of_model_optimizer(src, algorithm="FP8", beside=False):
    """A checkpoint of vLLM's method ``fp8``, described as NVIDIA Model Optimizer does it, in config.json or beside it."""
    config = json.loads((src / "config.json").read_text())
    described = {"quant_algo": algorithm, "exclude_modules": ["lm_head*", "model.vision*"], "kv_cache_quant_algo": None}
    config["quantization_config"] = None if beside else {"quant_method": "modelopt", **described}
    (src / "config.json").write_text(json.dumps(config))
    if beside:
        written = {"producer": {"name": "modelopt"}, "quantization": described}
        (src / "hf_quant_config.json").write_text(json.dumps(written))
    return src


@pytest.mark.parametrize("beside", [False, True])
def test_weights_of_model_optimizer_are_kept(tmp_path, beside):
    src = fp8_checkpoint(tmp_path / "src", quantization=vllm_fp8())
    config, params = load_folder(src)
    found, kept = load_folder(of_model_optimizer(src, beside=beside))
    assert found == config
    assert config.quantization == "fp8"
    assert kept.keys() == params.keys()
    assert all(np.array_equal(kept[name].view(np.uint8), array.view(np.uint8)) for name, array in params.items())


def test_two_files_that_name_different_algorithms_are_refused(tmp_path):
    src = of_model_optimizer(fp8_checkpoint(tmp_path / "src", quantization=vllm_fp8()), beside=True)
    config = json.loads((src / "config.json").read_text())
    for own in ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, vllm_fp8()):
        (src / "config.json").write_text(json.dumps({**config, "quantization_config": own}))
        with pytest.raises(
            Refusal, match=r"hf_quant_config\.json: quantization\.quant_algo='FP8': expected what quant"
        ):
            read_config(Folder(src))
