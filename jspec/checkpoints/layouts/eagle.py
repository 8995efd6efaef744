"""EAGLE and EAGLE-2 heads (Li et al., 2024) as their authors, SafeAILab, publish them, and as NeMo Automodel writes them.

The tensors are ``fc.*``, the linear map that fuses embedding and feature, and one or more decoder layers ``layers.0.*``.
There is no norm around the authors' layers. NeMo Automodel's have one before the first attention and one at the end,
``norm``; its config.json is the target's, but for the class and ``draft_num_hidden_layers``."""

import dataclasses
from typing import Any

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.layouts.format import CheckpointFormat, architectures
from jspec.checkpoints.layouts.layers import (
    has_tensor,
    layer_fields,
    num_numbered_layers,
    read_layers,
    refuse_draft_vocabulary,
    require_no_windows,
    without_layers_of_target,
)
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, tensor_table
from jspec.config import ModelConfig
from jspec.config.heads import EMBEDDING, EagleConfig

NEMO = "LlamaEagleDraftModel"  # the class of NeMo Automodel's heads


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder in SafeAILab's layout, or in NeMo Automodel's."""
    if NEMO.lower() in architectures(fields):
        count = num_numbered_layers(tensors)
        fields.only("draft_num_hidden_layers", count, "as many layers as the files hold tensors of")
        bias_key = "qkv_bias" if fields.raw.get("qkv_bias") else "attention_bias"
        layers = read_layers(without_layers_of_target(fields, count), tensors, "layers.0.", bias_key)
        return build(layers, has_tensor(fields, "fc_bias", "fc.bias", tensors), tensors, norms=True)
    # SafeAILab's class ignores head_dim and computes hidden_size / num_attention_heads.
    sizes = dataclasses.replace(fields, raw={key: value for key, value in fields.raw.items() if key != "head_dim"})
    layers = read_layers(sizes, tensors, "layers.0.", bias_key="qkv_bias")
    return build(layers, has_tensor(fields, "bias", "fc.bias", tensors), tensors)


def build(layers: ModelConfig, fuse_bias: bool, tensors: dict[str, Tensor], norms: bool = False) -> Layout:
    """The ``Layout`` of a draft head with these decoder layers; ``fuse_bias`` says whether ``fc`` has a bias, and ``norms``
    whether there are norms around the layers."""
    config = EagleConfig(layers, fuse_bias, own_embedding=EMBEDDING in tensors, norms=norms)
    # Some files repeat the target's output head. The authors' loader does not read it, and neither does jspec.
    return Layout(config, "EAGLE head", tensor_table(config), tensors, left_out=frozenset((OUTPUT_HEAD,)))


def hf_config(config: EagleConfig) -> dict[str, Any]:
    """The config.json of an EAGLE head in SafeAILab's layout, or of one with norms in NeMo Automodel's.

    Raises:
      ValueError: the layout cannot state ``config``: neither has attention windows, and SafeAILab's no separate
        head_dim.
    """
    c = config.layers
    require_no_windows(c)
    refuse_draft_vocabulary(config)
    if config.norms:
        biases = {"attention_bias": c.output_bias, "qkv_bias": c.qkv_bias, "fc_bias": config.fuse_bias}
        return {"architectures": [NEMO], **layer_fields(c), **biases, "draft_num_hidden_layers": c.num_layers}
    require(c.num_heads * c.head_dim == c.hidden_size, "head_dim", c.head_dim, "hidden_size / num_heads in this layout")
    fields = {key: value for key, value in layer_fields(c).items() if key != "head_dim"}
    # SafeAILab's class adds biases if the key is there, even when its value is false. So the key is left out without.
    qkv_bias = {"qkv_bias": True} if c.qkv_bias else {}
    return {"architectures": ["LlamaForCausalLM"], **fields, "bias": config.fuse_bias, **qkv_bias}


FORMAT = CheckpointFormat(
    recognises=lambda _, names: "fc.weight" in names and any(name.startswith("layers.0.") for name in names),
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, *_: hf_config(config),
    classes=("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", NEMO),
    names_target=True,
)
