"""Draft heads as other tools save them: each is the same head as its plain equivalent, or computes what its flags say."""

import dataclasses
import json

import numpy as np
import pytest
import tiny_heads as heads
from head_cases import reads_as, same
from resaved import resave
from tiny import tiny_checkpoint

from convert import Refusal, load_draft, load_folder


@pytest.mark.parametrize("keep", [("lm_head.", "d2t", "t2d", "mask_hidden"), ()], ids=["nemo", "all"])
@pytest.mark.parametrize("make", [heads.eagle, heads.eagle3, heads.p_eagle], ids=lambda make: make.__name__)
def test_a_prefix_before_every_tensor(tmp_path, make, keep):
    def prefixed(name):
        return name if name.startswith(keep) else f"model.{name}"

    folder = resave(make(tmp_path / "src"), prefixed)
    report = reads_as(folder, make(tmp_path / "plain"), tmp_path)
    assert "the tensors were read without their prefix 'model.'" in report.notes


def test_a_head_of_nemo_automodel(tmp_path):
    """Its config.json is the target's but for a few keys, and it has one layer without windows all the same."""

    def theirs(name):
        name = name.replace("midlayer.", "layers.0.")
        return name if name.startswith(("lm_head.", "d2t", "t2d")) else f"model.{name}"

    copied = {"num_hidden_layers": 32, "sliding_window": 8, "layer_types": ["sliding_attention"] * 32}
    keys = {"architectures": ["LlamaEagle3DraftModel"], "fc_norm": True, "norm_output": True, **copied}
    folder = resave(heads.eagle3(tmp_path / "src", fc_norm=True), theirs, **keys)
    config, params = load_draft(folder)
    plain = load_draft(heads.eagle3(tmp_path / "plain", fc_norm=True))
    assert config == dataclasses.replace(plain[0], norm_output=True)
    same(params, plain[1])
    with pytest.raises(Refusal, match="LlamaEagle3DraftModel, mean that the normed output is fed back"):
        load_draft(folder, norm_output="before_head")


def test_an_unknown_prefix_is_named(tmp_path):
    for make in (heads.eagle, heads.eagle3):
        folder = resave(make(tmp_path / make.__name__), lambda name: f"module.draft.{name}")
        with pytest.raises(
            Refusal, match=r"tensor 'module.draft.* with the prefix 'module.draft.'; expected no prefix"
        ):
            load_draft(folder)


def test_a_model_with_drafting_layers_of_its_own_is_no_prefixed_head(tmp_path):
    folder = resave(tiny_checkpoint(tmp_path / "src"), add={"mtp.fc.weight": np.zeros((64, 128), np.float32)})
    with pytest.raises(Refusal, match=r"tensor 'mtp.fc.weight' has no place in LlamaForCausalLM"):
        load_draft(folder)


def test_a_tensor_with_and_without_the_prefix(tmp_path):
    folder = resave(heads.eagle3(tmp_path / "src"), add={"model.fc.weight": np.zeros((64, 192), np.float32)})
    with pytest.raises(Refusal, match=r"both 'fc.weight' and 'model.fc.weight'"):
        load_draft(folder)


# --- vLLM's wrapper


def wrapped(folder, depth=1, add=None, **keys):
    """An EAGLE folder as vLLM's first engine read it."""
    config = json.loads((folder / "config.json").read_text())
    bias = config.pop("bias", True)
    everything = {**dict.fromkeys(config, ...), "bias": ..., "model_type": "eagle", "model": config}
    prefix = "model." * depth

    def theirs(name):
        return name if name.startswith("fc.") else prefix + name

    return resave(folder, theirs, add, **{**everything, "eagle_fc_bias": bias, "truncated_vocab_size": 97, **keys})


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("bias", [None, False], ids=["bias", "no-bias"])
def test_vllms_wrapper(tmp_path, depth, bias):
    unused = {"token_map": np.arange(97), "model.norm.weight": np.ones(64, np.float32)}
    unused |= {"model.lm_head.weight": np.zeros((97, 64), np.float32)}
    folder = wrapped(heads.eagle(tmp_path / "src", bias=bias), depth, unused)
    report = reads_as(folder, heads.eagle(tmp_path / "plain", bias=bias), tmp_path)
    assert "config.json is vLLM's wrapper of an EAGLE config" in report.notes
    with pytest.raises(Refusal, match="holds a draft head"):
        load_folder(folder)


def test_the_outer_config_overrides_the_inner(tmp_path):
    folder = wrapped(heads.eagle(tmp_path / "src"), max_position_embeddings=77)
    assert load_draft(folder)[0].layers.max_position == 77


def test_an_eagle3_head_in_the_wrapper(tmp_path):
    folder = wrapped(heads.eagle3(tmp_path / "src"), eagle_fc_bias=False)
    reads_as(folder, heads.eagle3(tmp_path / "plain"), tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"eagle_fc_bias": False}, "eagle_fc_bias=False: expected true, because tensor 'fc.bias' is there"),
        ({"truncated_vocab_size": 50}, "truncated_vocab_size=50: expected 97.*token_map is not supported"),
        ({"skip_prenorm": False}, "skip_prenorm=False: expected true"),
        ({"add_para_norm": True}, "add_para_norm=True: expected false"),
        ({"model": None}, "model=None: expected an object"),
    ],
)
def test_unsupported_settings_of_the_wrapper_are_refused(tmp_path, keys, words):
    with pytest.raises(Refusal, match=words):
        load_draft(wrapped(heads.eagle(tmp_path / "src"), **keys))


def test_a_wrapper_without_a_head(tmp_path):
    folder = wrapped(heads.eagle(tmp_path / "src"))
    resave(folder, drop=("fc.weight",))
    with pytest.raises(
        Refusal, match=r"model_type='eagle' says that this is an EAGLE head, but 'fc.weight' is missing"
    ):
        load_draft(folder)


# --- speculators, type eagle


def speculators_eagle(folder, **keys):
    """An EAGLE folder as ``speculators`` up to 0.3 saved it."""
    config = json.loads((folder / "config.json").read_text())
    theirs = {"fc.": "fusion_fc.", "layers.0.": "transformer."}

    def renamed(name):
        return next((new + name.removeprefix(old) for old, new in theirs.items() if name.startswith(old)), name)

    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    layers = {key: config[key] for key in (*kept, "rms_norm_eps", "max_position_embeddings", "model_type")}
    written = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": layers,
        "layernorms": False,
        "fusion_bias": config.get("bias", True),
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "the/target"}},
    }
    return resave(folder, renamed, drop=("embed_tokens.weight",), **{**dict.fromkeys(config, ...), **written, **keys})


@pytest.mark.parametrize("bias", [None, False], ids=["hass", "eagle"])
def test_speculators_of_type_eagle(tmp_path, bias):
    folder = speculators_eagle(heads.eagle(tmp_path / "src", bias=bias))
    plain = heads.eagle(tmp_path / "plain", bias=bias, leave_out=("embed_tokens.weight",))
    report = reads_as(folder, plain, tmp_path)
    assert report.recognised.endswith("EAGLE head (speculators format), 1 layer, vocabulary 97, verifier the/target")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"layernorms": True}, "layernorms=True: expected false: with norms around the layer"),
        ({"fusion_bias": False}, "fusion_bias=False: expected true, because tensor 'fc.bias' is there"),
        ({"transformer_layer_architecture": "MixtralDecoderLayer"}, "expected 'LlamaDecoderLayer'"),
    ],
)
def test_unsupported_settings_of_speculators_eagle_are_refused(tmp_path, keys, words):
    with pytest.raises(Refusal, match=words):
        load_draft(speculators_eagle(heads.eagle(tmp_path / "src"), **keys))


# --- Layers
