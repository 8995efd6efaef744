"""Configs of well-known checkpoints, with the keys that published files have: what is read, and that nobody is warned.

``published_configs.json`` beside this file has the config.json of each, by the checkpoint's name."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.shapes import GLM_47_FLASH
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import decoder_config, read_config, read_fields
from jspec.checkpoints.huggingface.multimodal import has_text_config
from jspec.checkpoints.huggingface.unread_keys import unread_keys
from jspec.config import DeltaNets, Experts, ModelConfig, Rope

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())


def read(folder, raw: dict) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    fields = read_fields(Folder(folder))
    config = decoder_config(Folder(folder), fields)
    assert unread_keys(fields, has_text_config(fields)) == []
    return config


def found(config: ModelConfig, *names: str) -> tuple:
    return tuple(getattr(config, name) for name in names)


def test_glm_4_6(tmp_path):
    config = read(tmp_path, PUBLISHED["GLM-4.6"])
    assert found(config, "qkv_bias", "output_bias", "qk_norm", "mtp_layers") == (True, False, True, 1)
    assert config.rope == Rope(theta=1e6, fraction=0.5)
    assert config.eos_token_ids == (151329, 151336, 151338)
    layers = (False,) * 3 + (True,) * 89
    how = {"scores": "sigmoid", "scale": 2.5, "corrected": True, "shared": 1}
    assert config.experts == Experts(160, 8, 1536, True, layers, **how)
    assert 350e9 < config.num_parameters < 360e9


def test_minimax_m2(tmp_path):
    config = read(tmp_path, PUBLISHED["MiniMax-M2"])
    assert config.rope == Rope(theta=5e6, fraction=0.5)
    assert found(config, "qk_norm", "qk_norm_over", "mtp_layers", "quantization") == (True, "projection", 0, None)
    assert config.experts == Experts(256, 8, 1536, scores="sigmoid", corrected=True)
    assert 228e9 < config.num_parameters < 231e9


def test_qwen2_5_vl_7b(tmp_path):
    """Its config.json is flat."""
    config = read(tmp_path, PUBLISHED["Qwen2.5-VL-7B"])
    assert found(config, "architecture", "rope", "qkv_bias") == ("Qwen2ForCausalLM", Rope(theta=1e6), True)
    assert set(config.windows) == {None}
    assert 7.6e9 < config.num_parameters < 7.7e9


def test_qwen3_vl_30b(tmp_path):
    config = read(tmp_path, PUBLISHED["Qwen3-VL-30B-A3B"])
    assert found(config, "architecture", "rope") == ("Qwen3MoeForCausalLM", Rope(theta=5e6))
    assert config.experts == Experts(128, 8, 768, layers=(True,) * 48)
    assert 30e9 < config.num_parameters < 31e9


GROWN = Rope(1e6, "yarn", 16.0, original_max_position=16384, query_growth=0.1)


@pytest.mark.parametrize(("name", "rope"), [("Mistral-Small-3.2", Rope(theta=1e9)), ("Ministral-3", GROWN)])
def test_mistral_small_and_ministral_3(tmp_path, name, rope):
    """Neither says outside ``text_config`` whether its output head is tied to the embedding."""
    config = read(tmp_path, PUBLISHED[name])
    assert found(config, "head_dim", "tie_embeddings", "rope") == (128, False, rope)
    assert 23.5e9 < config.num_parameters < 23.7e9


def with_text(name: str, text: dict, **outer) -> dict:
    """The config of a multimodal checkpoint with other keys, those of ``text`` in its ``text_config``."""
    return {**PUBLISHED[name], **outer, "text_config": PUBLISHED[name]["text_config"] | text}


@pytest.mark.parametrize("is_newer", [False, True], ids=["3.5 and 3.6", "3.8"])
def test_qwen3_5_27b(tmp_path, is_newer):
    """Qwen3.8 says in words which gate there is, and that images are read."""
    raw, newer = PUBLISHED["Qwen3.5-27B"], {"output_gate_type": "swish"}
    raw = with_text("Qwen3.5-27B", newer, language_model_only=False) if is_newer else raw
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    config = read(tmp_path, raw)
    assert config.delta_nets == DeltaNets(16, 48, 128, 128, 4, (True, True, True, False) * 16)
    assert config.rope == Rope(theta=1e7, fraction=0.25)
    assert found(config, "architecture", "norm", "qk_norm") == ("Qwen3_5ForCausalLM", "rms_offset", True)
    assert found(config, "attention_gate", "experts", "tie_embeddings", "mtp_layers") == (True, None, False, 1)
    assert config.eos_token_ids == (248044, 248046)
    assert 26.8e9 < config.num_parameters < 27e9
    assert config.delta_nets.row_bytes(0, 2) == 48 * 48 * 128 * 128 * 4 + 48 * 3 * 10240 * 2  # 151 MB and 2.9 MB


@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_qwen3_5_35b_a3b(tmp_path, in_bfloat16):
    """Whether weights are in blocks of FP8, the tensors say."""
    raw = dict(PUBLISHED["Qwen3.5-35B-A3B-FP8"])
    if in_bfloat16:
        del raw["quantization_config"]
    config = read(tmp_path, raw)
    assert config.delta_nets == DeltaNets(16, 32, 128, 128, 4, (True, True, True, False) * 10)
    assert config.experts == Experts(256, 8, 512, shared=1, shared_gate=True)
    assert found(config, "architecture", "quantization", "mtp_layers") == ("Qwen3_5MoeForCausalLM", None, 1)
    assert 34e9 < config.num_parameters < 35e9


def test_qwen3_next_80b_a3b(tmp_path):
    """It has neither ``layer_types`` nor a key for its layer for multi-token prediction."""
    config = read(tmp_path, PUBLISHED["Qwen3-Next-80B-A3B"])
    assert config.delta_nets == DeltaNets(16, 32, 128, 128, 4, (True, True, True, False) * 12)
    assert config.experts == Experts(512, 10, 512, layers=(True,) * 48, shared=1, shared_gate=True)
    assert config.rope == Rope(theta=1e7, fraction=0.25)
    assert config.mtp_layers == 1
    assert 79e9 < config.num_parameters < 81e9


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            with_text("Qwen3.5-27B", {"output_gate_type": "sigmoid"}),
            r"text_config\.output_gate_type='sigmoid': expected 'swish' or 'silu'",
        ),
        (
            with_text(
                "Qwen3.5-35B-A3B-FP8",
                {"model_type": "qwen4_exp_text"},
                model_type="qwen4_exp",
                architectures=["Qwen4ExpForConditionalGeneration"],
            ),
            r"architectures=\['Qwen4ExpForConditionalGeneration'\]: not read, because it has hyper",
        ),
    ],
    ids=["another gate", "a successor of another architecture"],
)
def test_hybrids_that_are_not_read_are_refused_by_name(tmp_path, raw, words):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(Refusal, match=words):
        read_config(Folder(tmp_path))


def read_config_of(folder, name: str) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return read_config(Folder(folder))


def test_glm_4_7_flash(tmp_path):
    """Its heads have nothing to do with its width divided by their number."""
    config = read_config_of(tmp_path, "GLM-4.7-Flash")
    assert dataclasses.replace(GLM_47_FLASH, bos_token_id=config.bos_token_id) == config


def test_deepseek_v3(tmp_path):
    config = read_config_of(tmp_path, "DeepSeek-V3")
    assert 670e9 < config.num_parameters < 672e9
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert config.rope.attention_factor == 1


def test_gemma_3_4b(tmp_path):
    """It states no more of its text model than this."""
    config = read_config_of(tmp_path, "Gemma-3-4B")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.max_position, config.eos_token_ids, config.tie_embeddings) == (131072, (1, 106), True)
    assert config.windows == tuple(None if (i + 1) % 6 == 0 else 1024 for i in range(34))
    assert config.rope == Rope(theta=1e6, kind="linear", factor=8.0)
    assert config.layer_ropes == tuple(Rope(theta=1e4) if window else config.rope for window in config.windows)
    assert (config.attention_scale, config.activation) == (1 / 16, "gelu_tanh")
