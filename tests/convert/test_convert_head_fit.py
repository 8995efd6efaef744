"""Whether a draft head fits a target."""

import pytest
import tiny_heads as heads
from tiny import tiny_checkpoint

from convert import Refusal, convert, read_draft_config
from convert.cli import main
from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config, MedusaConfig, MLPConfig, PardConfig

TARGET = ModelConfig("LlamaForCausalLM", 97, 64, 96, 8, 4, 2, 16, 256)


@pytest.mark.parametrize(
    ("make", "keys", "target", "numbers"),
    [
        (heads.eagle, {}, {"hidden_size": 80, "head_dim": 20}, ("hidden size", "64", "80")),
        (heads.mlp_speculator, {}, {"hidden_size": 80, "head_dim": 20}, ("hidden size", "64", "80")),
        (heads.medusa, {"version": "2"}, {"hidden_size": 80, "head_dim": 20}, ("hidden size", "64", "80")),
        (heads.eagle3, {}, {"vocab_size": 98, "num_hidden_layers": 8}, ("vocabulary", "97", "98")),
        (heads.medusa, {}, {"vocab_size": 98}, ("vocabulary", "97", "98")),
        (heads.eagle3, {}, {"num_hidden_layers": 3}, ("3 auxiliary hidden states", "3 layers", "2 by default")),
        (
            heads.speculators,
            {"eagle_aux_hidden_state_layer_ids": [1, 4, 9]},
            {"num_hidden_layers": 8},
            ("(1, 4, 9)", "8 layers"),
        ),
        (
            heads.eagle3,
            {"hidden_size": 48, "target_hidden_size": 64, "leave_out": ("embed_tokens.weight",)},
            {},
            ("48", "64"),
        ),
    ],
)
def test_a_head_of_another_target_is_refused(tmp_path, capsys, make, keys, target, numbers):
    src, model = make(tmp_path / "src", **keys), tiny_checkpoint(tmp_path / "target", **target)
    assert main([str(src), str(tmp_path / "out"), "--target", str(model)]) == 2
    error = capsys.readouterr().err
    assert main([str(src), "--dry-run", "--target", str(model)]) == 2
    assert capsys.readouterr().err == error
    for number in numbers:
        assert number in error
    assert not (tmp_path / "out").exists()


def test_a_compatible_target_is_accepted(tmp_path):
    target = tiny_checkpoint(tmp_path / "target", num_hidden_layers=8)
    convert(heads.eagle3(tmp_path / "src"), tmp_path / "out", target=target)
    model, head = read_draft_config(target), read_draft_config(tmp_path / "out")
    assert isinstance(model, ModelConfig)
    assert isinstance(head, Eagle3Config)
    assert head.resolved_aux_layers(model) == (2, 4, 5)
    with pytest.raises(Refusal, match="a language model, not a draft head"):
        convert(target, tmp_path / "again", target=target)
    with pytest.raises(Refusal, match="holds a draft head"):
        convert(tmp_path / "src", tmp_path / "again", target=tmp_path / "out")


def test_require_fit_ignores_padding_of_a_vocabulary():
    PardConfig(ModelConfig("LlamaForCausalLM", 120, 32, 96, 2, 4, 2, 8, 128), 5).require_fit(TARGET)
    MedusaConfig(None, 64, 2, own_head=False).require_fit(TARGET)
    MLPConfig(97, 64, 32, 3).require_fit(TARGET)
