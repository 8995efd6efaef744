"""Which slice of which parameter each tensor of a checkpoint fills.

A checkpoint stores the query, key and value projections of a layer as three tensors; jspec stacks them into one
parameter along the output channels. For a target of 32 attention heads and 8 KV heads of dimension 128, the tensor
``model.layers.0.self_attn.k_proj.weight``, ``[1024, D]``, goes to ``layers.0.attention.qkv.weight[4096:5120]``.
The configs declare this (``jspec.config.param_specs``); this module makes a table of it."""

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from jspec.config import ModelConfig
from jspec.config.decoder_params import values_apart
from jspec.config.heads import DraftConfig
from jspec.config.param_specs import expanded

OUTPUT_HEAD = "lm_head.weight"
VALUES = 2  # which of the tensors that are joined, behind queries and keys; those of gates may follow

# Buffers that old versions of transformers saved. They are computed from the config, so they are not loaded.
_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


class Placement(NamedTuple):
    """Where a tensor goes: to ``param[start : start + shape[0]]``.

    Attributes:
      param: name of the parameter.
      start: index on the parameter's axis 0, in a weight matrix the first output channel that the tensor fills.
      shape: shape of the tensor.
    """

    param: str
    start: int
    shape: tuple[int, ...]


def tensor_table(config: DraftConfig) -> dict[str, Placement]:
    """Tensor name -> where the tensor goes, for every tensor that a checkpoint of ``config`` has to hold."""
    table: dict[str, Placement] = {}
    for parameter, copy in expanded(config.parameters):
        (rows, *other), lengths = parameter.shape(config.dimensions), parameter.tensor_lengths(config.dimensions)
        if parameter.joined is not None:
            table[parameter.joined.format(*copy)] = Placement(parameter.name.format(*copy), 0, (rows, *other))
            continue
        starts = itertools.accumulate(lengths, initial=0)
        for tensor, start, length in zip(parameter.tensors, starts, lengths, strict=False):
            table[tensor.format(*copy)] = Placement(parameter.name.format(*copy), start, (length, *other))
    return table


def with_values_apart(table: Mapping[str, Placement], config: ModelConfig) -> dict[str, Placement]:
    """``table``, of a model whose values are in one parameter with queries and keys, for ``config``, in which the values of
    some layers are a parameter of their own."""
    found = dict(table)
    for layer in range(config.num_layers) if config.other_formats else ():
        for part in ("weight", "bias") if values_apart(config, layer) else ():
            joined = f"layers.{layer}.attention.qkv.{part}"
            filling = sorted((at.start, name) for name, at in table.items() if at.param == joined)
            for start, name in filling[VALUES:]:
                values, at = table[filling[VALUES][1]], table[name]
                is_values = start == values.start
                apart = at._replace(param=joined.replace(".qkv.", ".values."), start=0)
                found[name] = apart if is_values else at._replace(start=start - values.shape[0])
    return found


def renamed(table: Mapping[str, Placement], prefixes: Mapping[str, str]) -> dict[str, Placement]:
    """``table`` under the tensor names of another layout.

    Args:
      table: tensor name -> where the tensor goes.
      prefixes: prefix of a name in ``table`` -> prefix that replaces it; the first that a name begins with counts.
    """

    def rename(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    return {rename(name): placement for name, placement in table.items()}


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer that old versions of transformers saved and that nothing needs."""
    return bool(_BUFFERS.search(name))
