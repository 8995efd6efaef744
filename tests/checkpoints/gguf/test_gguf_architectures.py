"""Tiny models of transformers come back from GGUF files, every number and every setting."""

import dataclasses
import json

import numpy as np
import pytest
from gguf_checkpoints import write_gguf
from gguf_models import MODELS, PUBLISHED_LLAMA3, made, other, save, under
from hybrid_checkpoints import split
from parity_cases import CASES, SIZES
from safetensors.numpy import load_file
from tiny import tiny_checkpoint

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.gguf.architectures import ARCHITECTURES, read_architecture
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.huggingface.config import decoder_config, read_config, read_fields
from jspec.checkpoints.huggingface.unread_keys import unread_keys
from jspec.models.layers import rotary_frequencies

gguf = pytest.importorskip("gguf")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Those whose names and numbers transformers' own reader of GGUF files gets right.
OF_TRANSFORMERS = ("llama", "llama-wide-head", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-moe", "gemma3")


def config_of(folder, fields: dict):
    """What jspec reads of a config.json of these fields, of which it knows every one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    read = read_fields(Folder(folder))
    config = decoder_config(Folder(folder), read)
    assert unread_keys(read) == []
    return config


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], changed=()):
    """That all numbers are equal, but for the rounding of those that the file has in another form (``changed``)."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        exact = not name.endswith(tuple(changed))
        np.testing.assert_allclose(found[name], array, rtol=0, atol=0 if exact else 3e-7, err_msg=name)


def norms_and_decays(name: str) -> tuple[str, ...]:
    norms = ("norm.weight", "layernorm.weight", "embedding.weight", "hidden.weight")
    return {"gemma3": norms, "qwen3.5": (*norms, "A_log")}.get(name.partition("-")[0], ())


@pytest.mark.parametrize("name", MODELS)
def test_every_number_comes_back(saved, header, name):
    _, sources = read_architecture(header(name))
    stored = load_file(saved(name) / "model.safetensors")
    expected = stored if name.startswith("gpt-oss") else split(stored)
    assert_equal(made(saved(name) / "model.gguf", sources), expected, norms_and_decays(name))


def test_only_what_llama_cpp_rearranges_is_rearranged(header):
    """Delta nets with as many heads of keys as of values are stored as they are."""
    for name in MODELS:
        sources = read_architecture(header(name))[1]
        others = {key for key, source in sources.items() if source.rows is not None and ".experts." not in key}
        if name.startswith(("llama", "mistral")):
            assert {key.split(".")[-2] for key in others} == {"q_proj", "k_proj"}
        else:
            assert bool(others) == (name in ("qwen3.5", "qwen3.5-moe"))
        columns = [key for key, source in sources.items() if source.columns is not None]
        assert len(columns) == (3 if name in ("qwen3.5", "qwen3.5-moe") else 0)


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_comes_back(saved, header, tmp_path, name):
    expected = read_config(Folder(saved(name)))
    if name == "mistral":  # without windows it is a Llama
        expected = dataclasses.replace(expected, architecture="LlamaForCausalLM")
    assert config_of(tmp_path, read_architecture(header(name))[0]) == expected


def test_experts_in_mxfp4_come_back(tmp_path):
    """Bit for bit, though the file has the codes of a group in another order."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0}
    stored = {"quantization_config": {"quant_method": "mxfp4"}}
    folder = tiny_checkpoint(tmp_path / "gpt-oss", "GptOssForCausalLM", attention_bias=True, **sizes, **stored)
    fields, sources = read_architecture(read_header(write_gguf(folder)))
    assert_equal(made(folder / "model.gguf", sources), load_file(folder / "model.safetensors"))
    assert config_of(tmp_path / "read", fields) == read_config(Folder(folder))


@pytest.mark.parametrize(("name", "tolerance"), [("llama", 0), ("gemma4-keys-are-values", 0), ("qwen3.5", 5e-3)])
def test_quantised_weights_come_back(saved, header, tmp_path, name, tolerance):
    """Rows are quantised one by one. The columns of a map of a delta net are in other blocks in the file."""
    q8_0, folder = gguf.GGMLQuantizationType.Q8_0, saved(name)
    case, changes = MODELS[name]
    settings = {**SIZES, **CASES[case][1], **changes}
    path = write_gguf(folder, tmp_path / "q8_0.gguf", lambda *_: q8_0, settings)
    quantised = {tensor.name for tensor in gguf.GGUFReader(path).tensors if tensor.tensor_type == q8_0}
    sources = read_architecture(read_header(path))[1]
    expected = split(load_file(folder / "model.safetensors"))
    assert len(quantised) > 20
    for key, array in made(path, sources).items():
        rounded = expected[key]
        if sources[key].tensor in quantised:
            rounded = gguf.dequantize(gguf.quantize(rounded, q8_0), q8_0)
            assert sources[key].change is None
        np.testing.assert_allclose(array, rounded, rtol=0, atol=max(tolerance, 3e-7), err_msg=key)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_reads_the_same(saved, header, name):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = saved(name) / "model.gguf"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path.parent))
    theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    ours = made(path, read_architecture(header(name))[1])
    assert_equal(ours, split({key: tensor.numpy() for key, tensor in theirs.items()}))


def test_the_scores_of_the_largest_gemma_3_have_another_scale(tmp_path):
    """Of its 62 layers, by which llama.cpp knows it."""
    sizes = {"hidden_size": 24, "intermediate_size": 8, "head_dim": 8, "vocab_size": 8, "num_attention_heads": 2}
    for layers, scalar in ((61, 8), (62, 12)):
        settings = {"num_hidden_layers": layers, "sliding_window_pattern": 6, "query_pre_attn_scalar": scalar}
        folder = tiny_checkpoint(tmp_path / str(layers), "Gemma3ForCausalLM", **sizes, **settings)
        fields, _ = read_architecture(read_header(write_gguf(folder)))
        assert config_of(tmp_path / f"read-{layers}", fields) == read_config(Folder(folder))


def test_factors_of_another_rope_are_kept(saved, tmp_path):
    """The converter writes them for the length at the top of config.json."""
    settings = {"original_max_position_embeddings": 64}
    rope = {**PUBLISHED_LLAMA3, **settings}
    save(tmp_path, "llama", head_dim=32, rope_parameters=rope, max_position_embeddings=1 << 14)
    header = read_header(write_gguf(tmp_path, settings=settings))
    config, original = config_of(tmp_path / "read", read_architecture(header)[0]), read_config(Folder(tmp_path))
    assert (config.rope.kind, original.rope.kind, config.rope.attention_factor) == ("longrope", "llama3", 1.0)
    for length in (32, 1 << 14):
        found, expected = (rotary_frequencies(one.for_length(length).rope, 32) for one in (config, original))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class TestKeysThatMayBeAbsent:
    def test_heads_and_rope(self, header, tmp_path):
        gone = dict.fromkeys(("rope.freq_base", "rope.dimension_count", "attention.key_length"), ...)
        gone |= {"attention.head_count_kv": ..., "attention.value_length": ...}
        wide = {f"blk.{layer}.attn_{name}.weight": (64, 64) for layer in range(3) for name in "kv"}
        fields, _ = read_architecture(other(header("llama"), under("llama", gone), shapes=wide))
        config = config_of(tmp_path, fields)
        assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10_000.0)

    def test_the_type_of_a_scaling(self, header, tmp_path):
        """llama.cpp takes a factor alone for that of a linear one."""
        fields, _ = read_architecture(other(header("llama-linear"), {"llama.rope.scaling.type": ...}))
        rope = config_of(tmp_path, fields).rope
        assert (rope.kind, rope.factor) == ("linear", 3.0)

    def test_windows_of_gemma_3(self, header, tmp_path):
        gone = other(header("gemma3"), under("gemma3", {"attention.sliding_window": ...}))
        assert set(config_of(tmp_path, read_architecture(gone)[0]).windows) == {None}

    def test_prediction_layers(self, header, tmp_path):
        plain = header("qwen3.5")
        drop = [tensor.name for tensor in plain.tensors if tensor.name.startswith("blk.4.")]
        keys = {"nextn_predict_layers": ..., "block_count": 4, "full_attention_interval": ...}
        fields, sources = read_architecture(other(plain, under("qwen35", keys), drop))
        assert config_of(tmp_path, fields).mtp_layers == 0
        assert not [name for name in sources if name.startswith("mtp.")]


class TestKeysThatMayBeThere:
    @pytest.mark.parametrize("pattern", [3, np.array([True, True, False] * 2 + [True])])
    def test_another_pattern_of_windows(self, header, tmp_path, pattern):
        keys = {"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": 500.0}
        config = config_of(tmp_path, read_architecture(other(header("gemma3"), under("gemma3", keys)))[0])
        assert config.windows == (7, 7, None, 7, 7, None, 7)
        assert (config.layer_ropes[0].theta, config.layer_ropes[2].theta) == (500.0, 1_000_000.0)

    def test_a_list_of_recurrent_layers(self, header, tmp_path):
        """And two keys that other converters than llama.cpp's write."""
        keys = {"attention.recurrent_layers": np.array([True, True, True, False, False]), "full_attention_interval": 2}
        keys |= {"ssm.v_head_reordered": True, "rope.mrope_interleaved": True}
        fields, _ = read_architecture(other(header("qwen3.5"), under("qwen35", keys)))
        assert config_of(tmp_path, fields).delta_nets.layers == (True, True, True, False)

    def test_keys_and_values_that_nothing_reads(self, header):
        plain = header("gemma4-shared-caches")
        unread = [(f"blk.3.attn_{name}.weight", (64, 64)) for name in "kv"]
        assert read_architecture(other(plain, add=unread))[1].keys() == read_architecture(plain)[1].keys()

    def test_a_key_that_nothing_reads_is_named(self, header):
        fields, _ = read_architecture(
            other(header("llama"), {"llama.attention.scale": 0.5, "llama.list": np.arange(2)})
        )
        assert (fields["llama.attention.scale"], fields["llama.list"]) == (0.5, [0, 1])


def test_every_architecture_has_a_model(header):
    assert {header(name).metadata["general.architecture"] for name in MODELS} == ARCHITECTURES.keys()
