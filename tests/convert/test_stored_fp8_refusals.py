"""Quantised checkpoints that are refused: other methods, contradictions and damage, each by name."""

import json

import ml_dtypes
import numpy as np
import pytest
from fp8_checkpoints import (
    DOWN,
    FP8,
    GPT_OSS,
    KINDS,
    LINEAR,
    Q,
    changed,
    compressed_tensors,
    fp8_checkpoint,
    stored_in,
    vllm_fp8,
)
from tiny import tiny_checkpoint, tiny_config

from convert import Refusal, load_draft, load_folder
from convert.cli import main
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.quantized.config import READERS

UNREAD = ["bitsandbytes", "mxfp4", "torchao", "quark", "hqq", "eetq", "aqlm", "fbgemm_fp8", "gguf"]


@pytest.mark.parametrize("method", UNREAD)
def test_unsupported_methods_are_refused(tmp_path, refused, method):
    assert method not in READERS
    src = tiny_checkpoint(tmp_path / "src")
    config = {**tiny_config(), "quantization_config": {"quant_method": method, "bits": 4}}
    (src / "config.json").write_text(json.dumps(config))
    refused(
        src,
        f"src/config.json: quantization_config.quant_method='{method}' is not read",
        "use the original bfloat16 checkpoint, with jspec-convert --quantize int8 or fp8",
    )
    for load in (load_folder, load_draft, lambda src: Checkpoint.open(src).target_config):
        with pytest.raises(Refusal, match=f"quant_method='{method}' is not read"):
            load(src)


GROUP = compressed_tensors()["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        *(
            (compressed_tensors(format=name), f".format='{name}': expected 'float-quantized' or 'int-quantized' or ")
            for name in ("mixed-precision", "marlin-24")
        ),
        (
            compressed_tensors(format=None),
            "quantization_config.format=None: expected 'float-quantized' or 'int-quantized' or 'naive-quantized' or",
        ),
        (
            compressed_tensors(group__format="int-quantized"),
            "group_0.format='int-quantized': expected 'float-quantized'",
        ),
        (compressed_tensors(weights__num_bits=4), "config_groups.group_0.weights.num_bits=4: expected 8; of quantised"),
        (compressed_tensors(weights__type="int"), "config_groups.group_0.weights.type='int': expected 'float'"),
        (compressed_tensors(format="int-quantized"), "config_groups.group_0.weights.type='float': expected 'int'"),
        (
            compressed_tensors("block", format="int-quantized", weights__type="int"),
            "group_0.weights.strategy='block': expected 'channel' or 'tensor'",
        ),
        (compressed_tensors(weights__symmetric=False), "group_0.weights.symmetric=False: expected True"),
        (compressed_tensors(weights__dynamic=True), "group_0.weights.dynamic=True: expected False"),
        (compressed_tensors("block"), "group_0.weights.block_structure=None: expected two integers in 1..1048576, the"),
        (
            compressed_tensors("group"),
            "group_0.weights.strategy='group': expected 'channel' or 'tensor' or 'block'; of",
        ),
        (compressed_tensors(group__weights=None), "config_groups.group_0={'weights': None"),
        (compressed_tensors(config_groups={}), "quantization_config.config_groups={}: expected one group, of all"),
        (compressed_tensors(config_groups={"a": GROUP, "b": GROUP}), "expected one group, of all linear maps"),
        (compressed_tensors(config_groups=[1]), "quantization_config.config_groups=[1]: expected an object or null"),
        (compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config={'format': 'sparse-24"),
        (compressed_tensors(transform_config={"config_groups": {"R1": {}}}), "neither sparse nor rotated weights are"),
        (
            {**compressed_tensors(), "ignore": "lm_head"},
            "quantization_config.ignore='lm_head': expected a list of module names",
        ),
        (compressed_tensors(ignore=[3]), "quantization_config.ignore=[3]: expected a list of module names"),
        (
            compressed_tensors(ignore=["re:a+b"] * 21),
            "expected at most 20 patterns, and 1000 that end with their only .*; l",
        ),
        (compressed_tensors(ignore=["re:a.*"] * 1001), "1000 that end with their only .*; list the names of modules"),
        *(
            (
                compressed_tensors(ignore=[f"re:{pattern}"]),
                f"quantization_config.ignore has the pattern {pattern[:80]!r}",
            )
            for pattern in (
                "(a|b)+c",
                "(a|b)(a|b)(a|b)(a|b)",
                "(?!x).*",
                ".*.*.*.*",
                "((a))",
                "a{9}",
                "[b-a]",
                "a" * 101,
            )
        ),
        (vllm_fp8(fmt="e5m2"), "quantization_config.fmt='e5m2': expected 'e4m3'"),
        ({"bits": 4}, "quantization_config.quant_method='unnamed' is not read"),
        ({"load_in_4bit": True}, "quantization_config.quant_method='bitsandbytes' is not read"),
        (compressed_tensors("tensor_group", format="nvfp4-pack-quantized"), "group_0.weights.num_bits=8: expected 4;"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
            "quant_algo='W4A8_AWQ', of NVIDIA Model Optimizer, is",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32: expected 16;"),
        ({"quant_method": 3}, "quantization_config.quant_method=3: expected a string"),
        ([1], "quantization_config=[1]: expected an object or null"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path, quantization, words):
    (tmp_path / "config.json").write_text(json.dumps({**tiny_config(), "quantization_config": quantization}))
    with pytest.raises(Refusal) as refusal:
        read_config(Folder(tmp_path))
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(f"{tmp_path}/config.json: quantization_config")


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_one_tensor_are_not_read(tmp_path, kind):
    config = {**tiny_config(GPT_OSS), "quantization_config": KINDS[kind]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        Refusal, match=f"are {stored_in(kind)}, which is not read of GptOssForCausalLM, whose experts are in one tensor"
    ):
        read_config(Folder(tmp_path))


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "MIXED_PRECISION", "W4A16_AWQ"])
def test_checkpoints_of_model_optimizer(tmp_path, refused, algorithm):
    src = tiny_checkpoint(tmp_path / "src")
    described = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None},
    }
    (src / "hf_quant_config.json").write_text(json.dumps(described))
    refused(
        src, f"src/hf_quant_config.json: quantization.quant_algo='{algorithm}', of NVIDIA Model Optimizer", "--quantize"
    )


def test_a_cache_of_model_optimizer_changes_no_weight(tmp_path):
    src = tiny_checkpoint(tmp_path / "src")
    described = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (src / "hf_quant_config.json").write_text(json.dumps(described))
    assert Checkpoint.open(src).target_config.quantization is None


@pytest.mark.parametrize(
    ("described", "names"),
    [
        ({"quant_method": "compressed-tensors", "format": "dense"}, ["k_scale", "v_scale"]),
        ({"quant_method": "modelopt"}, ["k_proj__k_scale", "v_proj__v_scale"]),
    ],
)
def test_a_checkpoint_whose_cache_alone_is_quantised(tmp_path, capsys, described, names):
    src = tiny_checkpoint(tmp_path / "src", quantization_config={**described, "kv_cache_scheme": {"num_bits": 8}})
    plain = tiny_checkpoint(tmp_path / "plain")
    changed(src, **{f"model__layers__0__self_attn__{name}": np.ones(1, np.float32) for name in names})
    assert main([str(src), "--dry-run"]) == 0
    assert "note: no parameters of the model: 2 scales of the cache" in capsys.readouterr().out
    (config, params), (expected, _) = load_folder(src), load_folder(plain)
    assert config == expected
    assert config.quantization is None
    assert not any("scale" in name for name in params)


@pytest.mark.parametrize("has_config", [False, True])
def test_a_folder_of_gguf(tmp_path, refused, has_config):
    src = tmp_path / "src"
    src.mkdir()
    (src / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    if has_config:
        (src / "config.json").write_text(json.dumps(tiny_config()))
    refused(
        src, "src/model-Q4_K_M.gguf: GGUF files, which are llama.cpp's, are not read", "config.json and safetensors"
    )


def test_a_gguf_file(tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    (src / "model.GGUF").write_bytes(b"GGUF")
    assert main([str(src / "model.GGUF"), str(tmp_path / "out")]) == 2
    with pytest.raises(Refusal, match=r"model\.GGUF: GGUF files"):
        load_folder(src / "model.GGUF")


SCALE = f"{DOWN}.weight_scale".replace(".", "__")
WEIGHT = f"{DOWN}.weight".replace(".", "__")
COLUMN = np.ones((64, 1), np.float32)


def with_number(number: float) -> np.ndarray:
    scales = COLUMN.copy()
    scales[7] = number
    return scales


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("channel", {SCALE: None}, f"tensor '{DOWN}.weight_scale' is missing, and LlamaForCausalLM needs it"),
        (
            "channel",
            {SCALE: COLUMN[:63]},
            f"'{DOWN}.weight_scale' has shape [63, 1]: expected [64, 1], a scale for each",
        ),
        (
            "channel",
            {SCALE: COLUMN.reshape(1, 64)},
            "has shape [1, 64]: expected [64, 1], a scale for each output channel",
        ),
        ("channel", {SCALE: COLUMN[:1]}, "has shape [1, 1]: expected [64, 1], a scale for each output channel"),
        ("tensor", {SCALE: COLUMN}, "has shape [64, 1]: expected [1], a scale for each weight"),
        ("fp8", {SCALE: COLUMN[:2, 0]}, "has shape [2]: expected [1], a scale for each weight"),
        *(
            ("channel", {SCALE: with_number(number)}, f"'{DOWN}.weight_scale' holds {shown}: expected positive numbers")
            for number, shown in ((np.nan, "nan"), (np.inf, "inf"), (0, "0.0"), (-1, "-1.0"))
        ),
        ("tensor", {SCALE: np.zeros(1, np.float32)}, "holds 0.0: expected positive numbers"),
        (
            "channel",
            {SCALE: np.ones((64, 1), np.int32)},
            f"'{DOWN}.weight_scale' is stored as int32, but LlamaForCausalLM, quantised as quantization_config says, needs "
            "one of float32, bfloat16, float16",
        ),
        (
            "channel",
            {WEIGHT: np.ones((64, 96), ml_dtypes.bfloat16)},
            f"'{DOWN}.weight' is stored as bfloat16, but LlamaForCausalLM, quantised as quantization_config says, needs "
            "float8_e4m3fn",
        ),
        (
            "channel",
            {WEIGHT: np.ones((64, 96), np.float32), SCALE: None},
            "is stored as float32, but LlamaForCausalLM, ",
        ),
        ("channel", {WEIGHT: np.ones((64, 96), ml_dtypes.float8_e5m2)}, f"'{DOWN}.weight' is stored as F8_E5M2; only"),
        ("channel", {WEIGHT: np.ones((64, 95), FP8)}, f"'{DOWN}.weight' has shape [64, 95], but config.json asks for"),
        (
            "channel",
            {"lm_head__weight": np.ones((97, 64), FP8), "lm_head__weight_scale": np.ones((97, 1), np.float32)},
            "'lm_head.weight' is stored as float8_e4m3fn, but LlamaForCausalLM, quantised as quantization_config says, "
            "needs one of float32, bfloat16, float16",
        ),
        ("channel", {"lm_head__weight_scale": np.ones((97, 1), np.float32)}, "'lm_head.weight_scale' has no place in"),
        ("fp8", {f"{WEIGHT}_scale_inv": np.ones(1, np.float32)}, f"'{DOWN}.weight_scale_inv' holds scales of blocks"),
    ],
)
def test_damaged_checkpoints(tmp_path, capsys, kind, changes, words):
    src = fp8_checkpoint(tmp_path / "src", quantization=KINDS[kind])
    changed(src, **changes)
    with pytest.raises(Refusal) as refusal:
        load_folder(src)
    assert words in str(refusal.value)
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_names_wrong_dtypes(tmp_path, capsys):
    src = changed(fp8_checkpoint(tmp_path / "src"), **{WEIGHT: np.ones((64, 96), np.float32)})
    assert main([str(src), "--dry-run"]) == 1
    assert f"wrong dtype: {DOWN}.weight float32, expected float8_e4m3fn" in capsys.readouterr().out


def test_quantised_weights_that_config_does_not_mention(tmp_path):
    src = fp8_checkpoint(tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    del config["quantization_config"]
    (src / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=r"is stored as float8_e4m3fn, but LlamaForCausalLM needs one of float32"):
        load_folder(src)


def test_helpers_know_which_maps_are_linear():
    """What these tests quantise is what jspec takes for linear maps."""
    assert LINEAR.search(f"{Q}.weight")
    assert not LINEAR.search("model.layers.0.mlp.gate.weight")


def test_a_deeply_nested_header_is_refused(tmp_path):
    """A key of the header that the format does not know, which would exhaust the parser."""
    src = fp8_checkpoint(tmp_path / "src")
    data = (src / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    deep = "[" * 99 + "]" * 99
    text = json.dumps({**header, f"{Q}.weight": {**header[f"{Q}.weight"], "x": 0}}).replace('"x": 0', f'"x": {deep}')
    (src / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode() + data[8 + length :])
    with pytest.raises(Refusal, match=r"model\.safetensors"):
        load_folder(src)
