"""fp32 logits of every supported architecture equal transformers', over odd configurations and both config
spellings."""

import copy
import json

import jax
import numpy as np
import pytest
from parity_cases import CASES, SIZES
from safetensors.numpy import load_file, save_file

from convert import load_folder
from convert.verify import jspec_logits, transformers_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.tensors import parts
from jspec.models.params import abstract_params, build

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# transformers makes tensors without numbers where there are no shared experts, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
# Families whose norms multiply by 1 + weight, but for those of the outputs of gated delta nets.
ZERO_CENTRED = ("Gemma2", "Gemma3", "Qwen3_5", "Qwen3_5Moe", "Qwen3Next")
HYBRIDS = ("qwen3.5", "qwen3-next")
NOT_OF_OPT = ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")


def save_reference(folder, family: str, settings: dict, shard: bool = False):
    """A transformers model with random norms and biases, saved as transformers saves."""
    torch.manual_seed(0)
    settings = copy.deepcopy({**SIZES, **settings})  # transformers writes into them
    if family == "Qwen2":
        del settings["head_dim"]  # Qwen2 has no such key; it is hidden size over heads
    if family == "OPT":
        settings["ffn_dim"] = settings["intermediate_size"]
        settings = {"tie_word_embeddings": True, **{key: settings[key] for key in settings if key not in NOT_OF_OPT}}
    with_text_config = family in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe")
    config_class = f"{family}TextConfig" if with_text_config else f"{family}Config"
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        learned = ("e_score_correction_bias", "layer_scalar")
        corrections = ((name, one) for name, one in model.named_buffers() if name.endswith(learned))
        for name, parameter in (*model.named_parameters(), *corrections):
            if not parameter.numel():
                continue
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn_like(parameter))
            elif "norm" in name or name.endswith("layer_scalar"):
                one = family not in ZERO_CENTRED or "linear_attn" in name
                parameter.copy_(one + 0.1 * torch.randn_like(parameter))
            elif name.endswith("A_log"):  # states that remember from a few tokens to hundreds
                parameter.copy_(1.5 * torch.randn_like(parameter) - 3)
            else:
                parameter.copy_(parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="40KB" if shard else "1GB")


def write_legacy_spelling(folder):
    """Rewrite config.json as transformers 4 wrote it: rope_theta, rope_scaling with ``type``, torch_dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope, key = config.pop("rope_parameters"), "type"
    if "full_attention" in rope:  # Gemma 3 and OLMo 3, in which transformers reads no ``type``
        if config["model_type"].startswith("gemma3"):
            config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope, key = rope["full_attention"], "rope_type"
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))


def relative_error(folder, reference_folder=None, length: int = 40) -> float:
    """Of the logits of a text of so many tokens."""
    config, params = load_folder(folder, "float32")
    tokens = np.random.default_rng(1).integers(config.vocab_size, size=length)
    [expected] = transformers_logits(reference_folder or folder, [tokens])
    model = build(config.for_length(length), jax.device_put(params))
    [found] = jspec_logits(model, [tokens])
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def length_of(case: str) -> int:
    """Of a text that is longer than every window and original length, and than two chunks of gated delta nets."""
    return 150 if case.startswith(HYBRIDS) else 40


def tolerance_of(case: str) -> float:
    """Of the relative error. In gated delta nets a few positions have normed vectors that are nearly 0, and errors there are
    thirty times those of most."""
    return 1e-4 if case.startswith(HYBRIDS) else 2e-5


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tmp_path, case):
    save_reference(tmp_path, *CASES[case])
    assert relative_error(tmp_path, length=length_of(case)) < tolerance_of(case)


@pytest.mark.parametrize("case", ["phi3-longrope", "phi4-longrope"])
def test_short_texts_take_the_short_factors(tmp_path, case):
    save_reference(tmp_path, *CASES[case])
    assert relative_error(tmp_path, length=32) < 2e-5
    config, _ = load_folder(tmp_path)
    assert config.for_length(32) == config != config.for_length(33)


LEGACY = [
    *["llama", "llama-llama3-rope", "llama-linear-rope", "llama-yarn-mscale", "qwen2-sliding-by-layer"],
    *["smollm3", "phi4-partial", "phi3-longrope", "granite", "gemma2", "gemma3", "gemma3-scaled"],
    *["deepseek-yarn", "glm4-moe", "glm4-moe-yarn", "minimax-m2", "minimax-m2-yarn", "olmo3-yarn", "ministral3"],
    *["seed-oss", "exaone4", "hunyuan", "qwen3.5", "qwen3.5-yarn", "qwen3.5-moe", "qwen3-next"],
]


@pytest.mark.parametrize("case", LEGACY)
def test_legacy_config_means_the_same_model(tmp_path, case):
    save_reference(tmp_path, *CASES[case])
    config, _ = load_folder(tmp_path)
    write_legacy_spelling(tmp_path)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    legacy, _ = load_folder(tmp_path)
    assert legacy == config
    assert relative_error(tmp_path, length=length_of(case)) < tolerance_of(case)


def test_sharded_checkpoint(tmp_path):
    save_reference(tmp_path, "Llama", {}, shard=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert relative_error(tmp_path) < 2e-5


def test_names_without_their_prefix(tmp_path):
    """Some OPT checkpoints name their tensors ``decoder.*``."""
    save_reference(tmp_path, *CASES["opt-350m"])
    config, params = load_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name for name in tensors if not name.startswith("model.decoder.")} <= {"lm_head.weight"}
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    found, renamed = load_folder(tmp_path)
    assert found == config
    assert params.keys() == renamed.keys()
    assert all(np.array_equal(params[name], renamed[name]) for name in params)


@pytest.mark.parametrize("spelling", ["published", "nested"])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, spelling):
    """Gemma 3 of 4B and more comes with a vision tower, which is left out; tensors have one of two prefixes."""
    torch.manual_seed(0)
    _, settings = CASES["gemma3-scaled"]
    text = {**SIZES, **copy.deepcopy(settings)}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=96,
        eos_token_id=[1, 2],
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    if spelling == "nested":
        file = tmp_path / "model.safetensors"
        tensors = {
            name.replace("language_model.model.", "model.language_model."): t for name, t in load_file(file).items()
        }
        assert any(name.startswith("model.language_model.layers.") for name in tensors)
        save_file(tensors, file)
    found, _ = load_folder(tmp_path)
    assert (found.architecture, found.eos_token_ids, found.num_layers) == ("Gemma3ForCausalLM", (1, 2), 3)
    if spelling == "published":
        assert relative_error(tmp_path) < 2e-5
    source = Checkpoint.open(tmp_path).hugging_face
    assert any(name.startswith("vision_tower.") for name in source.ignored)
    assert source.unused == source.missing == []


def test_the_bound_sees_a_wrong_rope(tmp_path):
    """The comparison is able to fail: the same weights under another theta are far outside the bound."""
    save_reference(tmp_path / "a", "Llama", {})
    save_reference(tmp_path / "b", "Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 11000.0}})
    assert relative_error(tmp_path / "b", reference_folder=tmp_path / "a") > 1e-4


def test_projections_without_their_groups_are_detected(tmp_path, monkeypatch):
    """Those of Qwen3-Next have one head of keys after another. Read as those of Qwen3.5, they give other logits."""
    in_groups = parts._in_groups

    def in_one_group(module, names, groups, sizes, *others):
        return in_groups(module, names, 1, [groups * size for size in sizes], *others)

    save_reference(tmp_path, *CASES["qwen3-next"])
    monkeypatch.setattr(parts, "_in_groups", in_one_group)
    assert relative_error(tmp_path, length=length_of("qwen3-next")) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_mapping_covers_the_module(tmp_path, case):
    """The tensor table stacks into exactly the parameters of jspec's decoder, and holds exactly transformers' names."""
    save_reference(tmp_path, *CASES[case])
    config, params = load_folder(tmp_path)
    shapes = {name: leaf.shape for name, leaf in abstract_params(config).items()}
    assert config.param_shapes() == shapes
    assert {name: array.shape for name, array in params.items()} == shapes
    assert config.num_parameters == sum(array.size for array in params.values())
