"""The tensors of a GGUF file under the names of the checkpoint that it was made from."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.gguf.header import Header, TensorInfo
from jspec.checkpoints.gguf.sources import Source
from jspec.checkpoints.huggingface.weights import SafeTensor
from jspec.checkpoints.quantized.gguf import BlockWeight
from jspec.checkpoints.quantized.gguf_blocks import PLAIN, TYPES
from jspec.checkpoints.tensors.parts import Part, part_of

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def tensors_of(header: Header) -> dict[str, Tensor]:
    """The tensors of a file by their names there, ``[rows, in]`` with leading axes joined; vectors and biases ``[rows]``.

    Raises:
      Refusal: a tensor is of a type that is not read, or does not lie in the file, or two of them overlap.
    """
    tensors, ends = {}, []
    for info in header.tensors:
        tensors[info.name], size = _tensor(header, info)
        ends.append((info.start, info.start + size, info.name))
    ends.sort()
    for (_, end, name), (start, _, other) in zip(ends, [*ends[1:], (header.size, 0, "")], strict=True):
        if end > start:
            where = f"overlaps {other!r}" if other else f"ends at {end}, behind the {header.size} bytes of the file"
            raise Refusal(f"{header.where}: tensor {name!r} {where}; download it again")
    return tensors


def with_factors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` without those that hold numbers of weights in NVFP4, which these then have: what multiplies a weight, and
    what its inputs were divided by where they were rounded, too, which has no effect here."""
    found = dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if isinstance(weight, BlockWeight) and weight.type.form.channel_numbers:
            found.pop(f"{module}.input_scale", None)
            if (factors := found.pop(f"{module}.scale", None)) is not None:
                count = math.prod(factors.shape)
                if factors.dtype != "float32" or weight.held % count:
                    raise Refusal(
                        f"{factors.file}: tensor {factors.name!r} is {factors.dtype} {list(factors.shape)}: expected "
                        f"a float32 for each of equal parts of {weight.held} rows"
                    )
                found[name] = dataclasses.replace(weight, factors=factors)
    return found


def _tensor(header: Header, info: TensorInfo) -> tuple[Tensor, int]:
    """A tensor and how many bytes it takes."""
    file, rows, inputs = Path(header.where).name, math.prod(info.shape[:-1]), info.shape[-1]
    if dtype := PLAIN.get(info.type):
        shape = (rows * inputs,) if len(info.shape) == 1 or info.name.endswith(".bias") else (rows, inputs)
        tensor = SafeTensor(info.name, file, header.path, shape, dtype, info.start)
        return tensor, rows * inputs * _ITEM_BYTES[dtype]
    if (kind := TYPES.get(info.type)) is None:
        known = ", ".join([*(one.name for one in TYPES.values()), "F32", "F16", "BF16"])
        raise Refusal(
            f"{header.where}: tensor {info.name!r} is of type {info.type} of ggml, which is not read: expected {known}"
        )
    if inputs % kind.weights or len(info.shape) < 2:
        raise Refusal(
            f"{header.where}: tensor {info.name!r} of shape {list(info.shape)} is in {kind.name}: expected rows of a "
            f"multiple of {kind.weights} weights; download it again"
        )
    tensor = BlockWeight(
        info.name, file, header.path, (rows, inputs), "float32", type=kind, start=info.start, held=rows
    )
    return tensor, rows * inputs // kind.weights * kind.bytes


def renamed_tensors(sources: Mapping[str, Source], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names, made of ``tensors`` as ``sources`` say."""
    return {name: _made(name, source, tensors) for name, source in sources.items()}


def _made(name: str, source: Source, tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[source.tensor]
    if source.part is not None:
        parts = [tensor, *([tensors[source.second]] if source.second else [])]
        return ComputedTensor.of(
            dataclasses.replace(tensor, name=name), source.shape, "uint8", functools.partial(_of_experts, source, parts)
        )
    if isinstance(tensor, BlockWeight):
        if source.change is not None or source.second is not None:
            raise Refusal(f"{tensor.file}: tensor {tensor.name!r} is in {tensor.type.name}: expected F32, F16 or BF16")
        shape = math.prod(source.shape[:-1]), source.shape[-1]
        found = dataclasses.replace(tensor, name=name, shape=shape, rows=source.rows, columns=source.columns)
        return found if shape == source.shape else _reshaped(found, source.shape)
    second = tensors[source.second] if source.second else None
    if source.change is None and second is None:  # whose parts are read without the others
        for axis, order in enumerate((source.rows, source.columns)):
            if order is not None:
                size = math.prod(source.shape[:-1]) if axis == 0 and len(tensor.shape) > 1 else source.shape[-1]
                tensor = part_of(tensor, Part(name, axis, size, order))
        tensor = dataclasses.replace(tensor, name=name)
        return tensor if tensor.shape == source.shape else _reshaped(tensor, source.shape)

    def values(index: Index) -> np.ndarray:
        found = tensor.read() if second is None else np.concatenate([tensor.read(), second.read()])
        found = found if source.rows is None else found[source.rows()]
        changed = found if source.change is None else source.change(found.astype(np.float32))
        return changed.reshape(source.shape)[index]

    dtype = tensor.dtype if source.change is None else "float32"
    return ComputedTensor.of(dataclasses.replace(tensor, name=name), source.shape, dtype, values)


def _reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ComputedTensor.of(tensor, shape, tensor.dtype, lambda index: tensor.read().reshape(shape)[index])


def _of_experts(source: Source, tensors: Sequence[Any], index: Index) -> np.ndarray:
    """The ``blocks`` ``[X, out, groups, 16]`` or ``scales`` ``[X, out, groups]`` of experts in MXFP4, two neighbouring codes
    in a byte."""
    (first, stop), *others = bounds_of(index, source.shape)
    out, held = source.shape[1], tensors[0].held
    wanted = np.arange(first * out, stop * out) if source.rows is None else source.rows()[first * out : stop * out]
    blocks = np.empty((len(wanted), source.shape[2], 17), np.uint8)
    for i, tensor in enumerate(tensors):
        here = wanted // held == i
        rows = wanted[here] - i * held
        if rows.size:
            low = int(rows.min())
            blocks[here] = tensor.blocks(slice(low, int(rows.max()) + 1))[rows - low]
    if source.part == "scales":
        found = blocks[..., 0]
    else:  # in the file a byte has code i in its low half and code 16 + i in its high half
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        found = codes[..., 0::2] | codes[..., 1::2] << 4
    shaped = found.reshape(stop - first, *source.shape[1:])
    return shaped[(slice(None), *(slice(*bound) for bound in others))]
