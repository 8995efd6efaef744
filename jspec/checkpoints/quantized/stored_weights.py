"""Weights of eight and of four bits that are kept as they are stored, each parameter by the tensors that fill it.

These are FP8 weights with a scale for each block (``jspec.quantization.fp8_block``), whose blocks have whole groups of 128
inputs and any number of output channels; weights in FP8 or int8 with a scale for each output channel or for each weight, in
checkpoints of which some maps are not quantised; and codes of four bits in groups (``packed_codes.py`` beside this file). A
parameter is kept if all tensors that fill it are stored alike, as most of the checkpoint's are. Others, and those for which
there is no kernel, are dequantised, and a note names their tensors."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.format import BlockFormat, QuantizedTensor, StoredParts
from jspec.checkpoints.quantized.stored_codes import RepackedCodes
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import Placement
from jspec.checkpoints.tensors.parts import Part, TensorPart, part_of
from jspec.config import ModelConfig
from jspec.quantization.formats import Format, num_groups

WEIGHT = ".weight"
_NAMED = 3  # tensors that a note names


def stored_parts(tensor: Tensor) -> StoredParts | None:
    """A quantised weight, or some rows or columns of one, as it is stored; None if it cannot be kept."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.stored()
    whole = stored_parts(tensor.origin) if isinstance(tensor, TensorPart) else None
    if not isinstance(tensor, TensorPart) or whole is None:
        return None
    part = tensor.part
    return whole.rows(lambda of: part_of(of, part)) if part.axis == 0 else _columns_of(whole, part)


def _columns_of(whole: StoredParts, part: Part) -> StoredParts | None:
    """The columns ``part`` of a weight; None if they are not side by side from the start of a group on."""
    numbers, scales, size, columns = whole.arrays["weight"], whole.arrays["scale"], whole.form.group, part.index()
    first, count = int(columns[0]), len(columns)
    if "order" in whole.arrays or not np.array_equal(columns, np.arange(first, first + count)):
        return None
    if size is not None:
        if first % size:
            return None
        groups = np.arange(num_groups(count, size)) + first // size
        scales = part_of(scales, dataclasses.replace(part, size=len(groups), index=lambda: groups))
    if isinstance(numbers, RepackedCodes):  # whose blocks are those of this part
        numbers = RepackedCodes.of(numbers.stored, first, count)
    else:
        numbers = part_of(numbers, part)
    return whole.having(weight=numbers, scale=scales)


def with_stored_weights(layout: Layout, stored: BlockFormat) -> Layout:
    """``layout`` with weights as they are stored, and their scales; unchanged if none can be kept.

    Args:
      layout: that of a language model or of multi-token prediction layers, with dequantised weights.
      stored: what config.json says of its weights.
    """
    found = {name: stored_parts(tensor) for name, tensor in layout.tensors.items() if name in layout.table}
    kinds = collections.Counter(one.form for one in found.values() if one is not None)
    if not kinds:
        return layout
    config, keeps = _kept_params(layout, found, kinds.most_common(1)[0][0])
    if not keeps:
        return layout
    params = config.stored_params()
    tensors, table = dict(layout.tensors), {}
    for name, at in layout.table.items():
        table[name] = at
        module = name.removesuffix(WEIGHT)
        called = {"weight": name, "scale": module + stored.scale_end}
        for part, tensor in keeps[at.param][name].arrays.items() if at.param in keeps else ():
            own = called.get(part, f"{module}.{part}")
            if part != "order" or at.start == 0:  # its parts have one order
                table[own], tensors[own] = Placement(params[at.param].names[part], at.start, tensor.shape), tensor
    left = [name for name in layout.table if name in tensors and tensors[name].dequantizes]
    note = f"the weights stay in {stored.summary}, as they are stored" + (", but for some" if left else "")
    dequantized = _note(left, stored) if left else ""
    notes = (*(n for n in layout.notes if n != layout.dequantized), note, *([dequantized] if left else []))
    return dataclasses.replace(
        layout,
        config=config,
        table=table,
        tensors=tensors,
        holds_scales=True,
        dequantized=dequantized,
        notes=notes,
        dequantized_instead=layout,
    )


def _kept_params(
    layout: Layout, found: Mapping[str, StoredParts | None], form: Format
) -> tuple[Any, dict[str, dict[str, StoredParts]]]:
    """Returns (config with ``quantization=form.name``, {parameter: {tensor name: its stored parts}}).

    Args:
      layout: as for ``with_stored_weights``.
      found: tensor name -> the tensor as it is stored, None if it cannot be kept.
      form: the format in which they are kept; parameters that are stored otherwise are dequantised.
    """
    config: Any = layout.config
    model: ModelConfig = config if isinstance(config, ModelConfig) else config.layers
    quantizes_head = not model.tie_embeddings and form.serves_head(tied=False)
    quantized = dataclasses.replace(model, quantization=form.name, quantized_head=quantizes_head, plain_maps=())
    stored_as, of_param = _with_layers(config, quantized).stored_params(), {}
    for name, at in layout.table.items():
        if at.param in stored_as and name in layout.tensors:
            of_param.setdefault(at.param, {})[name] = found[name]
    keeps = {
        param: tensors
        for param, tensors in of_param.items()
        if all(one is not None and one.form == stored_as[param].form == form for one in tensors.values())
        and _is_of_one_order(tensors.values())
    }
    plain = [param.removesuffix(WEIGHT) for param in stored_as if param not in keeps]
    quantized = dataclasses.replace(
        quantized,
        quantized_head=f"head{WEIGHT}" in keeps,
        plain_maps=tuple(name for name in plain if name != "head"),
    )
    return _with_layers(config, quantized), keeps


def _is_of_one_order(tensors: Iterable[Any]) -> bool:
    """Whether inputs are in one order in all of the tensors, each ``StoredParts``, that fill a parameter."""
    orders = [one.arrays["order"].read() for one in tensors if "order" in one.arrays]
    return all(np.array_equal(order, orders[0]) for order in orders)


def _with_layers(config: Any, model: ModelConfig) -> Any:
    """``config`` with the config ``model`` of its decoder layers."""
    return model if isinstance(config, ModelConfig) else dataclasses.replace(config, layers=model)


def _note(names: Iterable[str], stored: BlockFormat) -> str:
    """The sentence for the user on weights that are dequantised, by their names."""
    listed = list(dict.fromkeys(name.removesuffix(WEIGHT) for name in names))
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (
        f"{', '.join(listed[:_NAMED])}{more}, stored in {stored.summary}, are dequantised as they are read, because no "
        "kernel multiplies by them, or they or maps that are read together with them are kept in floats: in bfloat16 they "
        f"take two bytes each instead of {stored.bytes_each}"
    )
