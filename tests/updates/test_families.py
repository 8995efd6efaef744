"""A model of every family with new weights has the arrays of one that was loaded with these, bit for bit."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import ARCHITECTURES, tiny_checkpoint
from wrapper_checkpoints import WRAPPED, copied, rewrite, save_wrapper

import jspec
from convert import convert
from jspec.models import flat_params

load: Any = jspec.load
SMALL: dict[str, Any] = {"max_batch": 2, "max_len": 64}
TRAINED: dict[str, dict[str, Any]] = {  # keys of config.json that transformers wants besides
    "LlamaForCausalLM": {},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe"},
    "GptOssForCausalLM": {"model_type": "gpt_oss"},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text"},
    "Phi3ForCausalLM": {"pad_token_id": 0},
}


def arrays_of(folder) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in load_file(folder / "model.safetensors").items()}


def require_same(llm: Any, other: Any):
    """Both have the same bits, in the module and in what programs get, and every array is alive."""
    own, expected = flat_params(llm.target), flat_params(other.target)
    assert own.keys() == expected.keys()
    for name, array in expected.items():
        assert own[name].dtype == array.dtype, name
        np.testing.assert_array_equal(np.asarray(own[name]), np.asarray(array), err_msg=name)
    assert {id(leaf) for leaf in llm.engine.runner.batch.leaves[0]} >= {id(array) for array in own.values()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_is_written_as_it_is_loaded(architecture, tmp_path):
    before = tiny_checkpoint(tmp_path / "before", architecture)
    after = tiny_checkpoint(tmp_path / "after", architecture, seed=1)
    llm, fresh = (load(folder, dtype="bfloat16", **SMALL) for folder in (before, after))
    kept = {name: np.asarray(array) for name, array in flat_params(llm.target).items()}
    done = llm.update_weights(arrays_of(after))
    require_same(llm, fresh)
    assert done.version == 1
    assert done.num_bytes == sum(array.nbytes for array in arrays_of(after).values())
    assert llm.update_weights(arrays_of(after)).num_compilations == 0
    llm.restore()
    for name, array in flat_params(llm.target).items():
        np.testing.assert_array_equal(np.asarray(array), kept[name], err_msg=name)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3_5MoeForCausalLM", "GptOssForCausalLM"])
def test_a_stream_may_come_in_any_order(architecture, tmp_path, monkeypatch):
    monkeypatch.setattr("jspec.updates.update._AT_ONCE", 2**14)
    before = tiny_checkpoint(tmp_path / "before", architecture)
    after = tiny_checkpoint(tmp_path / "after", architecture, seed=1)
    llm, fresh = (load(folder, **SMALL) for folder in (before, after))
    pairs = list(arrays_of(after).items())
    np.random.default_rng(0).shuffle(pairs)  # pyright: ignore[reportArgumentType]
    llm.update_weights(iter(pairs))
    require_same(llm, fresh)


@pytest.mark.parametrize("architecture", TRAINED)
def test_the_names_of_a_model_in_transformers(architecture, tmp_path):
    """Which stacks experts, and fuses what it fuses, in memory as well."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = tiny_checkpoint(tmp_path / "before", architecture, **TRAINED[architecture])
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "after")
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    llm, fresh = (load(tmp_path / name, **SMALL) for name in ("before", "after"))
    llm.update_weights(state)
    require_same(llm, fresh)


@pytest.mark.parametrize(
    ("quantization", "names"),
    [("int8", "huggingface"), ("fp8", "jspec"), ("int4", "huggingface"), ("int4", "jspec")],
)
def test_weights_are_rounded_as_those_before(quantization, names, tmp_path):
    folders = [tiny_checkpoint(tmp_path / str(seed), seed=seed, hidden_size=128) for seed in range(2)]
    for folder in folders:
        convert(folder, folder.with_suffix(".converted"), quantize=quantization)
    llm, fresh = (load(folder.with_suffix(".converted"), dtype="float32", **SMALL) for folder in folders)
    plain = load(folders[1], dtype="float32", **SMALL).target
    llm.update_weights(flat_params(plain) if names == "jspec" else arrays_of(folders[1]), names=names)
    require_same(llm, fresh)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_shards_stay_where_they_are(architecture, tmp_path):
    before = tiny_checkpoint(tmp_path / "before", architecture)
    after = tiny_checkpoint(tmp_path / "after", architecture, seed=1)
    llm, fresh = (load(folder, tensor_parallel=2, **SMALL) for folder in (before, after))
    places = [leaf.sharding for leaf in llm.engine.runner.batch.leaves[0]]
    llm.update_weights(arrays_of(after))
    require_same(llm, fresh)
    assert [leaf.sharding for leaf in llm.engine.runner.batch.leaves[0]] == places
    llm.restore()
    require_same(llm, load(before, tensor_parallel=2, **SMALL))


@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_of_a_multimodal_one(name, tmp_path):
    """By the names of its files, the vision part's among them: written in place, and loaded from arrays."""
    pytest.importorskip("torch")
    before, after = tmp_path / "before", tmp_path / "after"
    save_wrapper(before, name)
    rewrite(copied(before, after), tensors=lambda held: {n: x * x.dtype.type(1.5) for n, x in held.items()})
    llm, fresh = (load(folder, dtype="float32", **SMALL) for folder in (before, after))
    given = arrays_of(after)
    llm.update_weights(given)
    require_same(llm, fresh)
    fields = json.loads((after / "config.json").read_text())
    require_same(load(jspec.InMemory(fields, given), dtype="float32", **SMALL), fresh)
