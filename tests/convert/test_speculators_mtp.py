"""A layer for multi-token prediction in the speculators format: golden/mtp.npz has folders that speculators 0.9.0 wrote, and
the logits of its own forward pass."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from golden_blocks import Lender, assert_close, checkpoint, golden, head_of
from greedy_texts import drafted
from mtp_checkpoints import chained
from resaved import resave
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

import jspec
from convert import Refusal, convert, load_draft
from jspec.checkpoints.checkpoint import Checkpoint

KINDS = ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_package(tmp_path, kind):
    """Three drafts at every position, of which each reads the output of the one before."""
    original = golden(f"mtp/{kind}")
    head, (drafts, count, _) = head_of(checkpoint(tmp_path / "head", f"mtp/{kind}")), original["logits"].shape
    for k in range(drafts):
        features = jnp.asarray(original["features"][:, :count])
        logits, _ = chained(Lender(f"mtp/{kind}"), head, original["token_ids"], features, layers=(0,) * (k + 1))
        assert_close(logits, original["logits"][k])


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_folder_holds_the_same(tmp_path, kind):
    folder = checkpoint(tmp_path / "head", f"mtp/{kind}")
    assert Checkpoint.open(folder).target_name == "target"
    convert(folder, tmp_path / "out", verify="shapes")
    (config, params), (again, kept) = load_draft(folder), load_draft(tmp_path / "out")
    assert config == again
    assert params.keys() == kept.keys()
    assert all(np.array_equal(array, kept[name]) for name, array in params.items())


def test_the_folder_drafts_for_its_target(tmp_path):
    """Its config.json names the target, whose embedding and output head it borrows."""
    folder = checkpoint(tmp_path / "head", "mtp/qwen3")
    sizes = {key: json.loads((folder / "config.json").read_text())["transformer_layer_config"][key] for key in SIZES}
    target = tiny_checkpoint(tmp_path / "target", "Qwen3ForCausalLM", **sizes)
    raw = json.loads((folder / "config.json").read_text())
    raw["speculators_config"]["verifier"]["name_or_path"] = str(target)
    (folder / "config.json").write_text(json.dumps(raw))
    llm = jspec.load(folder, num_draft_tokens=3, dtype="float32", max_batch=1, max_len=32, page_size=16)
    assert llm.method == "mtp"
    drafted(llm, [[3, 4, 5]], most=12, each=False)
    with pytest.raises(Refusal, match="holds a draft head, not a language model"):
        Checkpoint.open(folder).language_model()


SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        (
            {"num_nextn_predict_layers": 2},
            {},
            r"num_nextn_predict_layers=2: expected 1, as the speculators format has one",
        ),
        ({"transformer_layer_config": None}, {}, r"transformer_layer_config=None: expected an object"),
        (
            {"transformer_layer_config": {"model_type": "llama"}},
            {},
            r"_config\.model_type='llama': expected one of qwen3, qwe",
        ),
        ({"transformer_layer_config": {"model_type": "qwen3"}}, {}, r"transformer_layer_config\.vocab_size is missing"),
        ({}, {"norm_output": "before_head"}, "norm_output='before_head': the speculators format means"),
        ({}, {"aux_convention": "input_of"}, "aux_convention='input_of' is for EAGLE-3 heads"),
    ],
)
def test_what_the_format_does_not_have_is_refused(tmp_path, keys, options, message):
    with pytest.raises(Refusal, match=message):
        load_draft(checkpoint(tmp_path / "head", "mtp/qwen3", **keys), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_a_misshapen_and_a_further_tensor_are_named(tmp_path, kind):
    folder = checkpoint(tmp_path / "head", f"mtp/{kind}")
    tensors = load_file(folder / "model.safetensors")
    for name, array in tensors.items():
        for changed, said in (({}, "is missing"), ({name: array[:-1]}, r"has shape|but config\.json asks")):
            write_weights(folder, {other: a for other, a in tensors.items() if other != name} | changed)
            with pytest.raises(Refusal, match=f"{said}"):
                load_draft(folder)
    write_weights(folder, {**tensors, "mtp_layers.1.input_proj.weight": tensors["mtp_layers.0.input_proj.weight"]})
    with pytest.raises(Refusal, match=r"tensor 'mtp_layers\.1\.input_proj\.weight' has no place"):
        load_draft(folder)


def test_copies_of_the_targets_weights_are_left_out(tmp_path):
    folder = checkpoint(tmp_path / "head", "mtp/qwen3")
    _, params = load_draft(folder)
    resave(folder, add=dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), np.ones((53, 16), np.float32)))
    assert load_draft(folder)[1].keys() == params.keys()


def test_the_first_embedding_may_be_masked(tmp_path):
    config, _ = load_draft(checkpoint(tmp_path / "head", "mtp/qwen3"), mask_first=True, norm_output="recycled")
    assert (config.mask_first, config.norm_output) == (True, True)
