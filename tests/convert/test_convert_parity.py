"""fp32 logits of every supported architecture equal transformers', over odd configurations and both config
spellings."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from convert import load_folder
from convert.verify import jspec_logits, transformers_logits
from jspec.models.params import abstract_params, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CASES = {
    "llama": ("Llama", {}),
    "llama-wide-head": ("Llama", {"head_dim": 32}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-odd-ratio": ("Llama", {"num_attention_heads": 6, "hidden_size": 96, "num_key_value_heads": 2}),
    "llama-no-groups": ("Llama", {"num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-dynamic-rope": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.1}}),
    "llama-yarn-attention": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False}}),
    "llama-yarn-betas": ("Llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 7, "head_dim": 32}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "sliding_window": 9}),
    "qwen2-sliding-by-layer": ("Qwen2", SLIDING),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-sliding": ("Qwen3", SLIDING),
    "qwen3-biases": ("Qwen3", {"attention_bias": True}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN}),
}


def save_reference(folder, family: str, settings: dict, shard: bool = False):
    """A transformers model with random norms and biases, saved as transformers saves."""
    torch.manual_seed(0)
    settings = {**SIZES, **settings}
    if family == "Qwen2":
        del settings["head_dim"]  # Qwen2 has no such key; it is hidden size over heads
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="40KB" if shard else "1GB")


def write_legacy_spelling(folder):
    """Rewrite config.json as transformers 4 wrote it: rope_theta, rope_scaling with ``type``, torch_dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def relative_error(folder, reference_folder=None) -> float:
    config, params = load_folder(folder, "float32")
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=40)  # past every window and original length
    [expected] = transformers_logits(reference_folder or folder, [tokens])
    model = build(config, {name: jnp.asarray(array) for name, array in params.items()})
    [found] = jspec_logits(model, [tokens])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path, case):
    save_reference(tmp_path, *CASES[case])
    assert relative_error(tmp_path) < 2e-5


@pytest.mark.parametrize(
    "case", ["llama", "llama-llama3-rope", "llama-linear-rope", "llama-yarn-mscale", "qwen2-sliding-by-layer"]
)
def test_legacy_config_means_the_same_model(tmp_path, case):
    save_reference(tmp_path, *CASES[case])
    config, _ = load_folder(tmp_path)
    write_legacy_spelling(tmp_path)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    legacy, _ = load_folder(tmp_path)
    assert legacy == config
    assert relative_error(tmp_path) < 2e-5


def test_sharded_checkpoint(tmp_path):
    save_reference(tmp_path, "Llama", {}, shard=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert relative_error(tmp_path) < 2e-5


def test_the_bound_sees_a_wrong_rope(tmp_path):
    """The comparison is able to fail: the same weights under another theta are far outside the bound."""
    save_reference(tmp_path / "a", "Llama", {})
    save_reference(tmp_path / "b", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 11000.0}})
    assert relative_error(tmp_path / "b", reference_folder=tmp_path / "a") > 1e-4


@pytest.mark.parametrize("case", CASES)
def test_mapping_covers_the_module(tmp_path, case):
    """The tensor table stacks into exactly the parameters of jspec's decoder, and holds exactly transformers' names."""
    save_reference(tmp_path, *CASES[case])
    config, params = load_folder(tmp_path)
    shapes = {name: leaf.shape for name, leaf in abstract_params(config).items()}
    assert config.param_shapes() == shapes
    assert {name: array.shape for name, array in params.items()} == shapes
    assert config.num_parameters == sum(array.size for array in params.values())
