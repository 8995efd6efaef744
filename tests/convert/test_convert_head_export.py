"""Draft heads in the public layout of their method: reading what was written gives the same head."""

import dataclasses
import json
import re

import numpy as np
import pytest
import tiny_heads as heads
from golden_blocks import checkpoint
from head_cases import ALL, same, write
from safetensors.numpy import load_file

from convert import convert, load_draft, verifier_of
from jspec.checkpoints.export import export_draft
from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config, EagleConfig, MedusaConfig, MLPConfig, PardConfig

EXPORTED = [(file, case) for file, case in ALL if file != "pard" and case != "final-hidden"]
TARGET = ModelConfig("LlamaForCausalLM", 97, 64, 96, 8, 4, 2, 16, 256)


@pytest.mark.parametrize(("file", "case"), EXPORTED, ids=lambda part: part)
def test_export_round_trip(tmp_path, file, case):
    src, said, pickled = write(file, case, tmp_path / "src")
    convert(src, tmp_path / "converted", allow_pickle=pickled, **said)
    config, params = load_draft(tmp_path / "converted")
    if isinstance(config, Eagle3Config):
        config = dataclasses.replace(config, trained_drafts=config.trained_drafts or 7)
    export_draft(tmp_path / "out", config, params, target_name="the/target", dtype="float32", extra={"license": "mit"})
    again, back = load_draft(tmp_path / "out")
    assert again == config
    same(back, params)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["license"] == "mit"
    assert written["torch_dtype"] == "float32"
    assert verifier_of(tmp_path / "out") == ("the/target" if isinstance(config, Eagle3Config) else None)
    export_draft(tmp_path / "half", config, params, target_name="the/target")
    same(load_draft(tmp_path / "half")[1], load_draft(tmp_path / "out", "bfloat16")[1])


@pytest.mark.parametrize("case", ["llama", "llama-two-layers", "qwen3"])
def test_export_in_the_layout_of_nemo_automodel(tmp_path, case):
    config, params = load_draft(checkpoint(tmp_path / "src", f"nemo_automodel/{case}"))
    export_draft(tmp_path / "out", config, params, target_name="the/target", dtype="float32")
    again, back = load_draft(tmp_path / "out")
    assert again == config
    assert config.norms
    same(back, params)
    names = set(load_file(tmp_path / "src" / "model.safetensors"))
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == names


def test_draft_ids_of_rows_in_any_order(tmp_path):
    config, params = load_draft(heads.eagle3(tmp_path / "src"))
    known = np.flatnonzero(params["draft_ids"] >= 0)
    shuffled = np.random.default_rng(1).permutation(known)
    ids = np.full(97, -1, np.int32)
    ids[shuffled] = np.arange(40)
    config = dataclasses.replace(config, trained_drafts=3)
    export_draft(tmp_path / "out", config, {**params, "draft_ids": ids}, target_name="t", dtype="float32")
    assert load_file(tmp_path / "out" / "model.safetensors")["d2t"].min() < 0
    assert np.array_equal(load_draft(tmp_path / "out")[1]["draft_ids"], ids)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Eagle3Config(TARGET, 97, 64), "trained_drafts=None"),
        (Eagle3Config(TARGET, 97, 64, num_aux_layers=0, trained_drafts=3), "num_aux_layers=0"),
        (MedusaConfig(97, 64, 2, num_blocks=0), "num_blocks=0"),
        (EagleConfig(ModelConfig("LlamaForCausalLM", 97, 64, 96, 1, 4, 2, 24, 128)), "head_dim=24"),
        (EagleConfig(ModelConfig("LlamaForCausalLM", 97, 64, 96, 1, 4, 2, 16, 128, windows=(8,))), "windows=(8,)"),
        (PardConfig(TARGET, 5), "config=PardConfig"),
        (MLPConfig(97, 64, 32, 3), "parameter 'embeddings.0' has shape None, expected (97, 32)"),
    ],
)
def test_export_refuses_other_configs(tmp_path, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        export_draft(tmp_path / "out", config, {}, target_name="t")
    assert not (tmp_path / "out").exists()
