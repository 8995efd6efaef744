"""Checkpoints with scales of keys and values, and what transformers computes with a cache that rounds."""

import inspect

import numpy as np
import pytest
from engines import causal
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

import jspec
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import EngineConfig
from jspec.loading.kv_cache_dtype import kv_rounding, with_kv_cache_dtype
from jspec.models.sharding import build_model

SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
OF_CACHE_ALONE = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": SCHEME}
K, V = (np.array(numbers, np.float32).reshape(2, 1, 1) for numbers in ([0.013, 0.2], [0.05, 0.007]))
TOKENS = np.random.default_rng(0).integers(97, size=(1, 24))


def checkpoint(path, k="self_attn.k_scale", v="self_attn.v_scale", scales=(K, V), said=OF_CACHE_ALONE, **config):
    """A Llama of two layers, with scales of keys and values under these names; those of layer 1 are twice as large."""
    folder = tiny_checkpoint(path, quantization_config=said, **config)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name, scale in zip((k, v), scales, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = np.array(scale * (1 + layer), scale.dtype)
    write_weights(folder, tensors)
    return folder


def chosen(folder, kind="auto", dtype="float32") -> str:
    return with_kv_cache_dtype(EngineConfig(dtype=dtype, kv_cache_dtype=kind), Checkpoint.open(folder)).kv_cache_dtype


def rounding_of(folder, kind="fp8"):
    return kv_rounding(EngineConfig(kv_cache_dtype=kind), Checkpoint.open(folder))


def logits_and_text(model, make_cache):
    """``(tokens, steps) -> (logits, text)`` of a model of transformers, in one pass and then token by token."""
    torch = pytest.importorskip("torch")
    name = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"

    def run(tokens, steps=0):
        text, cache = [], {name: make_cache()}
        with torch.no_grad():
            logits = model(torch.tensor(tokens), **cache).logits
            following = logits[:, -1:]
            for _ in range(steps):
                text.append(int(following.argmax()))
                following = model(torch.tensor([text[-1:]]), **cache).logits
        return logits.numpy(), text

    return run


def assert_rounds(folder, kind: str, rounding, plain, wanted, text: list[int]):
    """Logits of ``TOKENS`` are ``wanted`` and not ``plain``, which nothing rounds, and ``text`` follows the first 9."""
    config, params = Checkpoint.open(folder).language_model("float32")
    model = build_model(config, params, "float32", None)
    model.kv_rounding = rounding
    np.testing.assert_allclose(causal(model)(TOKENS), wanted, atol=2e-5)
    assert np.abs(plain - wanted).max() > 1e-3
    how = {"max_len": 64, "max_batch": 1, "prefill_chunk": 4, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
    assert jspec.generate(folder, TOKENS[0, :9].tolist(), kv_cache_dtype=kind, **how).token_ids == text
