"""EAGLE-3 heads that were trained beside multimodal targets, and heads of targets whose class jspec does not know.

The keys are those that the tools of their publishers write; sizes are small. For text, the three positions of ``mrope`` are
equal, so that such a head computes what one with a plain rope does."""

import json

import numpy as np
import pytest
from greedy_texts import drafted
from resaved import set_keys
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights
from tiny_heads import NO_EMBEDDING, eagle3, medusa, speculators

import jspec
from convert import convert, load_draft
from convert.cli import main
from convert.folders import read_draft_config
from jspec.checkpoints.files.refusal import Refusal

SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
THETA = {"rope_theta": 5e6}
TOKENS = {"image_token_id": 93, "video_token_id": 94, "vision_start_token_id": 91, "vision_end_token_id": 92}
SECTIONS = {"mrope_section": [3, 3, 2]}
INTERLEAVED = {**SECTIONS, "mrope_interleaved": True}
GEMMA = {"target_model_type": "gemma3_text", "additional_fc": False, "reuse_target_lm_head": True, "sliding_window": 9}

# What writes a head, its keys, and what has to be said of it; by who publishes such heads or trains them.
MULTIMODAL = {
    # AngelSlim, train/configs/qwen3-vl-4b-eagle3-mrope.json
    "AngelSlim, Qwen3-VL": (
        eagle3,
        {
            **THETA,
            **TOKENS,
            "architectures": ["Eagle3LlamaForCausalLM"],
            "modal_type": "VLM",
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "default", "rope_type": "default", **INTERLEAVED},
        },
        {},
    ),
    # SpecForge, configs/qwen3-vl-8b-eagle3.json, and configs/qwen3-vl-30b-a3b-eagle3.json, whose rope names no type
    "SpecForge, Qwen3-VL": (
        eagle3,
        {**THETA, "target_model_type": "qwen3_vl", "rope_scaling": {"rope_type": "default", **INTERLEAVED}},
        {},
    ),
    "SpecForge, Qwen3-VL-MoE": (
        eagle3,
        {**THETA, "target_model_type": "qwen3_vl_moe", "rope_scaling": INTERLEAVED},
        {},
    ),
    # SpecForge, configs/qwen2-5-vl-eagle3.json
    "SpecForge, Qwen2.5-VL": (
        eagle3,
        {**THETA, "rope_scaling": {"type": "mrope", **SECTIONS}, "sliding_window": 64, "use_sliding_window": False},
        {},
    ),
    # vLLM's classes of heads for these targets, which are Llama's
    "vLLM, Qwen3-VL": (
        eagle3,
        {**THETA, "architectures": ["Eagle3Qwen3vlForCausalLM"], "rope_scaling": {"rope_type": "mrope", **SECTIONS}},
        {},
    ),
    "vLLM, Qwen2.5-VL": (
        eagle3,
        {**THETA, "architectures": ["Eagle3Qwen2_5vlForCausalLM"], "rope_scaling": {"type": "mrope", **SECTIONS}},
        {},
    ),
    # speculators 0.9.0, train/cli.py, which keeps the sections of the target's rope
    "speculators, Qwen3-VL": (
        speculators,
        {"layers": {"rope_parameters": {"rope_type": "default", **THETA, **SECTIONS}}},
        {},
    ),
    # SpecForge, configs/gemma3-27b-eagle3.json and configs/mistral-small-24B-eagle3.json
    "SpecForge, Gemma 3": (
        eagle3,
        {
            **THETA,
            **GEMMA,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            "draft_vocab_size": 97,
            "leave_out": ("lm_head.weight", "embed_tokens.weight"),
        },
        {"aux_convention": "output_of"},
    ),
    "SpecForge, Mistral Small": (eagle3, {**THETA, "sliding_window": None}, {}),
}


def multimodal(folder):
    """A checkpoint of Gemma 3 with its vision tower, of which the text model is ``<name>-text``."""
    text = tiny_checkpoint(folder.with_name(f"{folder.name}-text"), "Gemma3ForCausalLM", num_hidden_layers=8)
    config = json.loads((text / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**config, "architectures": None}}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {f"language_model.{name}": array for name, array in load_file(text / "model.safetensors").items()}
    write_weights(folder, {**tensors, "vision_tower.fc1.weight": np.ones((3, 3), np.float32)})
    return folder


@pytest.mark.parametrize("name", MULTIMODAL)
def test_mrope_is_a_plain_rope_for_text(tmp_path, name):
    """No key is unknown, which would warn, and the config is that of the same head with a plain rope."""
    write, keys, said = MULTIMODAL[name]
    config = read_draft_config(write(tmp_path / "head", **keys), **said)
    assert (config.layers.rope.kind, config.layers.rope.theta) == ("default", 5e6)
    assert set(config.layers.windows) == {None}
    convert(tmp_path / "head", tmp_path / "out", **said)
    assert load_draft(tmp_path / "out")[0] == config


def test_sections_that_are_no_list_are_refused(tmp_path):
    head = eagle3(tmp_path / "head", rope_scaling={"type": "mrope", "mrope_section": 8})
    with pytest.raises(Refusal, match=r"rope_scaling\.mrope_section=8: expected a list of positive numbers"):
        read_draft_config(head)


def test_a_rope_that_rotates_a_part_of_each_head_is_refused(tmp_path):
    head = eagle3(tmp_path / "head", rope_scaling={"type": "mrope", **SECTIONS, "partial_rotary_factor": 0.25})
    with pytest.raises(Refusal, match=r"partial_rotary_factor=0\.25: expected 1"):
        read_draft_config(head)


def test_additional_maps_are_refused(tmp_path):
    with pytest.raises(Refusal, match="additional_fc=True: expected False"):
        read_draft_config(eagle3(tmp_path / "head", additional_fc=True))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["SpecForge, Gemma 3", "speculators, Qwen3-VL"])
def test_a_head_drafts_for_the_text_of_a_multimodal_target(tmp_path, name):
    write, keys, said = MULTIMODAL[name]
    target, head = multimodal(tmp_path / "target"), write(tmp_path / "head", **keys)
    llm = jspec.load(target, head, num_draft_tokens=3, **said, **SMALL)
    drafted(llm, [[7, 8, 9] * 3], most=12)


UNKNOWN = {"architectures": ["Qwen9VLForConditionalGeneration"], "model_type": "qwen9_vl"}


def of_unknown_target(folder):
    """A head in the speculators format, whose config.json names the class of its target."""
    head = speculators(folder, verifier="Qwen/Qwen9-VL-8B")
    config = json.loads((head / "config.json").read_text())
    config["speculators_config"]["verifier"]["architectures"] = UNKNOWN["architectures"]
    (head / "config.json").write_text(json.dumps(config))
    return head


@pytest.mark.parametrize(
    "write",
    [of_unknown_target, medusa, lambda folder: eagle3(folder, target_model_type="qwen9_vl", **NO_EMBEDDING)],
    ids=["speculators", "medusa", "eagle3"],
)
def test_a_head_of_an_unknown_target_is_converted(tmp_path, capsys, write):
    head = write(tmp_path / "head")
    assert main([str(head), str(tmp_path / "out")]) == 0
    assert "recognised: " in capsys.readouterr().out
    assert load_draft(tmp_path / "out")[0] == load_draft(head)[0]


def test_an_unknown_target_is_named_and_not_needed(tmp_path, capsys):
    head = of_unknown_target(tmp_path / "head")
    target = tiny_checkpoint(tmp_path / "target")
    set_keys(target, **UNKNOWN)
    assert main([str(head), str(tmp_path / "out"), "--target", str(target)]) == 2
    error = capsys.readouterr().err
    assert "Qwen9VLForConditionalGeneration" in error
    assert "a draft head is converted without --target (target=), too, but not checked" in error
    with pytest.raises(Refusal, match="Qwen9VLForConditionalGeneration"):
        jspec.load(target, head, **SMALL)


def test_a_head_of_an_unknown_target_loads_beside_one_of_its_sizes(tmp_path):
    """What it was trained beside is not asked for; what does not fit by its sizes is refused."""
    head = of_unknown_target(tmp_path / "head")
    how = {"num_draft_tokens": 3, **SMALL}
    llm = jspec.load(tiny_checkpoint(tmp_path / "target", num_hidden_layers=8), head, **how)
    assert llm.method == "eagle3"
    with pytest.raises(ValueError, match="was made for a target with a hidden size of 64, and this target's is 32"):
        jspec.load(tiny_checkpoint(tmp_path / "narrow", hidden_size=32, num_hidden_layers=8), head, **how)
