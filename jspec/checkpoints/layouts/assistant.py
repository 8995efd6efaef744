"""Assistants of Gemma 4 (2026), as Google publishes them: ``Gemma4AssistantForCausalLM`` and its ``Unified`` variant.

config.json has the layers under ``text_config``, whose ``num_kv_shared_layers`` is the number of all layers, or 0. Their
output head is ``model.embed_tokens``, and may be stored as ``lm_head`` too."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor, derived
from jspec.checkpoints.huggingface.config import model_config
from jspec.checkpoints.layouts.format import CheckpointFormat, architectures
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, tensor_table
from jspec.config.heads import AssistantConfig

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_TEXT = "Gemma4ForCausalLM"
_EMBEDDING, _ORDER = "model.embed_tokens.weight", "masked_embedding.token_ordering"
# Keys of text_config that would add parts, which assistants have not.
_WITHOUT = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp", "vocab_size_per_layer_input")
# What ``Gemma4AssistantConfig`` of transformers takes for absent keys.
_WIDTH, _CLUSTERS, _BEST = 1536, 2048, 32


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder with an assistant."""
    config = _config(fields)
    table, tensors, tied = tensor_table(config), dict(tensors), fields.flag("tie_word_embeddings", True)
    if not tied:
        raise fields.refuse("tie_word_embeddings", "true, because the output head of an assistant is its embedding")
    if _EMBEDDING not in tensors and OUTPUT_HEAD in tensors:
        tensors[_EMBEDDING] = tensors.pop(OUTPUT_HEAD)
    if config.clusters is not None and _ORDER in tensors:
        tensors[_ORDER] = _ordering(folder, tensors[_ORDER], config)
    stored_twice = OUTPUT_HEAD in tensors
    return Layout(
        config,
        "assistant of Gemma 4",
        table,
        tensors,
        duplicates={OUTPUT_HEAD: _EMBEDDING} if stored_twice else {},
        tied_by="tie_word_embeddings",
        left_out=frozenset(
            name for name in tensors if config.clusters is None and name.startswith("masked_embedding.")
        ),
    )


def _config(fields: Fields) -> AssistantConfig:
    text = fields.nested("text_config")
    if text is None:
        raise Refusal(f"{fields.where}: text_config is missing: expected the config of the assistant's layers")
    for key in _WITHOUT:
        if text.raw.get(key):
            raise text.refuse(key, "0 or false, because assistants have no such parts")
    layers = text.integer("num_hidden_layers")
    shared = text.integer("num_kv_shared_layers", 0, low=0)
    if shared not in (0, layers):
        raise text.refuse("num_kv_shared_layers", f"{layers}, all layers, because an assistant has no keys and values")
    plain = {**text.raw, **dict.fromkeys(_WITHOUT[1:3], False), "num_kv_shared_layers": layers}
    plain |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": None}
    decoder = model_config(dataclasses.replace(text, raw=plain), _TEXT)
    clusters = fields.flag("use_ordered_embeddings")
    count, best = fields.integer("num_centroids", _CLUSTERS), fields.integer("centroid_intermediate_top_k", _BEST)
    # The embedding's multiplier and the soft cap belong to a language model; a draft head's layers have neither.
    decoder = dataclasses.replace(decoder, embedding_multiplier=1.0, logit_softcap=None, tie_embeddings=False)
    return AssistantConfig(
        decoder,
        fields.integer("backbone_hidden_size", _WIDTH),
        count if clusters else None,
        best if clusters else None,
    )


def _ordering(folder: Folder, tensor: Tensor, config: AssistantConfig) -> Tensor:
    """The tokens of each cluster ``[Nc, V / Nc]``, of a tensor ``[V]`` with each token once."""
    V, where = config.layers.vocab_size, f"{folder.given}/{tensor.file}: tensor {tensor.name!r}"
    if tensor.dtype not in ("int64", "int32") or tensor.shape != (V,):
        raise Refusal(f"{where} is {tensor.dtype} {list(tensor.shape)}: expected int64 [{V}]")
    tokens = tensor.read()
    if not np.array_equal(np.sort(tokens), np.arange(V)):
        raise Refusal(f"{where} does not hold each of the {V} tokens once")
    assert config.clusters is not None
    return derived(tensor, tokens.astype(np.int32).reshape(config.clusters, -1))


FORMAT = CheckpointFormat(
    recognises=lambda fields, _: (
        fields.raw.get("model_type") in MODEL_TYPES
        or any(name.lower() in architectures(fields) for name in ARCHITECTURES)
    ),
    read=lambda folder, fields, tensors, _: read(folder, fields, tensors),
    classes=ARCHITECTURES,
)
