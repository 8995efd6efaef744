"""EAGLE and EAGLE-2 heads (Li et al., 2024) as their authors, SafeAILab, publish them.

The tensors are ``fc.*``, the linear map that fuses embedding and feature, and one or more decoder layers ``layers.0.*``.
There is no norm around the layers."""

import dataclasses
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.layers import (
    has_tensor,
    layer_fields,
    read_layers,
    refuse_draft_vocabulary,
    require_no_windows,
)
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, tensor_table
from jspec.config import ModelConfig
from jspec.config.heads import EMBEDDING, EagleConfig


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder in SafeAILab's layout."""
    # SafeAILab's class ignores head_dim and computes hidden_size / num_attention_heads.
    sizes = dataclasses.replace(fields, raw={key: value for key, value in fields.raw.items() if key != "head_dim"})
    layers = read_layers(sizes, tensors, "layers.0.", bias_key="qkv_bias")
    return build(layers, has_tensor(fields, "bias", "fc.bias", tensors), tensors)


def build(layers: ModelConfig, fuse_bias: bool, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a draft head with these decoder layers; ``fuse_bias`` says whether ``fc`` has a bias."""
    config = EagleConfig(layers, fuse_bias, own_embedding=EMBEDDING in tensors)
    # Some files repeat the target's output head. The authors' loader does not read it, and neither does jspec.
    return Layout(config, "EAGLE head", tensor_table(config), tensors, left_out=frozenset((OUTPUT_HEAD,)))


def hf_config(config: EagleConfig) -> dict[str, Any]:
    """The config.json of an EAGLE head in SafeAILab's layout.

    Raises:
      ValueError: the layout cannot state ``config``: it has no attention windows and no separate head_dim.
    """
    c = config.layers
    require_no_windows(c)
    refuse_draft_vocabulary(config)
    require(c.num_heads * c.head_dim == c.hidden_size, "head_dim", c.head_dim, "hidden_size / num_heads in this layout")
    fields = {key: value for key, value in layer_fields(c).items() if key != "head_dim"}
    # SafeAILab's class adds biases if the key is there, even when its value is false. So the key is left out without.
    qkv_bias = {"qkv_bias": True} if c.qkv_bias else {}
    return {"architectures": ["LlamaForCausalLM"], **fields, "bias": config.fuse_bias, **qkv_bias}


FORMAT = CheckpointFormat(
    recognises=lambda _, names: "fc.weight" in names and any(name.startswith("layers.0.") for name in names),
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, *_: hf_config(config),
    classes=("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle"),
    names_target=True,
)
