"""Multi-token prediction layers: read from their target's checkpoint, kept in a converted folder, and what they compute is
what transformers computes."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from greedy_texts import drafted
from mtp_checkpoints import assert_drafts, by_transformers, chained, slots, with_layers
from parity_cases import CASES, DEEPSEEK, GLM, SIZES
from resaved import resave, set_keys
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint

import jspec
from convert import Refusal, convert, load_draft, load_folder
from convert.cli import main
from convert.folders import read_draft_config
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.doctor import diagnose
from jspec.models import build, build_head

L = SIZES["num_hidden_layers"]
SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}


def draft_of(folder, **options):
    """Target and head, as modules."""
    (target, params), (config, drafts) = load_folder(folder), load_draft(folder, mtp=True, **options)
    return build(target, params), build_head(config, drafts)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("DeepseekV3", DEEPSEEK), ("Glm4MoeLite", GLM), CASES["deepseek-yarn"], CASES["glm4-moe"], CASES["glm4-moe-air"]],
)
def test_logits_equal_transformers(tmp_path, family, settings):
    torch, model, mtp = by_transformers(tmp_path, family, settings, 1)
    tokens = np.random.default_rng(1).integers(97, size=40)
    found, _ = slots(*draft_of(tmp_path), jnp.asarray(tokens, jnp.int32))
    with torch.no_grad():
        text = torch.tensor(tokens)[None]
        hidden = model.model(text).last_hidden_state[:, :-1]
        made = mtp.forward_layer(0, hidden, torch.arange(1, len(tokens))[None], None, input_ids=text[:, 1:])
        expected = model.lm_head(made)[0].numpy()
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-5


def test_the_state_that_is_chained_is_that_of_transformers(tmp_path):
    """The second draft of GLM-4.5 reads the first layer's output after its norm, ``shared_head.norm``."""
    torch, model, mtp = by_transformers(tmp_path, *CASES["glm4-moe"], 2)
    tokens = np.random.default_rng(2).integers(97, size=12)
    target, head = draft_of(tmp_path)
    with torch.no_grad():
        text = torch.tensor(tokens)[None]
        state = model.model(text).last_hidden_state[:, :-2]
        first = mtp.forward_layer(0, state, torch.arange(1, 11)[None], None, input_ids=text[:, 1:-1])
        second = mtp.forward_layer(1, first, torch.arange(2, 12)[None], None, input_ids=text[:, 2:])
        expected = model.lm_head(second)[0].numpy()
    found, _ = chained(target, head, tokens, state.numpy(), layers=(0, 1))
    assert np.abs(found - expected).max() / np.abs(expected).max() < 2e-5


@pytest.mark.parametrize("architecture", ["Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
@pytest.mark.parametrize("layers", [1, 2])
def test_mtp_layers_draft_for_their_target(tmp_path, architecture, layers):
    assert_drafts(with_layers(tmp_path / "src", architecture, layers), tmp_path / "out", **SMALL)


def test_a_converted_folder_keeps_them_or_not(tmp_path, capsys):
    folder = with_layers(tmp_path / "src")
    assert main([str(folder), "--dry-run"]) == 0
    assert "note: multi-token prediction layers are kept in mtp/" in capsys.readouterr().out
    assert main([str(folder), str(tmp_path / "kept")]) == 0
    assert "note: multi-token prediction layers are kept in mtp/" in capsys.readouterr().out
    assert main([str(folder), str(tmp_path / "dropped"), "--no-mtp"]) == 0
    assert "note: multi-token prediction layers are left out" in capsys.readouterr().out
    assert not (tmp_path / "dropped" / "mtp").exists()
    config, params = load_draft(folder, mtp=True)
    again, kept = load_draft(tmp_path / "kept" / "mtp")
    assert config == again
    assert params.keys() == kept.keys()
    assert all(np.array_equal(array, kept[name]) for name, array in params.items())
    with pytest.raises(Refusal, match=r"dropped: holds no multi-token prediction layers, which draft='mtp' asks for"):
        jspec.load(tmp_path / "dropped", "mtp", **SMALL)


def test_mtp_layers_are_quantised_with_their_model(tmp_path):
    folder, out = with_layers(tmp_path / "src"), tmp_path / "out"
    report = convert(folder, out, quantize="int8", verify="shapes")
    assert [note for note in report.notes if note.startswith("mtp/: int8 weights verified")]
    assert read_draft_config(out / "mtp").quantization == read_draft_config(out).quantization == "int8"
    drafted(jspec.load(out, "mtp", num_draft_tokens=3, **SMALL), [[3, 4, 5]], most=20)


@pytest.mark.parametrize("keep", [True, None])
def test_a_checkpoint_without_them(tmp_path, keep):
    folder = tiny_checkpoint(tmp_path / "src", "DeepseekV3ForCausalLM")
    with pytest.raises(
        Refusal, match=r"holds no multi-token prediction layers \(tensor 'model.layers.2.eh_proj.weight'\)"
    ):
        jspec.load(folder, "mtp", **SMALL)
    if keep:
        with pytest.raises(Refusal, match="holds no multi-token prediction layers"):
            convert(folder, tmp_path / "out", mtp=True)
    else:
        convert(folder, tmp_path / "out")
    assert (tmp_path / "out").exists() is not keep


def test_norm_output_and_mask_first_choose_how_layers_are_read(tmp_path):
    folder = with_layers(tmp_path / "src")
    convert(folder, tmp_path / "out")
    for path in (folder, tmp_path / "out" / "mtp"):
        for options, wanted in (
            ({}, (True, False)),
            ({"norm_output": "recycled"}, (True, False)),
            ({"norm_output": "before_head", "mask_first": True}, (False, True)),
        ):
            config = read_draft_config(path, mtp=path == folder, **options)
            assert (config.norm_output, config.mask_first) == wanted
    tokens = jnp.asarray(np.random.default_rng(1).integers(97, size=12), jnp.int32)
    usual, _ = slots(*draft_of(folder), tokens)
    plain, _ = slots(*draft_of(folder, norm_output="before_head"), tokens)
    masked, _ = slots(*draft_of(folder, mask_first=True), tokens)
    np.testing.assert_allclose(usual, plain, atol=1e-5)  # what is fed back differs, not what the output head reads
    assert np.abs(usual - masked).max() > 1e-3
    llm = jspec.load(folder, "mtp", norm_output="before_head", mask_first=True, **SMALL)
    [result] = jspec.generate(llm, [[5, 6, 7]], temperature=0, max_tokens=12, ignore_eos=True)
    assert len(result.token_ids) == 12


def test_layers_without_their_target_are_read(tmp_path):
    """As SGLang exports them: a folder without the target, whose class ends with NextN."""
    folder = with_layers(tmp_path / "src")
    alone = tmp_path / "alone"
    alone.mkdir()
    config = json.loads((folder / "config.json").read_text())
    name = f"{config['architectures'][0]}NextN"
    changed = {"architectures": [name], "num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": None}
    (alone / "config.json").write_text(json.dumps({**config, **changed}))
    tensors = load_file(folder / "model.safetensors")
    mine = {n.replace("layers.2.", "layers.0."): a for n, a in tensors.items() if n.startswith("model.layers.2.")}
    save_file(mine, alone / "model.safetensors")
    (config, params), (wanted, whole) = load_draft(alone), load_draft(folder, mtp=True)
    assert config == wanted
    assert all(np.array_equal(array, whole[name]) for name, array in params.items())
    with pytest.raises(Refusal, match="holds a draft head, not a language model"):
        load_folder(alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_first": True}, "mask_first=True is for multi-token prediction layers"),
        ({"norm_output": "recycled"}, "norm_output='recycled' is for EAGLE-3 heads and multi-token prediction layers"),
    ],
)
def test_their_options_are_refused_for_other_checkpoints(tmp_path, options, message):
    folder = tiny_checkpoint(tmp_path / "src")
    with pytest.raises(Refusal, match=message):
        read_draft_config(folder, **options)
    convert(folder, tmp_path / "out")
    with pytest.raises(Refusal, match=message):
        read_draft_config(tmp_path / "out", **options)


def test_the_doctor_examines_the_layers_and_not_their_target(tmp_path):
    """The target itself would be a perfect draft model; its random layers are none."""
    folder = with_layers(tmp_path / "src")
    convert(folder, tmp_path / "out")
    for path in (folder, tmp_path / "out"):
        found = diagnose(path, "mtp", prompts=[[5, 6, 7, 8]], num_draft_tokens=2, max_tokens=24)
        assert found.verdict != "healthy"


def test_layers_that_cannot_be_read_are_left_out_unless_they_are_asked_for(tmp_path):
    folder = with_layers(tmp_path / "src")
    resave(folder, drop=["model.layers.2.enorm.weight"])
    report = convert(folder, tmp_path / "out")
    [note] = [note for note in report.notes if note.startswith("multi-token prediction layers are left out: ")]
    assert "tensor 'model.layers.2.enorm.weight' is missing" in note
    assert not (tmp_path / "out" / "mtp").exists()
    with pytest.raises(Refusal, match=r"enorm\.weight' is missing"):
        convert(folder, tmp_path / "kept", mtp=True)


def test_an_absurd_config_is_refused_quickly(tmp_path):
    """Names of layers and indices of rows are made for what the files hold, not for what config.json says."""
    folder = with_layers(tmp_path / "src")
    for changes, message in (
        ({"num_nextn_predict_layers": 2**31 - 1}, "num_nextn_predict_layers=2147483647: expected an integer"),
        (
            {"num_nextn_predict_layers": 1, "num_attention_heads": 2**27, "num_key_value_heads": 2**27},
            r"q_b_proj\.weight' has shape",
        ),
    ):
        set_keys(folder, **changes)
        with pytest.raises(Refusal, match=message):
            Checkpoint.open(folder).hugging_face.require_match()
