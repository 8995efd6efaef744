"""Quantised checkpoints that are refused: other methods, contradictions and damage, each by name."""

import json

import numpy as np
import pytest
from fp8_checkpoints import (
    DOWN,
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
from packed_weights import (
    auto_round_config,
    auto_round_floats,
    awq_config,
    compressed_config,
    fp8_config,
    gptq_config,
    model_optimizer_config,
    mxfp4_config,
    pack_config,
)
from tiny import tiny_checkpoint, tiny_config

from convert import Refusal, load_draft, load_folder
from convert.cli import main
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.quantized.config import READERS

UNREAD = ["mxfp4", "quark", "hqq", "eetq", "aqlm", "fbgemm_fp8", "gguf"]


@pytest.mark.parametrize("method", UNREAD)
def test_unsupported_methods_are_refused(tmp_path, method):
    assert method not in READERS
    src = tiny_checkpoint(tmp_path / "src")
    config = {**tiny_config(), "quantization_config": {"quant_method": method, "bits": 4}}
    (src / "config.json").write_text(json.dumps(config))
    use = "use the original bfloat16 checkpoint, with jspec-convert --quantize int8 or fp8"
    for load in (load_folder, load_draft, lambda src: Checkpoint.open(src).target_config):
        with pytest.raises(Refusal, match=rf"src/config\.json: .*quant_method='{method}' is not read.*{use}"):
            load(src)


def of_group(form: str):
    config = mxfp4_config()
    config["config_groups"]["group_0"]["format"] = form
    return config


GROUP = compressed_tensors()["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (compressed_tensors(format="marlin-24"), "config.format='marlin-24': expected 'float-quantized' or"),
        (compressed_tensors(format="mixed-precision"), "config_groups.group_0.format=None: expected 'float-quantized'"),
        (
            compressed_tensors(config_groups={"a": GROUP, "b": {**GROUP, "format": "marlin-24"}}),
            "config_groups.b.format='marlin-24': expected 'float-quantized'",
        ),
        (
            compressed_tensors(config_groups={"a": GROUP, "b": {**GROUP, "targets": ["re:(a+)+"]}}),
            "config_groups.b.targets has the pattern '(a+)+': expected names of modules",
        ),
        (compressed_tensors(format=None), "quantization_config.format=None: expected 'float-quantized' or"),
        (compressed_tensors(group__format="int-quantized"), "group_0.format='int-quantized': expected 'float-quantize"),
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
        (compressed_tensors("group"), "group_0.weights.strategy='group': expected 'channel' or 'tensor' or 'block';"),
        (compressed_tensors(group__weights=None), "config_groups.group_0={'weights': None"),
        (compressed_tensors(config_groups={}), "quantization_config.config_groups={}: expected groups of linear m"),
        (compressed_tensors(config_groups=[1]), "quantization_config.config_groups=[1]: expected an object or null"),
        (
            compressed_tensors(sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config.format='sparse-24-bitmask': expected 'dense'",
        ),
        ({**compressed_tensors(), "ignore": "lm_head"}, "quantization_config.ignore='lm_head': expected a list of"),
        (compressed_tensors(ignore=[3]), "quantization_config.ignore=[3]: expected a list of module names"),
        (compressed_tensors(ignore=["re:a+b"] * 21), "expected at most 20 patterns, and 1000 that end with their only"),
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
        (compressed_tensors("tensor_group", format="nvfp4-pack-quantized"), "group_0.weights.num_bits=8: expected 4;"),
        (
            {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
            "quant_algo='W8A8_SQ_PER_CHANNEL', of NVIDIA Model Optimizer, is",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size=32: expected 16;"),
        ({"quant_method": 3}, "quantization_config.quant_method=3: expected a string"),
        ([1], "quantization_config=[1]: expected an object or null"),
        *(
            (
                fp8_config(weight_block_size=block),
                f"weight_block_size={block}: expected two integers in 1..1048576, the h",
            )
            for block in ([0, 128], [128], [128, 128, 128], [128, 1.5], [True, 1], 128, [2**21, 1])
        ),
        (fp8_config(fmt="e5m2"), "quantization_config.fmt='e5m2': expected 'e4m3' or 'float8_e4m3fn'; of quantised"),
        (fp8_config(modules_to_not_convert="lm_head"), "modules_to_not_convert='lm_head': expected a list of module"),
        *((gptq_config(bits=bits), f"bits={bits}: expected 4 or 8; of quantised") for bits in (2, 3, None)),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format='marlin': expected 'gptq' or 'gptq_v2'; of"),
        (gptq_config(checkpoint_format=None, format="gptq_p"), "config.format='gptq_p': expected 'gptq' or 'gptq_v2'"),
        (gptq_config(pack_dtype="int16"), "quantization_config.pack_dtype='int16': expected 'int32'; of quantised"),
        (gptq_config(is_marlin_format=True), "quantization_config.is_marlin_format=True: expected False"),
        (gptq_config(rotation="hadamard"), "rotation='hadamard': expected none, because rotated weights are not read"),
        (
            gptq_config(dynamic={"-:.*gate": {"bits": 3}, "+:.*down.*": {"bits": 3}}),
            "dynamic.+:.*down.*.bits=3: expected 4 or 8; of quantised",
        ),
        (gptq_config(dynamic={".*up.*": {"group_size": 0}}), "dynamic..*up.*.group_size=0: expected a positive"),
        (
            gptq_config(dynamic={"lm_head": {"adapter": {"rank": 8}}}),
            "dynamic.lm_head.adapter={'rank': 8}: expected none",
        ),
        (gptq_config(dynamic={"lm_head": 8}), "quantization_config.dynamic.lm_head=8: expected an object or null"),
        (gptq_config(dynamic={"(a+)+": {"bits": 8}}), "dynamic has the pattern '(a+)+': expected names of modules, or"),
        (gptq_config(dynamic=["a"]), "quantization_config.dynamic=['a']: expected an object or null"),
        (gptq_config(group_size=0), "group_size=0: expected a positive integer, or -1 for one group of all input"),
        (gptq_config(group_size=-2), "quantization_config.group_size=-2: expected an integer in -1.."),
        (gptq_config(group_size=None), "quantization_config.group_size is missing: expected an integer in -1.."),
        (gptq_config(desc_act=1), "quantization_config.desc_act=1: expected true or false"),
        (awq_config(bits=8), "quantization_config.bits=8: expected 4; of quantised"),
        (awq_config(zero_point=1), "quantization_config.zero_point=1: expected True or False; of quantised"),
        *(
            (
                awq_config(version=name),
                f"version='{name}': expected 'gemm', because weights lie in other orders elsewhere",
            )
            for name in ("gemv", "GEMV_FAST", "exllama", "marlin", "llm-awq")
        ),
        (awq_config(version=None, format="gemv"), "quantization_config.format='gemv': expected 'gemm'"),
        (awq_config(version=3), "quantization_config.version=3: expected a string"),
        (auto_round_config("auto_round:fp8"), "packing_format='auto_round:fp8': expected 'auto_round:auto_gptq' or"),
        (auto_round_config("auto_round:auto_awq", bits=8), "quantization_config.bits=8: expected 4; of quantised"),
        (auto_round_config(None, bits=3), "quantization_config.bits=3: expected 4 or 8; of quantised"),
        (auto_round_config(None, data_type="mx_int"), "data_type='mx_int': expected 'int' or 'mx_fp' or 'nv_fp' or"),
        (
            auto_round_floats("nv_fp", 4, 16, "auto_round:llm_compressor_nvfp4_e5m3"),
            "packing_format='auto_round:llm_compressor_nvfp4_e5m3': expected 'auto_round:llm_compressor'",
        ),
        (auto_round_floats("nv_fp", 4, 32, "auto_round:llm_compressor"), "group_size=32: expected 16; of quantised"),
        (auto_round_floats("nv_fp", 8, 16, "auto_round:llm_compressor"), "bits=8: expected 4; of quantised"),
        (auto_round_floats("fp", 8, -1, "auto_round:fp8_static", fmt="e5m2"), "fmt='e5m2': expected 'e4m3'"),
        (auto_round_floats("fp", 8, 128, "auto_round:fp8_static"), "group_size=128: expected -1 or 0; of quantised"),
        (auto_round_floats("fp", 4, -1, None), "bits=4: expected 8; of quantised"),
        (auto_round_config(None, act_bits=8), "quantization_config.act_bits=8: expected 16"),
        (
            auto_round_config(None, extra_config={"model.layers.0.mlp.up_proj": {"bits": 3}}),
            "extra_config.model.layers.0.mlp.up_proj.bits=3: expected 4 or 8; of quantised",
        ),
        (
            auto_round_config(None, extra_config={".*up_proj.*": {"data_type": "mx_fp"}}),
            "extra_config..*up_proj.*.packing_format=None: expected 'auto_round:llm_compressor'",
        ),
        (
            auto_round_config("auto_round:auto_awq", extra_config={"lm_head": {"bits": 8}}),
            "extra_config.lm_head.bits=8: expected 4; of quantised",
        ),
        (model_optimizer_config("MIXED_PRECISION"), "quantized_layers=None: expected an object of modules and their"),
        (
            model_optimizer_config("MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "W4A8_NVFP4_FP8"}}),
            "quantized_layers.lm_head.quant_algo='W4A8_NVFP4_FP8', of NVIDIA Model Optimizer, is not read; of quantised",
        ),
        (
            model_optimizer_config(
                "MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "NVFP4", "group_size": 8}}
            ),
            "quantized_layers.lm_head.group_size=8: expected 16; of quantised",
        ),
        (pack_config(num_bits=2), "group_0.weights.num_bits=2: expected 4 or 8; of quantised"),
        (pack_config(type="float"), "group_0.weights.type='float': expected 'int'"),
        (pack_config(actorder="dynamic"), "actorder='dynamic': expected False or 'weight' or 'static' or 'group'"),
        (pack_config(strategy="tensor"), "group_0.weights.strategy='tensor': expected 'group' or 'channel'"),
        (pack_config(dynamic=True), "group_0.weights.dynamic=True: expected False"),
        (pack_config(symmetric="yes"), "group_0.weights.symmetric='yes': expected true or false"),
        (pack_config(group_size=0), "group_0.weights.group_size=0: expected a positive integer"),
        ({**pack_config(), "ignore": [4]}, "quantization_config.ignore=[4]: expected a list of module names"),
        (
            compressed_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128]),
            "group_0.weights.block_structure=[128]: expected two integers in 1..1048576",
        ),
        (mxfp4_config(num_bits=8), "group_0.weights.num_bits=8: expected 4;"),
        (mxfp4_config(type="int"), "group_0.weights.type='int': expected 'float';"),
        (mxfp4_config(strategy="tensor_group"), "group_0.weights.strategy='tensor_group': expected 'group';"),
        (mxfp4_config(group_size=16), "group_0.weights.group_size=16: expected 32;"),
        (mxfp4_config(symmetric=False), "group_0.weights.symmetric=False: expected True;"),
        (mxfp4_config(dynamic=True), "group_0.weights.dynamic=True: expected False;"),
        (mxfp4_config(actorder="group"), "group_0.weights.actorder='group': expected False or 'weight' or 'static';"),
        (mxfp4_config(scale_dtype="torch.bfloat16"), "scale_dtype='torch.bfloat16': expected 'torch.uint8' or"),
        (of_group("nvfp4-pack-quantized"), "group_0.format='nvfp4-pack-quantized': expected 'mxfp4-pack-quantized';"),
        ({**of_group("mxfp8-pack-quantized"), "format": None}, "group_0.format='mxfp8-pack-quantized': expected"),
        (compressed_config("mxfp6-pack-quantized"), "quantization_config.format='mxfp6-pack-quantized': expected"),
        ({"quant_method": "quark", "weight": {"dtype": "fp4"}}, "quant_method='quark' is not read"),
        ({"quant_method": "modelopt", "quant_algo": "MXFP4"}, "quant_algo='MXFP4', of NVIDIA Model Optimizer, is not"),
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


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_other_algorithms_of_model_optimizer_are_refused(tmp_path, algorithm):
    src = tiny_checkpoint(tmp_path / "src")
    described = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    (src / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": described}))
    words = f"quantization.quant_algo='{algorithm}', of NVIDIA Model Optimizer.*--quantize"
    with pytest.raises(Refusal, match=rf"src/hf_quant_config\.json: {words}"):
        load_folder(src)


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


def test_a_dry_run_names_wrong_dtypes(tmp_path, capsys):
    src = changed(fp8_checkpoint(tmp_path / "src"), **{f"{DOWN}.weight": np.ones((64, 96), np.float32)})
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
