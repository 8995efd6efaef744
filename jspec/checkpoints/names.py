"""Which part of which parameter each Hugging Face tensor is, as the config declares it (``jspec.parameters``)."""

import itertools
import re
from collections.abc import Mapping
from typing import NamedTuple

from jspec.heads import DraftConfig
from jspec.parameters import expanded

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# Buffers that old versions of transformers saved; they follow from the config.
_BUFFERS = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")


class Placement(NamedTuple):
    """Where a tensor of ``shape`` goes: into ``param``, from index ``start`` of its first axis on."""

    param: str
    start: int
    shape: tuple[int, ...]


def tensor_table(config: DraftConfig) -> dict[str, Placement]:
    """Tensor name -> its place, for every tensor that a checkpoint of ``config`` has to hold."""
    table: dict[str, Placement] = {}
    for parameter, copy in expanded(config.parameters):
        (_, *other), lengths = parameter.shape(config.dimensions), parameter.tensor_lengths(config.dimensions)
        starts = itertools.accumulate(lengths, initial=0)
        for tensor, start, length in zip(parameter.tensors, starts, lengths, strict=False):
            table[tensor.format(*copy)] = Placement(parameter.name.format(*copy), start, (length, *other))
    return table


def renamed(table: Mapping[str, Placement], prefixes: Mapping[str, str]) -> dict[str, Placement]:
    """``table`` of a layout that has other names: prefix in the table -> prefix in the files; the first that fits."""

    def rename(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    return {rename(name): place for name, place in table.items()}


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer, which follows from the config."""
    return bool(_BUFFERS.search(name))
