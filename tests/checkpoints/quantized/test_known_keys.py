"""Every key of a ``quantization_config`` that tools write is known, and all others are refused by name."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fp8_checkpoints import GPT_OSS, compressed_tensors, vllm_fp8
from packed_weights import auto_round_config, awq_config, gptq_config, model_optimizer_config, mxfp4_config
from tiny import tiny_config
from written_keys import SOURCES, keys_of

from convert import Refusal
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.huggingface.families import FAMILIES
from jspec.checkpoints.quantized.config import READERS, read_quantization
from jspec.checkpoints.quantized.known_keys import KEYS, Keys


def read(config: dict[str, Any]):
    return read_quantization(Fields({"quantization_config": config}, "config.json"))


def all_keys(keys: Keys) -> set[str]:
    """Those of an object, and of all objects in it."""
    return {*keys, *(key for inside in keys.values() if isinstance(inside, Mapping) for key in all_keys(inside))}


def unknown(source: str, root: Path | None = None) -> list[str]:
    """The keys of one of ``SOURCES`` that are in no table; those of methods that are refused as a whole are none."""
    written, missing = keys_of(source, root), list[str]()
    if written is None:
        pytest.skip("the tool is not installed")
    for place in SOURCES[source]:
        method, *path = place.split("/")
        if method not in KEYS:
            assert method not in READERS, method
            continue
        keys = KEYS[method]
        for part in path:
            keys = keys[part]
        of_function = source.rpartition(":")[2].rpartition(".")[2].islower()
        missing += [f"{place}: {key}" for key in sorted(written - (all_keys(keys) if of_function else set(keys)))]
    return missing


def test_every_method_that_is_read_has_a_table():
    elsewhere = {method for family in FAMILIES.values() for method in family.reads_quantization}
    assert {*READERS, *elsewhere} == KEYS.keys()


@pytest.mark.parametrize("source", SOURCES)
def test_every_key_of_the_tools_is_known(source):
    assert not unknown(source)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "package", ["compressed-tensors", "transformers", "nvidia-modelopt", "auto-round", "gptqmodel"]
)
def test_the_newest_packages_write_no_other_keys(tmp_path, package):
    """A key that a release brings needs a place in the tables, and then the release is the one that pyproject.toml names."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), package]
    try:
        got = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("pip took more than five minutes")
    if got.returncode:
        pytest.skip(f"pip cannot fetch it: {got.stderr.strip().splitlines()[-1]}")
    top = {"nvidia-modelopt": "modelopt"}.get(package, package.replace("-", "_"))
    sources = [source for source in SOURCES if source.startswith(f"{top}/")]
    assert sources
    assert not [key for source in sources for key in unknown(source, tmp_path)]


# As tools write them; those of GPTQModel 7.6.0 and AutoRound 0.16.1 are what they wrote of a tiny model.
CONFIGS = {
    "compressed-tensors": {
        **compressed_tensors(),
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "sparsity_config": {"format": "dense"},
        "transform_config": {
            "config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["x"], "location": "weight_input"}]}}
        },
    },
    "mxfp4 of compressed-tensors": mxfp4_config(),
    "gptq of GPTQModel": {
        **{
            "bits": 4,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "format": "gptq",
            "group_size": 32,
            "lm_head": False,
        },
        "meta": {"damp_percent": 0.05, "fallback": {"strategy": "rtn"}, "quantizer": ["gptqmodel:7.6.0"]},
        **{"method": "gptq", "pack_dtype": "int32", "quant_method": "gptq", "sym": True},
    },
    "fp8 of AutoRound": {
        **{
            "act_bits": 8,
            "act_data_type": "fp",
            "act_dynamic": True,
            "act_group_size": 128,
            "act_sym": True,
            "bits": 8,
        },
        **{"activation_scheme": "dynamic", "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers"},
        **{"data_type": "fp", "enable_quanted_input": False, "fmt": "e4m3", "group_size": [128, 128]},
        **{"quant_method": "fp8", "sym": True, "weight_block_size": [128, 128]},
    },
    "fp8": {**vllm_fp8(), "kv_cache_scheme": "static", "extra_config": {"lm_head": {"bits": 16}}},
    "gptq": gptq_config(dynamic={"-:.*gate": {}}),
    "awq of transformers 4": awq_config(backend="autoawq", do_fuse=False, fuse_max_seq_len=None, exllama_config=None),
    "awq": awq_config(dynamic={"-:.*gate": {}}),
    "auto-round": auto_round_config(
        None, extra_config={".*gate.*": {"bits": 16, "data_type": "float"}}, model_free=True
    ),
    "modelopt": {
        **model_optimizer_config(),
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": {"num_bits": 4}}
        },
    },
}


def objects(config: dict[str, Any], keys: Keys, path: tuple = ()) -> Iterator[tuple]:
    """The path of each object in a ``quantization_config`` whose keys have to be known."""
    yield path
    for key, value in config.items():
        inside = keys.get(key, keys.get("*"))
        if not isinstance(inside, Mapping) or value is None:
            continue
        for end, each in [((key,), value)] if isinstance(value, dict) else [((key, i), v) for i, v in enumerate(value)]:
            yield from objects(each, inside, (*path, *end))


def having(config: dict[str, Any], path: tuple, **more) -> dict[str, Any]:
    """``config`` with more keys in the object at ``path``."""
    changed = copy.deepcopy(config)
    at: Any = changed
    for part in path:
        at = at[part]
    at |= more
    return changed


PLACES = [
    (name, path)
    for name, config in CONFIGS.items()
    for path in objects(config, KEYS[config["quant_method"]])
    if path[-1:] not in (("config_groups",), ("extra_config",), ("dynamic",), ("transform_config",))
]


@pytest.mark.parametrize(("name", "path"), PLACES, ids=lambda value: str(value))
def test_a_key_that_no_tool_writes_is_refused_wherever_it_stands(name, path):
    said, written = "", CONFIGS[name]
    for part in path:
        said = f"{said[:-1]}[{part}]." if isinstance(part, int) else f"{said}{part}."
    assert read(written)
    for nothing in (None, {}, [], ""):
        assert read(having(written, path, made_up=nothing)) == read(written)
    for value in (False, True, 0, 1.5, "zebra", {"a": 1}):
        with pytest.raises(Refusal) as refusal:
            read(having(written, path, made_up=value))
        words = f"config.json: quantization_config.{said}made_up={value!r}: expected no such key, because jspec"
        assert str(refusal.value).startswith(words)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        *(
            (
                name,
                {key: {"algorithm": "hadamard"}},
                f".{key}={{'algorithm': 'hadamard'}}: expected none, because rotated",
            )
            for key in ("rotation_config", "spinquant_config", "rotation")
            for name in ("auto-round", "gptq", "awq", "fp8", "compressed-tensors")
        ),
        ("auto-round", {"super_bits": 6}, "super_bits=6: expected none, because scales that are quantised themselves"),
        ("auto-round", {"static_kv_dtype": "fp8"}, "static_kv_dtype='fp8': expected none"),
        ("auto-round", {"extra_config": {"a": {"act_bits": 8}}}, "extra_config.a.act_bits=8: expected 16"),
        (
            "auto-round",
            {"extra_config": {"a": {"rotation_config": {"b": 1}}}},
            "extra_config.a.rotation_config={'b': 1}",
        ),
        ("gptq", {"adapter": {"name": "lora"}}, "adapter={'name': 'lora'}: expected none, because adapters are not"),
        ("gptq", {"act_bits": 8}, "act_bits=8: expected 16"),
        ("gptq", {"method": "qqq"}, "method='qqq': expected 'gptq'"),
        ("awq", {"pack_dtype": "int16"}, "pack_dtype='int16': expected 'int32'"),
        ("awq", {"backend": "llm-awq"}, "backend='llm-awq': expected another, because weights lie in another order"),
        ("fp8", {"expert_dtype": "fp4"}, "expert_dtype='fp4': expected 'fp8'"),
        ("fp8", {"data_type": "mx_fp"}, "data_type='mx_fp': expected 'fp' or 'fp8'"),
        ("modelopt", {"pre_quant_scale": True}, "pre_quant_scale=True: expected False"),
        ("modelopt", {"lora_rank": 32}, "lora_rank=32: expected none, because low-rank parts"),
        ("compressed-tensors", {"fp8_dtype_flavor": "float8_e4m3fnuz"}, "fp8_dtype_flavor='float8_e4m3fnuz': expected"),
        (
            "compressed-tensors",
            {"moe_sparsity_config": {"method": "prune", "num_experts": [None, 4]}},
            "moe_sparsity_config={'method': 'prune', 'num_experts': [None, 4]}: expected none, because all layers",
        ),
    ],
)
def test_values_that_change_what_a_model_computes_are_refused(name, changes, words):
    with pytest.raises(Refusal) as refusal:
        read({**CONFIGS[name], **changes})
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("file", "held", "words"),
    [
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "FP8", "zebra": 1}},
            "quantization.zebra=1: expected no",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"kv_cache_quant_algo": "FP8", "zebra": 1}},
            "quantization.zebra=1: ",
        ),
        ("hf_quant_config.json", {"zebra": 1, "quantization": {"quant_algo": "FP8"}}, "zebra=1: expected no such key"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "zebra": 1}, "zebra=1: expected no such key"),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 128, "zero_point": True, "zebra": 1},
            "zebra=1: expected no",
        ),
    ],
)
def test_other_files_have_no_other_keys(tmp_path, file, held, words):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    (tmp_path / file).write_text(json.dumps(held))
    with pytest.raises(Refusal, match=f"/{file}: {words}"):
        read_config(Folder(tmp_path))


def test_the_keys_of_a_family_that_reads_another_method_are_known(tmp_path):
    config = {**tiny_config(GPT_OSS), "quantization_config": {"quant_method": "mxfp4", "zebra": 1}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refusal, match=r"quantization_config\.zebra=1: expected no such key"):
        read_config(Folder(tmp_path))
