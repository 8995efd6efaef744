"""The layer for multi-token prediction of Qwen3.5 and Qwen3-Next: found by its tensors, read, converted, and computed as
published."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hybrid_checkpoints import save_hybrid
from mtp_checkpoints import assert_drafts, chained, slots, with_layers
from resaved import resave, set_keys
from safetensors.numpy import load_file
from tiers import in_tiers
from tiny import tiny_checkpoint

from convert import Refusal, convert, load_draft, load_folder
from convert.cli import main
from convert.folders import read_draft_config
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.export import export_draft
from jspec.config import Rope
from jspec.models import build, build_head

SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 64}
FAMILIES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")


def modules(folder):
    (target, params), (config, drafts) = load_folder(folder, "float32"), load_draft(folder, "float32", mtp=True)
    return build(target, params), build_head(config, drafts)


@pytest.mark.parametrize("where", ["source", "converted"])
@pytest.mark.parametrize(
    ("case", "stacked"),
    [
        ("qwen3.5", False),
        ("qwen3.5-tied", False),
        ("qwen3.5-yarn", False),
        ("qwen3.5-moe", False),
        ("qwen3.5-moe-listed", True),
        ("qwen3-next", False),
        ("qwen3-next-some-layers", False),
    ],
)
def test_logits_equal_a_computation_by_the_published_equations(tmp_path, case, stacked, where):
    pytest.importorskip("torch")
    if (
        case == "qwen3-next"
    ):  # whose layers with attention have no experts, and its layer for multi-token prediction has some
        reference = save_hybrid(tmp_path / "src", case, mlp_only_layers=[1])
    else:
        reference = save_hybrid(tmp_path / "src", case, stacked=stacked)
    target, head = modules(tmp_path / "src")
    if where == "converted":
        convert(tmp_path / "src", tmp_path / "out", dtype="float32")
        head = build_head(*load_draft(tmp_path / "out" / "mtp"))
    assert head.config.norm_output
    assert head.config.resolved_aux_layers(target.config) == ()
    assert not head.config.layers.has_delta_net(0)
    tokens = np.random.default_rng(1).integers(97, size=140)
    found, hidden = slots(target, head, jnp.asarray(tokens, jnp.int32))
    features = reference.features(tokens)
    assert np.abs(np.asarray(hidden) - features.numpy()).max() < 2e-5 * np.abs(features.numpy()).max()
    _, expected = reference.slots(tokens[1:], features[:, :-1])
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-5


@pytest.mark.parametrize("fault", ["the feature before the embedding", "a feature without its norm"])
def test_other_inputs_of_the_layer_are_detected(tmp_path, fault):
    pytest.importorskip("torch")
    reference = save_hybrid(tmp_path, "qwen3.5")
    tokens = np.random.default_rng(1).integers(97, size=40)
    features = reference.features(tokens)
    _, expected = reference.slots(tokens[1:], features[:, :-1])
    if fault == "the feature before the embedding":
        name, change = "mtp.fc.weight", lambda array: np.roll(array, array.shape[1] // 2, axis=1)
    else:
        name, change = "mtp.pre_fc_norm_hidden.weight", np.zeros_like
    resave(tmp_path, add=lambda stored: {name: change(stored[name])})
    found, _ = slots(*modules(tmp_path), jnp.asarray(tokens, jnp.int32))
    assert np.abs(found - expected).max() / np.abs(expected).max() > 1e-2


def test_the_state_that_is_chained_is_normed(tmp_path):
    """A second draft reads what the first one's output head read."""
    pytest.importorskip("torch")
    reference = save_hybrid(tmp_path, "qwen3.5-moe", stacked=True)
    target, head = modules(tmp_path)
    tokens = np.random.default_rng(2).integers(97, size=12)
    first, _ = reference.slots(tokens[1:-1], reference.features(tokens)[:, :-2])
    second, expected = reference.slots(tokens[2:], first)
    found, hidden = chained(target, head, tokens, reference.features(tokens)[:, :-2].numpy(), layers=(0, 0))
    np.testing.assert_allclose(hidden, second.numpy(), atol=2e-5 * float(np.abs(second.numpy()).max()))
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("architecture", in_tiers(FAMILIES, test=["Qwen3_5MoeForCausalLM"]))
def test_the_layer_drafts_for_its_target(tmp_path, architecture):
    assert_drafts(with_layers(tmp_path / "src", architecture), tmp_path / "out", **SMALL)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_tensors_say_whether_there_is_one(tmp_path, architecture, capsys):
    """Quantised exports announce none and drop it, and Qwen3-Next has no key for it."""
    folder = with_layers(tmp_path / "src", architecture)
    wanted = load_draft(folder, mtp=True)
    for count in (..., 0, 1):
        set_keys(folder, mtp_num_hidden_layers=count)
        config, params = load_draft(folder, mtp=True)
        assert config == wanted[0]
        assert all(np.array_equal(array, wanted[1][name]) for name, array in params.items())
        assert main([str(folder), "--dry-run"]) == 0
        assert "note: multi-token prediction layers are kept in mtp/" in capsys.readouterr().out
    resave(folder, drop=[name for name in load_file(folder / "model.safetensors") if name.startswith("mtp.")])
    with pytest.raises(Refusal, match=r"holds no multi-token prediction layers \(tensor 'mtp\.fc\.weight'\)"):
        load_draft(folder, mtp=True)
    convert(folder, tmp_path / "out")
    assert not (tmp_path / "out" / "mtp").exists()


def test_a_multimodal_checkpoint_keeps_its_layer(tmp_path):
    """The tensors of its text model begin otherwise than those of the layer."""
    folder = with_layers(tmp_path / "src", "Qwen3_5MoeForCausalLM")
    wanted = load_draft(folder, mtp=True)
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    inner = {**text, "architectures": None, "model_type": "qwen3_5_moe_text"}
    (folder / "config.json").write_text(json.dumps({**outer, "text_config": inner, "vision_config": {"depth": 1}}))
    added = {"model.visual.blocks.0.weight": np.ones(3, np.float32)}
    resave(folder, lambda name: re.sub(r"^model\.", "model.language_model.", name), added)
    found = load_draft(folder, mtp=True)
    assert found[0] == wanted[0]
    assert all(np.array_equal(array, wanted[1][name]) for name, array in found[1].items())
    convert(folder, tmp_path / "out")
    assert load_draft(tmp_path / "out" / "mtp")[0] == wanted[0]
    assert Checkpoint.open(folder).kind == "language_model"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_layer_is_quantised_with_its_model(tmp_path, architecture):
    folder = with_layers(tmp_path / "src", architecture)
    report = convert(folder, tmp_path / "out", quantize="int8", verify="shapes")
    assert [note for note in report.notes if note.startswith("mtp/: int8 weights verified")]
    assert read_draft_config(tmp_path / "out" / "mtp").quantization == "int8"


@pytest.mark.parametrize(
    "name", ["mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight"]
)
def test_a_layer_that_lacks_a_tensor_is_named(tmp_path, name):
    folder = resave(with_layers(tmp_path / "src", "Qwen3_5ForCausalLM"), drop=[name])
    what = f"tensor '{name}' is missing" if name != "mtp.fc.weight" else "holds no multi-token prediction layers"
    with pytest.raises(Refusal, match=what):
        load_draft(folder, mtp=True)
    load_folder(folder)  # the model itself is whole


def test_a_tensor_that_the_layer_has_no_place_for_is_named(tmp_path):
    folder = with_layers(tmp_path / "src", "Qwen3_5ForCausalLM")
    resave(folder, add=lambda stored: {"mtp.embed_tokens.weight": stored["model.embed_tokens.weight"]})
    with pytest.raises(Refusal, match=r"tensor 'mtp\.embed_tokens\.weight' has no place"):
        load_draft(folder, mtp=True)


def test_the_layout_of_layers_alone_is_refused(tmp_path):
    """It has the names of layers behind the last, and states sizes and a rotary embedding alone."""
    folder = with_layers(tmp_path / "src", "Qwen3_5ForCausalLM")
    config, params = load_draft(folder, mtp=True)
    with pytest.raises(ValueError, match=r"rope=.*: expected a rotary embedding of whole heads"):
        export_draft(tmp_path / "alone", config, params, target_name="target")
    config = dataclasses.replace(config, layers=dataclasses.replace(config.layers, rope=Rope()))
    with pytest.raises(ValueError, match="architecture='Qwen3_5ForCausalLM': expected that of layers of which sizes"):
        export_draft(tmp_path / "alone", config, params, target_name="target")
    assert not (tmp_path / "alone").exists()
    set_keys(folder, architectures=["Qwen3_5ForCausalLMNextN"])
    with pytest.raises(Refusal, match=r"architectures=.*expected that of the target: multi-token prediction layers of"):
        load_draft(folder)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_layers_that_their_layout_cannot_state_are_not_exported(tmp_path, architecture):
    config, params = load_draft(with_layers(tmp_path / "src", architecture), mtp=True)
    with pytest.raises(ValueError, match="the layout of layers alone states nothing else"):
        export_draft(tmp_path / "alone", config, params, target_name="target")


def test_a_model_without_the_layer_is_read_as_before(tmp_path):
    folder = tiny_checkpoint(tmp_path, "Qwen3NextForCausalLM")
    assert Checkpoint.open(folder).hugging_face.unused == []
