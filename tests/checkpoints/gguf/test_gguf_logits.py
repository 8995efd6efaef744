"""Logits of GGUF files, of every type and architecture, against transformers with the weights that the package gguf
dequantises."""

import json
from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np
import pytest
from gguf_blocks import random_blocks
from gguf_checkpoints import write_gguf
from gguf_models import MODELS, made, save
from safetensors.numpy import load_file, save_file
from tiers import in_tiers

from convert.verify import jspec_logits, transformers_logits
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.gguf.architectures import read_architecture
from jspec.checkpoints.gguf.header import read_header
from jspec.checkpoints.quantized.gguf_blocks import TYPES
from jspec.models import build

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
# Random blocks of these have weights of a size as those of models have, without a scale that they lack or at most bits of.
SCALED = {"Q2_K": 0.1, "Q8_0": 0.1, "IQ4_NL": 0.1, "Q6_K": 0.01, "IQ4_XS": 0.02, "Q3_K": 0.05, "IQ3_S": 0.05}
ARCHITECTURES = (
    *("llama-biases", "llama-llama3", "qwen2", "qwen3", "qwen3-moe", "gemma3", "gemma4", "gemma4-experts", "gpt-oss"),
    *("qwen3.5", "qwen3.5-moe"),
)


# What has no kernel in its type: embeddings in E2M1, and betas and decays of delta nets.
pytestmark = pytest.mark.filterwarnings("ignore:.*are dequantised as they are read")


def as_published(arrays: dict[str, np.ndarray], names: Iterable[str]) -> dict[str, np.ndarray]:
    """``arrays`` under the ``names`` of a checkpoint, which may have the maps of all experts of a layer in one tensor."""
    found = dict(arrays)
    for name in names:
        if name in arrays:
            continue
        start, which = name.rsplit(".", 1)
        maps = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[which]
        count = sum(one.startswith(f"{start}.") and one.endswith(f".{maps[0]}.weight") for one in arrays)
        experts = ([found.pop(f"{start}.{i}.{one}.weight") for one in maps] for i in range(count))
        found[name] = np.stack([np.concatenate(parts) for parts in experts])
    return found


@pytest.fixture
def random_quantize(monkeypatch) -> list[tuple[int, ...]]:
    """Blocks of types that the package gguf does not quantise to are random; the shapes of all tensors in blocks."""
    quantised, original = [], gguf.quants.quantize

    def quantize(array: np.ndarray, wanted) -> np.ndarray:
        if int(wanted) not in TYPES:
            return original(array, wanted)
        kind, (rows, inputs) = TYPES[int(wanted)], array.reshape(-1, array.shape[-1]).shape
        quantised.append(array.shape)
        scale = SCALED.get(kind.name, 0.25 if kind.weights == 32 else 0.01)
        blocks = random_blocks(kind, rows, inputs, len(quantised), scale)
        if kind.name == "MXFP4":
            blocks[..., 0] = 120 + blocks[..., 0] % 3
        elif kind.name == "NVFP4":
            blocks[..., :4] = 8 + blocks[..., :4] % 8
        return blocks.reshape(*array.shape[:-1], -1)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    return quantised


def compared(folder: Path, path: Path, unchanged: dict | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a file, and of transformers with the tensors that it stands for."""
    sources = read_architecture(read_header(path))[1]
    plain = folder / "dequantised"
    plain.mkdir()
    arrays = as_published(made(path, sources), load_file(folder / "model.safetensors"))
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, plain / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**fields, **(unchanged or {})}))
    config, params = Checkpoint.open(path).language_model("float32")
    tokens = [np.random.default_rng(3).integers(config.vocab_size, size=24)]
    [ours] = jspec_logits(build(config, jax.tree.map(jax.numpy.asarray, dict(params))), tokens)
    [theirs] = transformers_logits(plain, tokens)
    return ours, theirs


def assert_equal(ours: np.ndarray, theirs: np.ndarray, tolerance: float = 1e-5):
    assert np.isfinite(theirs).all()
    assert theirs.std() > 1e-3
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize(
    "number", in_tiers(TYPES, test=(2, 3, 6, 8, 12, 14, 23, 39)), ids=lambda number: TYPES[number].name
)
def test_logits_of_every_type(number, tmp_path, random_quantize):
    """Each map, the embedding and the head are in blocks of the type."""
    settings = save(tmp_path, "llama", **WIDE)
    path = write_gguf(tmp_path, type_of=lambda *_: gguf.GGMLQuantizationType(number), settings=settings)
    assert len(random_quantize) >= 2 * 7 + 1
    assert_equal(*compared(tmp_path, path))


@pytest.mark.filterwarnings("error:.*dequantised")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_every_map_of_a_mixed_file_keeps_its_type(family, tmp_path, random_quantize):
    """As in Q4_K_M, where values have another type than queries and keys, and the embedding than the head."""
    types = gguf.GGMLQuantizationType
    six = "blk.0.attn_v", "blk.1.ffn_down", "output.weight"
    wide = {**WIDE, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    settings = save(tmp_path, family, **wide)
    of_type = lambda name, _: types.Q6_K if name.startswith(six) else types.Q4_K  # noqa: E731
    path = write_gguf(tmp_path, type_of=of_type, settings=settings)
    assert_equal(*compared(tmp_path, path))
    checkpoint = Checkpoint.open(path)
    assert not checkpoint.hugging_face.layout.dequantized
    config = checkpoint.config.language_model
    formats = {
        name: config.quantization_of(name) for name in ("layers.0.attention.values", "layers.1.mlp.down", "head")
    }
    assert set(formats.values()) == {"int6_16_levels"}
    assert config.embedding_quantization == config.quantization == "int4_32_levels_offsets"
    assert config.weight_bytes(2) <= 1.05 * path.stat().st_size


@pytest.mark.parametrize(
    "name", in_tiers(ARCHITECTURES, test=("qwen2", "qwen3-moe", "gemma3", "gemma4", "gpt-oss", "qwen3.5"))
)
def test_logits_of_every_architecture(name, tmp_path):
    case, changes = MODELS[name]
    settings = save(tmp_path, case, **changes)
    in_floats = "_exps" if name == "gpt-oss" else "none"
    types = gguf.GGMLQuantizationType
    path = write_gguf(tmp_path, type_of=lambda of, _: types.F32 if in_floats in of else types.Q8_0, settings=settings)
    recurrent = name.startswith("qwen3.5")  # whose states add up over a text
    assert_equal(*compared(tmp_path, path), tolerance=2e-5 if recurrent else 1e-5)
