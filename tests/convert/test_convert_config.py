"""config.json in its many spellings, and integers that no model has."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, tiny_config

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.hf_config import read_config
from jspec.checkpoints.hf_rope import read_rope, write_rope
from jspec.checkpoints.refusal import Refusal
from jspec.config import ModelConfig, Rope


def read(folder, config: dict, generation: dict | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(Folder(folder))


def test_sizes_and_defaults(tmp_path):
    config = tiny_config(num_key_value_heads=None, head_dim=None, rope_theta=None, rms_norm_eps=None)
    found = read(tmp_path, config)
    assert (found.num_kv_heads, found.head_dim, found.rope, found.rms_norm_eps) == (4, 16, Rope(), 1e-6)
    assert (found.bos_token_id, found.eos_token_ids) == (1, (2,))


@pytest.mark.parametrize("key", ["num_key_value_heads", "head_dim"])
def test_null_means_derived(tmp_path, key):
    found = read(tmp_path, {**tiny_config("Qwen3ForCausalLM"), key: None})
    assert (found.num_kv_heads, found.head_dim) == ((4, 16) if key == "num_key_value_heads" else (2, 16))


def test_absent_keys_take_the_class_default(tmp_path):
    mistral = tiny_config("MistralForCausalLM", num_attention_heads=16, num_key_value_heads=None)
    del mistral["sliding_window"]
    found = read(tmp_path, mistral)
    assert (found.num_kv_heads, found.windows) == (8, (4096, 4096))
    assert read(tmp_path, tiny_config("Qwen3ForCausalLM", head_dim=None)).head_dim == 128


def test_biases_by_architecture(tmp_path):
    def flags(architecture, **overrides):
        found = read(tmp_path, tiny_config(architecture, **overrides))
        return found.qkv_bias, found.output_bias, found.mlp_bias, found.qk_norm

    assert flags("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert flags("MistralForCausalLM", attention_bias=True) == (False, False, False, False)
    assert flags("Qwen2ForCausalLM") == (True, False, False, False)
    assert flags("Qwen3ForCausalLM", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    ("overrides", "windows"),
    [
        ({"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, (None, 5, 5)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (5, None, None),
        ),
    ],
)
def test_qwen_windows(tmp_path, overrides, windows):
    assert read(tmp_path, tiny_config("Qwen2ForCausalLM", num_hidden_layers=3, **overrides)).windows == windows


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ],
)
def test_rope_spellings(tmp_path, spelling):
    found = read(tmp_path, tiny_config(**spelling))
    assert found.rope == Rope(theta=5e5, kind="linear", factor=4.0)


def test_llama3_rope(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    found = read(tmp_path, tiny_config(max_position_embeddings=131072, rope_scaling=scaling))
    assert found.max_position == 131072
    assert found.rope == Rope(kind="llama3", factor=32.0, original_max_position=8192)


def test_dynamic_rope_stops_at_the_trained_length(tmp_path):
    found = read(tmp_path, tiny_config(rope_scaling={"type": "dynamic", "factor": 2.0}))
    assert (found.rope.kind, found.max_position) == ("dynamic", 256)


def test_eos_ids_are_united(tmp_path):
    found = read(tmp_path, tiny_config(eos_token_id=[3, 2]), {"eos_token_id": [2, 7]})
    assert found.eos_token_ids == (3, 2, 7)
    assert read(tmp_path, tiny_config(eos_token_id=None), {"eos_token_id": 9}).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "LlamaForCausalLM"),
        ({"auto_map": {"AutoModel": "modeling.Model"}}, "remote code"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': expected 'silu'"),
        ({"hidden_size": -1}, "hidden_size=-1: expected an integer"),
        ({"hidden_size": 64.0}, "hidden_size=64.0"),
        ({"hidden_size": True}, "hidden_size=True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: expected an integer in 1..4096"),
        ({"intermediate_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "beyond any model"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: expected a divisor of num_attention_heads, 4"),
        ({"head_dim": 15}, "head_dim=15: expected an even number"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size=66: expected a multiple of num_attention_heads"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: expected a positive number"),
        ({"rope_theta": 10**400}, "rope_theta="),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': expected true or false"),
        ({"eos_token_id": [2, 97]}, "eos_token_id=[2, 97]: expected token ids in 0..96"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.type='longrope': expected one of"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "rope_scaling.factor=-4.0"),
        ({"rope_scaling": [1]}, "rope_scaling=[1]: expected an object or null"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: expected 1"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types="),
        ({"layer_types": ["full_attention"]}, "layer_types=['full_attention']: expected 2 entries"),
    ],
)
def test_refused(tmp_path, overrides, message):
    with pytest.raises(Refusal) as refusal:
        read(tmp_path, {**tiny_config(), **overrides})
    assert str(refusal.value).startswith(f"{tmp_path}/config.json: ")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"hidden_size": NaN}', "[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "\xff"]
)
def test_unreadable_json(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(Refusal, match=r"config\.json"):
        read_config(Folder(tmp_path))


INTEGER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
    "bos_token_id",
    "eos_token_id",
)
ANYTHING = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**300]),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    overrides=st.dictionaries(st.sampled_from(INTEGER_FIELDS), ANYTHING, max_size=3),
)
def test_any_integers_give_a_config_or_a_refusal(tmp_path, architecture, overrides):
    """Whatever stands in the integer fields: a consistent config, or one sentence; nothing else is raised."""
    text = json.dumps({**tiny_config(architecture), "use_sliding_window": True, **overrides})
    (tmp_path / "config.json").write_text(text)
    try:
        config = read_config(Folder(tmp_path))
    except Refusal:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert 0 < config.num_parameters <= 2**44
    assert len(config.windows) == config.num_layers
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=5e5),
        Rope(kind="linear", factor=2.0),
        Rope(kind="dynamic", factor=4.0),
        Rope(kind="llama3", factor=8.0, high_freq_factor=5.0, original_max_position=64),
        Rope(kind="yarn", factor=8.0, original_max_position=64, beta_fast=16.0, attention_factor=1.25, truncate=False),
    ],
    ids=lambda rope: rope.kind,
)
def test_rope_is_written_as_it_is_read(rope):
    assert read_rope(Fields(write_rope(rope), "config.json"), 2048) == rope
