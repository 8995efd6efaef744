"""Replaces stored tensors by weights that are dequantised when they are read."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.format import BlockFormat, StoredFormats, WeightTensors
from jspec.checkpoints.quantized.scales import scales_left_out
from jspec.checkpoints.tensors.layout import PREFIX, Layout
from jspec.checkpoints.tensors.names import Placement
from jspec.checkpoints.tensors.parts import RearrangedTensor

WEIGHT, BIAS = ".weight", ".bias"


class Replaced(NamedTuple):
    """The tensors of a checkpoint, with dequantised weights in place of codes, zeros and scales.

    Attributes:
      tensors: tensor name -> tensor; weights are each a ``QuantizedTensor``.
      note: the sentence for the user that says so; empty if no weight is.
      left_out: names of biases that are zero and that the model has no place for.
    """

    tensors: dict[str, Tensor]
    note: str = ""
    left_out: frozenset[str] = frozenset()


def stored_shapes(
    table: Mapping[str, Placement], rearranged: Mapping[str, RearrangedTensor]
) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, for all that a checkpoint has to hold; names also stand there without a leading ``model.``.

    Args:
      table: those that parameters take, by name.
      rearranged: those in the files that parameters do not take as they are (``jspec.checkpoints.tensors.parts``).
    """
    parts = {part.name for tensor in rearranged.values() for part in tensor.parts}
    shapes = {name: at.shape for name, at in table.items() if name not in parts}
    shapes |= {name: tensor.shape for name, tensor in rearranged.items()}
    return {name.removeprefix(PREFIX): shape for name, shape in shapes.items()} | shapes


def dequantized(
    tensors: dict[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    stored: StoredFormats | None,
    where: str,
) -> Replaced:
    """``tensors`` with a ``QuantizedTensor`` for each quantised weight; unchanged if ``stored`` is None.

    Args:
      tensors: those in the files, by name.
      shapes: tensor name -> shape, for all that the model needs.
      stored: what config.json says of the weights.
      where: the folder, for messages.

    Raises:
      Refusal: some of the tensors that stand for a weight are missing or do not fit it, or config.json says that a weight is
        not quantised that is.
    """
    if stored is None:
        return Replaced(tensors)
    replaced, left_out, note = dict(tensors), set(), ""
    for name, shape in shapes.items():
        module = name.removesuffix(WEIGHT)
        if len(shape) != 2 or module == name:
            continue
        parts, form = quantized_parts(module, replaced, stored, where)
        if form is None:
            continue
        _require_quantized(parts, name, replaced, form)
        for end in parts.tensors:
            del replaced[module + end]
        weight, note = form.weight(name, (shape[0], shape[1]), parts), stored.note
        replaced[name] = dataclasses.replace(weight, format=form)
        if (bias := module + BIAS) in replaced and bias not in shapes:
            _require_zeros(replaced[bias], where)
            left_out.add(bias)
    return Replaced(replaced, note, frozenset(left_out))


def quantized_parts(
    module: str, tensors: Mapping[str, Tensor], stored: StoredFormats, where: str
) -> tuple[WeightTensors, BlockFormat | None]:
    """The stored tensors of a linear map, and their format; None in its place if they are not quantised. Arguments as for
    ``dequantized``.

    Raises:
      Refusal: they are quantised, and config.json names no format for them.
    """
    form = stored.of_module(module, tensors)
    ends = form.ends if form else [end for end in stored.ends if end != WEIGHT]
    parts = WeightTensors(module, {end: tensors[module + end] for end in ends if module + end in tensors}, where)
    if form is None and parts.tensors:
        part = next(iter(parts.tensors.values()))
        raise Refusal(
            f"{stored.where}: quantization_config has no format for {module!r}, but {part.file} holds {part.name!r}; name "
            "the module among those of its format"
        )
    return parts, form if form and form.is_quantized(parts.tensors) else None


def with_note(layout: Layout, replaced: Replaced) -> Layout:
    """``layout``, of ``replaced.tensors``, with notes on what is dequantised and left out; unchanged if nothing is."""
    if not replaced.note:
        return layout
    scales, notes = scales_left_out(layout.tensors.keys() - layout.left_out, layout.table)
    return dataclasses.replace(
        layout,
        left_out=layout.left_out | replaced.left_out | scales,
        notes=(*layout.notes, replaced.note, *notes),
        dequantized=replaced.note,
    )


def require_some(replaced: Replaced, stored: StoredFormats | None):
    """Raise a ``Refusal`` if no weight is stored as config.json says that all are."""
    if stored is not None and not replaced.note:
        raise Refusal(
            f"{stored.where}: quantization_config says that the weights are {stored.summary}, but none of the files is; "
            "remove it if they are not quantised"
        )


def _require_quantized(parts: WeightTensors, name: str, tensors: Mapping[str, Tensor], stored: BlockFormat):
    """Raise a ``Refusal`` if config.json or another tensor says that the weight ``name`` is not quantised."""
    part = next(iter(parts.tensors.values()))
    if parts.module in stored.plain.names:
        raise Refusal(
            f"{stored.where}: {stored.plain.key} says that {parts.module!r} is not quantised, but {part.file} holds "
            f"{part.name!r}; remove it there"
        )
    if name in tensors and WEIGHT not in parts.tensors:
        raise Refusal(
            f"{parts.where}/{part.file}: holds {part.name!r} besides {name!r}, which is the same weight; delete one of them"
        )


def _require_zeros(bias: Tensor, where: str):
    """Raise a ``Refusal`` unless a bias that the model has no place for changes nothing; AutoGPTQ once wrote such biases."""
    if bias.read().any():
        raise Refusal(
            f"{where}/{bias.file}: tensor {bias.name!r} is a bias other than 0, for which the model has no place; is "
            "attention_bias or mlp_bias missing in config.json?"
        )
