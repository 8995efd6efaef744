"""Draft heads that are refused: the message names the file, what is wrong, and both numbers."""

import json

import numpy as np
import pytest
import tiny_heads as heads
from resaved import resave, set_keys
from safetensors.numpy import load_file
from tiny import tiny_checkpoint

from convert import Refusal, convert, load_draft, read_draft_config
from convert.cli import main


def with_tensors(src, **changes):
    """``src`` with tensors replaced (``__`` stands for a dot), or removed where the new one is None."""
    changed = {name.replace("__", "."): array for name, array in changes.items()}
    added = {name: array for name, array in changed.items() if array is not None}
    return resave(src, add=added, drop=changed.keys() - added.keys())


def refuses(src, *parts, **arguments):
    """Assert that reading ``src`` is refused, with ``parts`` in the sentence."""
    with pytest.raises(Refusal) as refusal:
        load_draft(src, **arguments)
    for part in (str(src).rsplit("/", 1)[0], *parts):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "changes", "parts"),
    [
        ({"bias": True}, {"fc__bias": None}, ("bias=True", "'fc.bias' is missing")),
        ({"bias": False}, {"fc__bias": np.zeros(64, np.float32)}, ("bias=False", "'fc.bias' is there")),
        (
            {"qkv_bias": True},
            {"layers__0__self_attn__q_proj__bias": None},
            ("qkv_bias=True", "q_proj.bias' is missing"),
        ),
        ({}, {"fc__weight": np.zeros((64, 192), np.float32)}, ("'fc.weight'", "[64, 192]", "[64, 128]")),
        ({}, {"layers__0__input_layernorm__weight": np.ones(64, np.float32)}, ("input_layernorm", "no place")),
        ({}, {"layers__0__mlp__up_proj__weight": None}, ("up_proj", "missing", "EAGLE head")),
        ({"num_hidden_layers": 0}, {}, ("num_hidden_layers=0",)),
        ({"rope_scaling": {"type": "ntk"}}, {}, ("rope_scaling.type='ntk'",)),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ("quantised", "FP8")),
        ({"hidden_act": "gelu"}, {}, ("hidden_act='gelu'",)),
    ],
)
def test_eagle(tmp_path, keys, changes, parts):
    src = with_tensors(heads.eagle(tmp_path / "src", **{"bias": keys.get("bias"), **keys}), **changes)
    refuses(set_keys(src, **keys), *parts)


def test_bias_that_config_does_not_mention_is_decided_by_the_tensor(tmp_path):
    with_bias = heads.eagle(tmp_path / "with")
    without = with_tensors(heads.eagle(tmp_path / "without"), fc__bias=None)
    assert read_draft_config(with_bias).fuse_bias
    assert not read_draft_config(without).fuse_bias


@pytest.mark.parametrize(
    ("keys", "changes", "parts"),
    [
        ({"logit_scale": 0.5}, {}, ("logit_scale=0.5", "1")),
        ({"eagle_config": {"use_mtp_layernorm": True}}, {}, ("eagle_config.use_mtp_layernorm=True",)),
        ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, {}, ("use_input_layernorm_in_first_layer",)),
        ({"eagle_config": {"use_last_layernorm": False}}, {}, ("use_last_layernorm=False", "'norm.weight' is there")),
        ({}, {"norm__weight": None}, ("'norm.weight' is missing",)),
        ({"bias": False}, {"fc__bias": np.zeros(64, np.float32)}, ("bias=False", "'fc.bias' is there")),
        ({"architectures": ["LlamaEagleDraftModel"]}, {}, ("architectures", "a draft head that jspec knows")),
        ({"num_hidden_layers": 2}, {}, ("num_hidden_layers=2", "1, as many layers as the files hold")),
        ({"layer_types": ["sliding_attention"]}, {}, ("layer_types", "a sliding_window")),
        ({"eagle_config": {"parallel_draft_step": 4}}, {}, ("parallel_draft_step=4",)),
        ({"kv_lora_rank": 16}, {}, ("MLA",)),
        ({"norm_before_fc": True}, {}, ("norm_before_fc=True", "'input_norm.weight' is missing")),
        ({"fc_norm": True}, {}, ("fc_norm=True", "'fc_norm.0.weight' is missing")),
        ({"fc_norm": False}, {"fc_norm__0__weight": np.ones(64, np.float32)}, ("fc_norm=False", "is there")),
        ({"attention_bias": True}, {}, ("attention_bias=True", "q_proj.bias' is missing")),
        ({"num_aux_hidden_states": 4}, {}, ("num_aux_hidden_states=4", "3")),
        ({"target_hidden_size": 80}, {}, ("'fc.weight' reads 192", "80")),
        ({}, {"fc__weight": None}, ("'fc.weight' is missing", "use_aux_hidden_state=false")),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, ("'fc.weight' has no place",)),
        ({"draft_vocab_size": 41}, {}, ("draft_vocab_size=41", "40")),
        ({"vocab_size": 39}, {"embed_tokens__weight": None}, ("draft_vocab_size=40", "39")),
        ({}, {"d2t": None}, ("'d2t' is missing",)),
        ({"vocab_size": 2**30}, {}, (f"vocab_size={2**30}", f"{2**24}")),
        ({}, {"lm_head__weight": None}, ("draft_vocab_size=40", "97")),
        ({"architectures": ["Eagle3Qwen3ForCausalLM"]}, {}, ("architectures", "query and key norms")),
        ({"parallel_drafting": True}, {}, ("parallel", "'mask_hidden' is missing")),
        ({}, {"mask_hidden": np.zeros((1, 192), np.float32)}, ("mask_token_id", "ptd_token_id")),
        ({}, {"midlayer__hidden_norm__weight": None}, ("midlayer.hidden_norm.weight", "missing")),
    ],
)
def test_eagle3(tmp_path, keys, changes, parts):
    refuses(set_keys(with_tensors(heads.eagle3(tmp_path / "src"), **changes), **keys), *parts)


def test_more_layer_ids_than_streams(tmp_path):
    src = set_keys(heads.eagle3(tmp_path / "src"), eagle_aux_hidden_state_layer_ids=[1, 3, 3])
    refuses(src, "eagle_aux_hidden_state_layer_ids=[1, 3, 3]", "3 different layer ids", aux_convention="input_of")
    src = set_keys(src, eagle_aux_hidden_state_layer_ids=[1, -3, 3])
    refuses(src, "at least 0", aux_convention="input_of")


def test_mask_slots(tmp_path):
    refuses(set_keys(heads.p_eagle(tmp_path / "none"), ptd_token_id=None), "mask_token_id", "ptd_token_id")
    refuses(set_keys(heads.p_eagle(tmp_path / "out"), ptd_token_id=97), "ptd_token_id=97", "0..96")
    both = set_keys(heads.p_eagle(tmp_path / "both"), mask_token_id=7, dflash_config={"mask_token_id": 8})
    assert read_draft_config(both).mask_token_id == 8  # the first name counts
    assert read_draft_config(set_keys(both, dflash_config=None)).mask_token_id == 7
    for text in ("seven", "-1", "1.0", ""):
        refuses(set_keys(heads.p_eagle(tmp_path / "text"), ptd_token_id=text), f"ptd_token_id={text!r}", "0..96")
    wrong = with_tensors(heads.p_eagle(tmp_path / "wrong"), mask_hidden=np.zeros((1, 1, 64), np.float32))
    refuses(wrong, "'mask_hidden'", "64", "[192]")


def moved(row, by):
    def change(d2t, t2d):
        d2t[row] += by

    return change


def unmarked(d2t, t2d):
    t2d[np.flatnonzero(t2d)[0]] = False


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (moved(0, 97), ("draft token 0 at token", "vocabulary of 97")),
        (moved(0, -50), ("draft token 0 at token -", "vocabulary of 97")),
        (lambda d2t, t2d: d2t.__setitem__(1, d2t[0] - 1), ("draft tokens 0 and 1 both at token",)),
        (unmarked, ("t2d marks 39 tokens and d2t reaches 40",)),
    ],
)
def test_draft_vocabulary(tmp_path, change, parts):
    src = heads.eagle3(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    d2t, t2d = np.array(tensors["d2t"]), np.array(tensors["t2d"])
    change(d2t, t2d)
    refuses(with_tensors(src, d2t=d2t, t2d=t2d), *parts)
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"d2t": np.zeros(41, np.int64)}, ("'d2t' is int64 [41]", "[40]")),
        ({"d2t": np.zeros(40, np.float32)}, ("'d2t' is float32 [40]",)),
        ({"t2d": np.zeros(96, bool)}, ("'t2d' is bool [96]", "[97]")),
        ({"norm__weight": np.ones(64, np.int64)}, ("'norm.weight' is stored as int64",)),
    ],
)
def test_forms_of_integer_tensors(tmp_path, changes, parts):
    refuses(with_tensors(heads.eagle3(tmp_path / "src"), **changes), *parts)


def test_map_of_a_whole_vocabulary(tmp_path):
    src = heads.eagle3(tmp_path / "src", draft_vocab_size=97)
    config, params = load_draft(with_tensors(src, d2t=np.zeros(97, np.int64), t2d=np.ones(97, bool)))
    assert not config.reduced
    assert "draft_ids" not in params
    refuses(
        with_tensors(src, d2t=np.eye(1, 97, dtype=np.int64)[0] - np.eye(1, 97, 1, dtype=np.int64)[0]),
        "d2t moves 2 tokens",
        "97",
    )


@pytest.mark.parametrize("kind", ["mlp"])
def test_other_speculators(tmp_path, kind):
    src = set_keys(heads.speculators(tmp_path / "src"), speculators_model_type=kind)
    refuses(src, f"speculators_model_type='{kind}'", "eagle3, peagle, eagle", "dspark, xpress, mtp;")


@pytest.mark.parametrize(
    "keys",
    [
        {"architectures": ["LlamaForCausalLMEagle4"]},
        {"architectures": ["Eagle4Qwen3ForCausalLM"]},
        {"model_type": "eagle-4"},
        {"speculators_model_type": "eagle4"},
    ],
)
@pytest.mark.parametrize("write", [heads.eagle, heads.eagle3, heads.speculators], ids=lambda write: write.__name__)
def test_eagle4(tmp_path, write, keys):
    """Whatever tensors they have, the reason is the licence."""
    refuses(set_keys(write(tmp_path / "src"), **keys), "EAGLE-4 heads, whose code is source-available", "not supported")


OWN_CLASS = {
    heads.eagle: "EagleLlamaForCausalLM",
    heads.eagle3: "LlamaForCausalLMEagle3",
    heads.p_eagle: "PeagleLlamaForCausalLM",
    heads.speculators: "Eagle3Speculator",
    heads.medusa: "MedusaModel",
}


@pytest.mark.parametrize("write", OWN_CLASS, ids=lambda write: write.__name__)
@pytest.mark.parametrize(
    "name", ["NewForCausalLM", "LlamaForCausalLMEagle3Gated", "Eagle3NewForCausalLM", "DFlashDraftModel2"]
)
def test_unknown_class_with_the_tensors_of_a_known_head(tmp_path, write, name):
    src = set_keys(write(tmp_path / "src"), architectures=[OWN_CLASS[write], name])
    refuses(src, "architectures=", name[:10], "the class of a draft head that jspec knows", OWN_CLASS[write])


@pytest.mark.parametrize("write", OWN_CLASS, ids=lambda write: write.__name__)
@pytest.mark.parametrize("names", [..., None, [], "its own"])
def test_class_that_is_known_or_missing(tmp_path, write, names):
    expected = read_draft_config(write(tmp_path / "src"))
    given = [OWN_CLASS[write]] if names == "its own" else names
    assert read_draft_config(set_keys(write(tmp_path / "head"), architectures=given)) == expected


@pytest.mark.parametrize("write", [heads.eagle, heads.eagle3, heads.medusa], ids=lambda write: write.__name__)
def test_class_of_the_target(tmp_path, write):
    """Authors publish heads with the config of their target."""
    keys = (
        {"architectures": ["Qwen3MoeForCausalLM"]}
        if write is not heads.eagle3
        else {"architectures": ["LlamaForCausalLM"]}
    )
    assert read_draft_config(set_keys(write(tmp_path / "src"), **keys)) == read_draft_config(write(tmp_path / "own"))


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"norm_before_residual": ...}, ("norm_before_residual is missing",)),
        ({"transformer_layer_config": None}, ("transformer_layer_config=None",)),
        (
            {"transformer_layer_config": {"model_type": "deepseek_v3"}},
            ("model_type='deepseek_v3'", "llama, qwen2, qwen3"),
        ),
        ({"transformer_layer_config": {"hidden_size": 64}}, ("transformer_layer_config.model_type is missing",)),
        ({"speculators_model_type": "peagle"}, ("parallel", "'mask_hidden' is missing")),
    ],
)
def test_speculators(tmp_path, keys, parts):
    refuses(set_keys(heads.speculators(tmp_path / "src"), **keys), *parts)


def test_speculators_mask_without_its_kind(tmp_path):
    src = set_keys(heads.speculators(tmp_path / "src", "peagle"), speculators_model_type="eagle3")
    refuses(src, "'peagle'", "mask_hidden")


@pytest.mark.parametrize(
    ("keys", "changes", "parts"),
    [
        ({"n_predict": 4}, {}, ("speculator.emb.3.weight", "missing")),
        ({"n_predict": 2}, {}, ("speculator.", "no place")),
        ({"inner_dim": 48}, {}, ("[97, 32]", "[97, 48]")),
        ({"emb_dim": None}, {}, ("emb_dim is missing",)),
        (
            {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]},
            {},
            ("architectures=['ArcticLSTM", "MLPSpeculatorPre"),
        ),
        ({"method": "sum_lstm"}, {}, ("method='sum_lstm'", "'sum_rnn' or nothing")),
        (
            {"tie_weights": True},
            {},
            ("tie_weights is true", "speculator.emb.1.weight differs from speculator.emb.0.weight"),
        ),
    ],
)
def test_mlp_speculator(tmp_path, keys, changes, parts):
    refuses(set_keys(with_tensors(heads.mlp_speculator(tmp_path / "src"), **changes), **keys), *parts)


@pytest.mark.parametrize(
    ("keys", "changes", "parts"),
    [
        ({"medusa_num_layers": 2}, {}, ("medusa_num_layers=2", "1")),
        ({"vocab_size": 96}, {}, ("vocab_size=96", "97")),
        ({"truncated_vocab_size": 50}, {}, ("truncated_vocab_size=50", "97")),
        ({"original_lm_head": True}, {}, ("original_lm_head=True", "share an output head")),
        ({"hydra_num_heads": 3}, {}, ("Hydra heads are not supported",)),
        ({}, {"1__1__weight": None}, ("'1.1.weight' is missing",)),
        ({}, {"2__0__linear__bias": None}, ("'2.0.linear.bias' is missing",)),
        ({}, {"medusa_head__0__0__linear__weight": np.zeros((64, 64), np.float32)}, ("inside a whole model",)),
    ],
)
def test_medusa(tmp_path, keys, changes, parts):
    refuses(set_keys(with_tensors(heads.medusa(tmp_path / "src"), **changes), **keys), *parts)


def test_pard(tmp_path):
    refuses(heads.pard(tmp_path / "src", pard_token=97), "mask_token_id=97", "0..96")
    refuses(heads.pard(tmp_path / "two", pard2_scale=0.02), "PARD-2 models are not supported")


def test_logits_of_a_head_have_no_reference(tmp_path, capsys):
    src = heads.eagle(tmp_path / "src")
    assert main([str(src), str(tmp_path / "out"), "--verify", "logits"]) == 2
    assert "transformers, which has no model for the EAGLE head" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_convention_where_there_are_no_ids(tmp_path):
    refuses(heads.eagle(tmp_path / "src"), "aux_convention='input_of' is for EAGLE-3", aux_convention="input_of")
    convert(tiny_checkpoint(tmp_path / "model"), tmp_path / "out")
    refuses(tmp_path / "out", "aux_convention='input_of' is for EAGLE-3", aux_convention="input_of")


def test_damaged_head_of_a_converted_folder(tmp_path, monkeypatch):
    convert(heads.eagle3(tmp_path / "src"), tmp_path / "out")
    monkeypatch.setattr("jspec.checkpoints.converted.manifest.own_digest", lambda manifest: manifest["manifest_sha256"])
    file = tmp_path / "out" / "manifest.json"
    manifest = json.loads(file.read_text())
    for changed in ({"kind": "Head"}, {"config": {}}, {"config": {**manifest["head"]["config"], "num_aux_layers": -1}}):
        file.write_text(json.dumps({**manifest, "head": {**manifest["head"], **changed}}))
        refuses(tmp_path / "out", "manifest.json: head is damaged")
