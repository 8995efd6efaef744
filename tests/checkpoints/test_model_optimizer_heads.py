"""EAGLE-3 heads that NVIDIA Model Optimizer trains and exports: what config.json says is enough, and the logits are its own.

The library runs in a process of its own, because importing it changes torch. It writes target and head, and computes one
causal pass of its ``EagleModule`` over the hidden states that its hooks collect."""

import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest
from children import run_library
from resaved import set_keys
from tiers import in_tiers
from tiny_heads import eagle3

from convert import Refusal, load_draft, load_folder
from convert.folders import read_draft_config
from jspec.checkpoints.layouts.options import OpenSetting
from jspec.models import build, build_head
from jspec.models.kv_cache import CausalView

# The norm of embeddings has weights of 1, as before training: version 0.47 applies it to the fused hidden states, too, in
# front of their own norm, which no reader of such heads does.
LIBRARY = """
import copy, json, os, sys
import numpy as np, torch, transformers
import modelopt.torch.speculative as speculative
from modelopt.torch.speculative.config import EAGLE3_DEFAULT_CFG
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

def random(module):
    for name, parameter in module.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)

root = os.getcwd()
for number, (more, layers) in enumerate(json.loads(sys.argv[1])):
    os.makedirs(f"{root}/{number}")
    os.chdir(f"{root}/{number}")
    torch.manual_seed(0)
    sizes = dict(intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=8, **sizes)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        random(model)
        model.save_pretrained("target")
        config = copy.deepcopy(EAGLE3_DEFAULT_CFG["config"]) | {"eagle_use_torch_compile": False} | more
        config["eagle_architecture_config"] |= {**sizes, "torch_dtype": "float32", **layers}
        speculative.convert(model, [("eagle", config)])
        model, head = model.float().eval(), model.eagle_module
        random(head)
        head.layers[0].input_layernorm.weight.fill_(1)
        if hasattr(head, "d2t"):
            head.d2t.copy_(torch.randperm(97)[:len(head.d2t)].sort().values - torch.arange(len(head.d2t)))
        model.get_exporter().export("head")
        head.rotary_emb = LlamaRotaryEmbedding(config=model.eagle_config)  # which is what it would make of this config
        tokens = torch.randint(3, 97, (1, 21))
        model.model(tokens[:, :-1])
        features = head.fc(model.pop_and_gather_aux_hiddens())
        mask = model._prepare_decoder_attention_mask(None, (1, 20), 0, features.device, features.dtype)
        logits = model._eagle_forward(features, model._base_model_embeddings(tokens[:, 1:]), mask, None)[2]
    np.savez("found.npz", tokens=tokens[0].numpy(), logits=logits[0].numpy())
"""
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
OWN_ROPE = {"eagle_export_rope_scaling": {}}  # exports the rotary embedding of the head


HEADS = {  # settings of the tool, and of the head's layers
    "draft vocabulary": (OWN_ROPE, {"draft_vocab_size": 40}),
    "two layers": (OWN_ROPE, {"num_hidden_layers": 2}),
    "yarn": (OWN_ROPE, {"rope_scaling": {**YARN, "rope_theta": 10000}}),
    "another rope": ({}, {}),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Where the tool has written a target, a head and what it finds for each of ``HEADS``, by its number."""
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("modelopt is not installed")
    root = tmp_path_factory.mktemp("written")
    run_library(LIBRARY, root, list(HEADS.values()))
    return root


def exported(written, name):
    folder = written / str(list(HEADS).index(name))
    return folder / "target", folder / "head", np.load(folder / "found.npz")


def error(target, head, found, **options) -> float:
    """The largest difference from the logits of the library, as a part of the largest logit."""
    (config, params), (own, drafts) = load_folder(target, "float32"), load_draft(head, **options)
    model, module = build(config, params), build_head(own, drafts)
    tokens = jnp.asarray(found["tokens"])[None]
    positions, read = jnp.arange(tokens.shape[1] - 1)[None], own.resolved_aux_layers(config)
    _, features, _ = model.with_auxiliary(tokens[:, :-1], positions, (None,) * 8, CausalView(positions), read)
    none, embedded = (None,) * own.layers.num_layers, module.embed(tokens[:, 1:], model)
    hidden, _ = module(embedded, module.fuse(features), positions, none, CausalView(positions))
    return float(np.abs(module.logits(hidden, model)[0] - found["logits"]).max() / np.abs(found["logits"]).max())


@pytest.mark.parametrize("name", in_tiers(list(HEADS)[:3], test=("draft vocabulary",)))
def test_logits_are_those_of_the_library(written, name):
    target, head, found = exported(written, name)
    assert error(target, head, found) < 1e-5
    assert error(target, head, found, aux_convention="input_of") > 0.1


def test_a_rotary_embedding_that_an_export_wrote_over_the_trained_one(written):
    """By default, an export of a head with a plain one says YaRN, by which the logits are others than the tool's own."""
    target, head, found = exported(written, "another rope")
    raw = json.loads((head / "config.json").read_text())
    assert raw["rope_scaling"] == YARN
    with pytest.warns(UserWarning, match="wrote YaRN over it, by which the drafts are others; the plain one is read"):
        assert error(target, head, found) < 1e-5
    set_keys(head, rope_scaling={**YARN, "rope_theta": 10000})
    assert read_draft_config(head).layers.rope.kind == "yarn"
    assert error(target, head, found) > 0.1


def test_yarn_of_another_tool_is_followed(tmp_path):
    folder = eagle3(tmp_path / "head", rope_scaling=YARN)
    assert read_draft_config(folder).layers.rope.kind == "yarn"


def test_settings_that_are_no_object_are_refused(tmp_path):
    folder = set_keys(eagle3(tmp_path / "head"), rope_scaling=YARN, eagle_config=5)
    with pytest.raises(Refusal, match="eagle_config=5"):
        read_draft_config(folder)


@pytest.mark.parametrize(
    ("keys", "where", "reads"),
    [
        ({"use_aux_hidden_state": True}, "eagle_config", (2, 4, 8)),
        ({"use_aux_hidden_state": True, "norm_before_fc": False}, "eagle_config", None),
        ({}, "eagle_config", None),
        ({"use_aux_hidden_state": True}, "top", None),
    ],
)
def test_which_layer_ids_are_outputs(tmp_path, keys, where, reads):
    """What else a config.json has may be of a tool that means inputs, and so it is asked for."""
    keys = {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], **keys}
    folder = eagle3(tmp_path / "head", **(keys if where == "top" else {where: keys}))
    if reads is None:
        with pytest.raises(OpenSetting, match="can mean the inputs of these layers"):
            read_draft_config(folder)
    else:
        assert read_draft_config(folder).aux_layers == reads
    assert read_draft_config(folder, aux_convention="input_of").aux_layers == (1, 3, 7)


def test_a_disputed_head_is_asked_for(tmp_path):
    keys = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 7]}
    folder = eagle3(tmp_path / "gpt-oss-120b-Eagle3-long-context", eagle_config=keys)
    with pytest.raises(OpenSetting, match=r"reads as inputs of these layers, against its own config\.json"):
        read_draft_config(folder)
    assert read_draft_config(folder, aux_convention="output_of").aux_layers == (2, 4, 8)
