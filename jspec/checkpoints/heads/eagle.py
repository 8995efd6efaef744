"""EAGLE and EAGLE-2 heads (Li et al., 2024) as SafeAILab publishes them: ``fc`` and ``layers.0``, no norms around
them."""

from typing import Any

from jspec._arguments import require
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads.format import HeadFormat
from jspec.checkpoints.heads.layers import (
    OUTPUT_HEAD,
    by_presence,
    layer_fields,
    read_layers,
    require_no_windows,
)
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.names import tensor_table
from jspec.checkpoints.tensor import Tensor
from jspec.config import ModelConfig
from jspec.heads import EMBEDDING, EagleConfig


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The layout of such a folder."""
    # Its class has no head_dim of its own.
    sizes = Fields({key: value for key, value in fields.raw.items() if key != "head_dim"}, fields.where)
    layers = read_layers(sizes, tensors, "layers.0.", bias_key="qkv_bias")
    return build(layers, by_presence(fields, "bias", "fc.bias", tensors), tensors)


def build(layers: ModelConfig, fuse_bias: bool, tensors: dict[str, Tensor]) -> Layout:
    """The layout of a head of these layers; ``fuse_bias`` says whether ``fc`` has a bias."""
    config = EagleConfig(layers, fuse_bias, own_embedding=EMBEDDING in tensors)
    # Some files carry a copy of the target's output head, which the authors' loader leaves out too.
    return Layout(config, "EAGLE head", tensor_table(config), tensors, left_out=frozenset((OUTPUT_HEAD,)))


def hf_config(config: EagleConfig) -> dict[str, Any]:
    """config.json of a head."""
    c = config.layers
    require_no_windows(c)
    require(c.num_heads * c.head_dim == c.hidden_size, "head_dim", c.head_dim, "hidden_size / num_heads in this layout")
    fields = {key: value for key, value in layer_fields(c).items() if key != "head_dim"}
    qkv_bias = {"qkv_bias": True} if c.qkv_bias else {}  # SafeAILab's class looks for the key, whatever its value
    return {"architectures": ["LlamaForCausalLM"], **fields, "bias": config.fuse_bias, **qkv_bias}


FORMAT = HeadFormat(
    recognises=lambda _, names: "fc.weight" in names and any(name.startswith("layers.0.") for name in names),
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, *_: hf_config(config),
)
