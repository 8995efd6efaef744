"""Draft heads whose weights are stored in FP8, NVFP4, MXFP4 or four bits: weights that are dequantised as they are read.

The formats are those of language models (``jspec.checkpoints.quantized``). What is quantised, and how large a weight is, the
tensors in the files say. So this comes before a layout is read, and no layout knows of it. ``kinds.recognise`` then has the
weights of heads with decoder layers as they are stored. Multi-token prediction layers in the formats that language models
dequantise are read by their own layout, because the files may hold experts in other forms."""

import dataclasses
import re
from collections.abc import Iterable

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config import read_quantization
from jspec.checkpoints.quantized.config_fields import KEYS
from jspec.checkpoints.quantized.dequantized_layout import WEIGHT, Replaced, dequantized, quantized_parts, require_some
from jspec.checkpoints.quantized.format import StoredFormats

_CODES = re.compile(r"\.(weight_packed|qweight|_weight_qdata)$")


def names_of_weights(names: Iterable[str]) -> list[str]:
    """The names that tensors have once they are dequantised: ``fc.weight`` for ``fc.weight_packed``."""
    return [_CODES.sub(WEIGHT, name) for name in names]


def without_quantization(fields: Fields) -> Fields:
    """config.json without what it says of quantised weights."""
    return dataclasses.replace(fields, raw={key: value for key, value in fields.raw.items() if key not in KEYS})


def dequantized_head(fields: Fields, tensors: dict[str, Tensor], where: str) -> Replaced:
    """The tensors of a draft head with dequantised weights in place of stored ones; unchanged if none are quantised.

    Args:
      fields: its config.json.
      tensors: name in the files -> tensor.
      where: the folder, for messages.

    Raises:
      Refusal: the weights are quantised in a way that is not read, some of the tensors that stand for a weight are missing
        or do not fit each other, or none are quantised although config.json says so.
    """
    stored = read_quantization(fields)
    if stored is None:
        return Replaced(tensors)
    replaced = dequantized(tensors, _shapes(tensors, stored, where), stored, where)
    require_some(replaced, stored)
    return replaced


def _shapes(tensors: dict[str, Tensor], stored: StoredFormats, where: str) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, with that of the whole weight for each that is quantised."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    ends = "|".join(map(re.escape, sorted(stored.ends, key=len, reverse=True)))
    modules = dict.fromkeys(match[1] for match in map(re.compile(rf"(.*)(?:{ends})").fullmatch, tensors) if match)
    for module in modules:
        parts, form = quantized_parts(module, tensors, stored, where)
        if form is None:
            continue
        shape = form.shape(parts)
        if shape is None or len(shape) != 2:
            found = ", ".join(f"{tensor.name!r} {list(tensor.shape)}" for tensor in parts.tensors.values())
            raise Refusal(
                f"{where}: the files hold {found}, which make no weight {[module + WEIGHT]}, although config.json says that "
                f"the weights are {form.summary}; fetch them again"
            )
        shapes[module + WEIGHT] = (shape[0], shape[1])
    return shapes
