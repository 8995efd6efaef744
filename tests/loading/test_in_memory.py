"""Models whose weights are arrays: as those of folders, in every form in which a trainer has them."""

import gc
import json
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from mtp_checkpoints import with_layers
from safetensors.numpy import load_file
from tiny import SMALL, tiny_checkpoint

import convert
import jspec
from jspec.commands.demo import FAMILY
from jspec.models import flat_params

SIZES: dict[str, Any] = {"max_batch": 2, "max_len": 96, "num_draft_tokens": 3, "dtype": "float32"}
PROMPTS = [[3, 4, 5], list(range(20, 45))]


def texts(llm, prompts: list) -> list[list[int]]:
    return [
        one.token_ids
        for one in llm.generate(prompts, temperature=0.8, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
    ]


def held(folder) -> dict[str, Any]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def fields_of(folder) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_target_and_head_of_arrays():
    usual, prompts = jspec.load(FAMILY / "target", FAMILY / "eagle3", **SIZES), ["def f(", "import os"]
    weights = {name: jnp.asarray(x) for name, x in held(FAMILY / "target").items()}
    alive = [weakref.ref(x) for x in weights.values()]
    target = jspec.InMemory(fields_of(FAMILY / "target"), weights, usual.tokenizer)
    llm = jspec.load(target, jspec.InMemory(FAMILY / "eagle3", held(FAMILY / "eagle3")), **SIZES)
    del target, weights
    gc.collect()
    assert not any(one() is not None for one in alive)
    assert texts(llm, prompts) == texts(usual, prompts)
    with pytest.raises(ValueError, match=r"restore\(\) needs the folder that a model was loaded from"):
        llm.restore()
    ones = {name: jnp.ones_like(x) for name, x in flat_params(llm.target).items()}
    assert llm.update_weights(ones, names="jspec").version == 1


def test_a_model_of_transformers():
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).eval()
    weights = {name: np.from_dlpack(x.detach()) for name, x in model.state_dict().items()}
    llm = jspec.load(jspec.InMemory(model.config, weights), **SMALL)
    with torch.no_grad():
        theirs = model(torch.tensor([PROMPTS[1]])).logits[0].numpy()
    np.testing.assert_allclose(llm.logits(PROMPTS[1]), theirs, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_parameters_of_a_quantised_model(tmp_path, kind):
    convert.convert(tiny_checkpoint(tmp_path / "plain"), tmp_path / kind, quantize=kind)
    usual = jspec.load(tmp_path / kind, **SMALL)
    weights = {name: x.copy() for name, x in flat_params(usual.target).items()}
    llm = jspec.load(jspec.InMemory(usual.target.config, weights), **SMALL)
    assert texts(llm, PROMPTS) == texts(usual, PROMPTS)


def test_layers_for_multi_token_prediction(tmp_path):
    folder = with_layers(tmp_path / "target")
    llm = jspec.load(jspec.InMemory(fields_of(folder), held(folder)), "mtp", num_draft_tokens=2, **SMALL)
    assert texts(llm, PROMPTS) == texts(jspec.load(folder, "mtp", num_draft_tokens=2, **SMALL), PROMPTS)


def test_what_is_refused(tmp_path):
    folder = tiny_checkpoint(tmp_path / "plain")
    fields, weights = fields_of(folder), held(folder)
    wrong: Any = [
        ({"config": 3}, ValueError, "config=3: expected the fields of config.json"),
        ({"config": {}}, ValueError, "jspec.InMemory/config.json"),
        ({"weights": [1]}, ValueError, "weights=.*: expected a mapping of names to arrays"),
        ({"weights": {"model.norm.weight": [1.0]}}, TypeError, r"weights\['model.norm.weight'\] is list: expected an"),
        ({"weights": {"x": np.zeros(2, np.complex64)}}, ValueError, r"weights\['x'\] is complex64: expected one of"),
        ({"weights": weights | {"model.norm.weight": np.ones(3)}}, ValueError, r"'model.norm.weight'\] is float64"),
        (
            {"weights": weights | {"model.norm.weight": np.ones(3, np.float32)}},
            ValueError,
            r"jspec.InMemory/weights: tensor 'model.norm.weight' has shape \[3\], but config.json asks for",
        ),
        ({"weights": {}}, ValueError, "tensor .* is missing"),
        ({"weights": weights | {"other": np.ones(3, np.float32)}}, ValueError, "tensor 'other' has no place in"),
    ]
    for change, error, message in wrong:
        with pytest.raises(error, match=message):
            jspec.load(jspec.InMemory(**({"config": fields, "weights": weights} | change)), **SMALL)
    with pytest.raises(ValueError, match=r"jspec\.InMemory: has no .* to check its files by"):
        jspec.load(jspec.InMemory(fields, weights), check_files=True, **SMALL)
