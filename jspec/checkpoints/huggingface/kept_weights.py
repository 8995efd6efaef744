"""Weights of eight bits that are kept as they are stored, each parameter by the tensors that fill it.

These are FP8 weights with a scale for each block (``jspec.quantization.fp8_block``), whose blocks have whole groups of 128
inputs and any number of output channels; and weights in FP8 or int8 with a scale for each output channel or for each weight,
in checkpoints of which some maps are not quantised. A parameter is kept if all tensors are stored so that fill it. Others,
and those for which there is no kernel, are dequantised, and a note names their tensors."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.dequantize.format import read_scales
from jspec.checkpoints.dequantize.fp8 import FP8Blocks, FP8BlockWeight, Scaled, ScaledWeight
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.names import Placement
from jspec.checkpoints.huggingface.parts import Part, TensorPart
from jspec.checkpoints.huggingface.scales import Scales
from jspec.checkpoints.layout import Layout
from jspec.config import ModelConfig
from jspec.quantization.groups import GROUP, num_groups

WEIGHT = ".weight"
_NAMED = 3  # tensors that a note names


class Kept(NamedTuple):
    """A weight ``[out, in]`` as it is stored: its numbers ``[out, in]``, and its scales, ``[out]`` or ``[out, groups]``."""

    numbers: Tensor
    scales: Tensor


@dataclasses.dataclass(frozen=True)
class GroupScales(Tensor):
    """The scales of blocks, repeated for each output channel and each 128 inputs: float32 ``[out, ceil(in / 128)]``.

    Attributes:
      stored: ``[ceil(out / height), ceil(in / width)]``, of any dtype of floats.
      block: height and width of a block.
    """

    stored: Tensor
    block: tuple[int, int]

    def read(self) -> np.ndarray:
        return self.read_part(())

    def check(self):
        read_scales(self.stored)

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. All stored scales are read, which are few."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        rows, columns = np.arange(first, stop) // self.block[0], np.arange(left, right) * GROUP // self.block[1]
        return read_scales(self.stored)[rows[:, None], columns[None]]


def kept(tensor: Tensor) -> Kept | None:
    """A dequantised weight, or some rows or columns of one, as it is stored; None if it cannot be kept."""
    if isinstance(tensor, FP8BlockWeight):
        outputs, inputs = tensor.shape
        if tensor.block[1] % GROUP:
            return None
        scales, shape = tensor.scales, (outputs, num_groups(inputs))
        named = scales.name, scales.file, scales.path, shape, "float32"
        return Kept(tensor.stored, GroupScales(*named, scales, tensor.block))
    if isinstance(tensor, ScaledWeight):
        scales = tensor.scales
        return Kept(
            tensor.stored, Scales(scales.name, scales.file, scales.path, tensor.shape[:1], scales.dtype, scales)
        )
    whole = kept(tensor.origin) if isinstance(tensor, TensorPart) else None
    if not isinstance(tensor, TensorPart) or whole is None:
        return None
    part = tensor.part
    numbers = _part_of(whole.numbers, part)
    if part.axis == 1 and len(whole.scales.shape) == 1:
        return Kept(numbers, whole.scales)
    groups = part if part.axis == 0 else _groups_of(part)
    return None if groups is None else Kept(numbers, _part_of(whole.scales, groups))


def _groups_of(part: Part) -> Part | None:
    """The groups of the columns ``part``; None if these are not side by side from the start of a group on."""
    columns = part.index()
    first = int(columns[0])
    if first % GROUP or not np.array_equal(columns, np.arange(first, first + len(columns))):
        return None
    groups = np.arange(num_groups(len(columns))) + first // GROUP
    return dataclasses.replace(part, size=len(groups), index=lambda: groups)


def _part_of(tensor: Tensor, part: Part) -> TensorPart:
    shape = tuple(part.size if axis == part.axis else size for axis, size in enumerate(tensor.shape))
    return TensorPart(tensor.name, tensor.file, tensor.path, shape, tensor.dtype, tensor, part)


def with_kept_weights(layout: Layout, stored: FP8Blocks | Scaled) -> Layout:
    """``layout`` with weights as they are stored, and their scales; unchanged if none can be kept.

    Args:
      layout: that of a language model or of multi-token prediction layers, with dequantised weights.
      stored: what config.json says of its weights.
    """
    config: Any = layout.config
    model: ModelConfig = config if isinstance(config, ModelConfig) else config.layers
    kind: Any = stored.quantization
    quantized = dataclasses.replace(model, quantization=kind, quantized_head=not model.tie_embeddings, plain_maps=())
    scales, of_param = _with_layers(config, quantized).scale_names(), {}
    for name, at in layout.table.items():
        if at.param in scales and name in layout.tensors:
            of_param.setdefault(at.param, {})[name] = kept(layout.tensors[name])
    keeps = {param: found for param, found in of_param.items() if None not in found.values()}
    if not keeps:
        return layout
    plain = [param.removesuffix(WEIGHT) for param in scales if param not in keeps]
    quantized = dataclasses.replace(
        quantized,
        quantized_head=f"head{WEIGHT}" in keeps,
        plain_maps=tuple(name for name in plain if name != "head"),
    )
    tensors, table = dict(layout.tensors), {}
    for name, at in layout.table.items():
        table[name] = at
        if at.param in keeps:
            numbers, of_groups = keeps[at.param][name]
            end = name.removesuffix(WEIGHT) + stored.scale_end
            tensors |= {name: numbers, end: of_groups}
            table[end] = Placement(scales[at.param], at.start, of_groups.shape)
    left = [name for name in layout.table if _is_dequantized(tensors.get(name))]
    note = f"the weights stay in {stored.summary}, as they are stored" + (", but for some" if left else "")
    dequantized = _note(left, stored) if left else ""
    notes = (*(n for n in layout.notes if n != layout.dequantized), note, *([dequantized] if left else []))
    return dataclasses.replace(
        layout,
        config=_with_layers(config, quantized),
        table=table,
        tensors=tensors,
        holds_scales=True,
        dequantized=dequantized,
        notes=notes,
        unkept=layout,
    )


def _with_layers(config: Any, model: ModelConfig) -> Any:
    """``config`` with the config ``model`` of its decoder layers."""
    return model if isinstance(config, ModelConfig) else dataclasses.replace(config, layers=model)


def _is_dequantized(tensor: Tensor | None) -> bool:
    origin = tensor.origin if isinstance(tensor, TensorPart) else tensor
    return isinstance(origin, FP8BlockWeight | ScaledWeight)


def _note(names: Iterable[str], stored: FP8Blocks | Scaled) -> str:
    """The sentence for the user on weights that are dequantised, by their names."""
    listed = list(dict.fromkeys(name.removesuffix(WEIGHT) for name in names))
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (
        f"{', '.join(listed[:_NAMED])}{more}, stored in {stored.summary}, are dequantised as they are read, because no "
        "kernel multiplies by them, or they or maps that are read together with them are kept in floats: in bfloat16 they "
        "take two bytes each instead of one"
    )
