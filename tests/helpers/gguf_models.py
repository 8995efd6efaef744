"""Tiny models of transformers of every architecture of GGUF files that is read, and their files with other headers.

A GGUF file cannot say: whether a layer of Qwen or Mistral has an attention window; how weights of experts are normed; the
clamp of gpt-oss; the scale of scores of Gemma 3, and which of its layers have a window; ``truncate`` of yarn; layers of
Qwen3.5 that do not follow its interval. ``MODELS`` have what llama.cpp takes for granted there, as published models do."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf_checkpoints import write_gguf
from hybrid_checkpoints import randomise, save_hybrid
from parity_cases import CASES, LLAMA3, SIZES, YARN
from resaved import set_keys

from jspec.checkpoints.gguf.header import Header, TensorInfo

PUBLISHED_LLAMA3 = {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Name -> a case of parity_cases, and what it has in place of settings that a GGUF file cannot say.
MODELS = {
    "llama": ("llama", {}),
    "llama-wide-head": ("llama-wide-head", {}),
    "llama-tied": ("llama-tied", {}),
    "llama-biases": ("llama-biases", {}),
    "llama-linear": ("llama-linear-rope", {}),
    "llama-yarn": ("llama-yarn-betas", {}),
    "llama-yarn-attention": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "llama-llama3": ("llama", {"head_dim": 32, "rope_parameters": PUBLISHED_LLAMA3}),
    "mistral": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2-tied", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3-biases", {}),
    "qwen3-yarn": ("qwen3-yarn", {}),
    "qwen3-moe": ("qwen3-moe", {}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "gemma3-linear": (
        "gemma3-scaled",
        {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
    ),
    "gemma3-capped": ("gemma3-capped", {"query_pre_attn_scalar": 32}),
    "gemma4": ("gemma4", {"attention_bias": False}),
    "gemma4-keys-are-values": ("gemma4-keys-are-values", {}),
    "gemma4-shared-caches": ("gemma4-shared-caches", {}),
    "gemma4-experts": ("gemma4-experts", {}),
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0}),
    "gpt-oss-default-rope": ("gpt-oss-default-rope", {"swiglu_limit": 7.0, "rope_parameters": DEFAULT_ROPE}),
    "qwen3.5": ("qwen3.5", {"linear_value_head_dim": 16}),
    "qwen3.5-yarn": ("qwen3.5-yarn", {}),
    "qwen3.5-moe": ("qwen3.5-moe", {}),
}


def save(folder, case: str, **changes) -> dict:
    """A model of transformers with random weights, with a layer for multi-token prediction in hybrids; its settings."""
    import torch
    import transformers

    family, settings = CASES[case]
    settings = {**SIZES, **settings, **changes}
    if family.startswith("Qwen3_5"):
        save_hybrid(folder, case, stacked=family.endswith("Moe"), **changes)
        set_keys(folder, mtp_num_hidden_layers=1)
        return settings
    torch.manual_seed(0)
    if family == "Qwen2":
        del settings["head_dim"]  # Qwen2 has no such key; it is hidden size over heads
    kind = "TextConfig" if family.startswith("Gemma") else "Config"
    config = getattr(transformers, f"{family}{kind}")(**copy.deepcopy(settings))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomise(model)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(folder)
    return settings


def folders(tmp_path_factory) -> Callable[[str], Path]:
    """Makes the folder of a model of ``MODELS`` with its file ``model.gguf``, once."""
    made = {}

    def make(name: str) -> Path:
        if name not in made:
            case, changes = MODELS[name]
            made[name] = tmp_path_factory.mktemp(name)
            write_gguf(made[name], settings=save(made[name], case, **changes))
        return made[name]

    return make


def made(path, sources) -> dict[str, np.ndarray]:
    """The tensors of the checkpoint, as their sources say, of what the package gguf dequantises."""
    import gguf

    held, found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}, {}

    def rows(name: str, part: str | None) -> np.ndarray:
        tensor = held[name]
        if part is not None:  # bytes of each group: its scale, and 16 with codes i and i + 16
            groups = np.array(tensor.data).reshape(-1, tensor.data.shape[-1] // 17, 17)
            codes = np.concatenate([groups[..., 1:] & 15, groups[..., 1:] >> 4], axis=-1)
            return groups[..., 0] if part == "scales" else codes[..., ::2] | codes[..., 1::2] << 4
        array = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        return array.reshape(-1, 1 if array.ndim == 1 or name.endswith(".bias") else array.shape[-1])

    for name, source in sources.items():
        array = np.concatenate([rows(one, source.part) for one in (source.tensor, source.second) if one is not None])
        array = array if source.rows is None else array[source.rows()]
        array = array if source.columns is None else array[:, source.columns()]
        array = array if source.change is None else source.change(array)
        found[name] = array.reshape(source.shape)
    return found


def other(header: Header, metadata=None, drop=(), add=(), shapes=None, types=None) -> Header:
    """``header`` with other metadata, of which ``...`` removes one, and other tensors.

    Args:
      header: that of a file.
      metadata: key -> value.
      drop: names of tensors.
      add: name and shape of further tensors.
      shapes, types: name of a tensor -> its shape, or the number of its type.
    """
    shapes, types = shapes or {}, types or {}
    tensors = [
        tensor._replace(shape=shapes.get(tensor.name, tensor.shape), type=types.get(tensor.name, tensor.type))
        for tensor in header.tensors
        if tensor.name not in drop
    ]
    tensors += [TensorInfo(name, shape, 0, header.tensors[0].start) for name, shape in add]
    changed = {key: value for key, value in {**header.metadata, **(metadata or {})}.items() if value is not ...}
    return header._replace(metadata=changed, tensors=tuple(tensors))


def under(architecture: str, keys: dict) -> dict:
    """Keys of the metadata of an architecture, with its name in front."""
    return {f"{architecture}.{key}": value for key, value in keys.items()}
