"""The tensors of a GGUF file: plain ones, and quantised ones as they are stored."""

import math

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.gguf.header import Header, TensorInfo
from jspec.checkpoints.huggingface.weights import SafeTensor
from jspec.checkpoints.quantized.gguf import BlockWeight
from jspec.checkpoints.quantized.gguf_blocks import PLAIN, TYPES


def tensors_of(header: Header) -> dict[str, Tensor]:
    """The tensors of a file by their names there: plain ones of their shape, quantised ones with leading axes joined.

    Raises:
      Refusal: a tensor is of a type that is not read, or does not lie in the file, or two of them overlap.
    """
    tensors, ends = {}, []
    for info in header.tensors:
        tensor, size = _tensor(header, info)
        ends.append((info.start, info.start + size, info.name))
        tensors[info.name] = tensor
    ends.sort()
    for (_, end, name), (start, _, other) in zip(ends, [*ends[1:], (header.size, 0, "")], strict=True):
        if end > start:
            where = f"overlaps {other!r}" if other else f"ends at {end}, behind the {header.size} bytes of the file"
            raise Refusal(f"{header.where}: tensor {name!r} {where}; download it again")
    return tensors


def _tensor(header: Header, info: TensorInfo) -> tuple[Tensor, int]:
    """A tensor and how many bytes it takes."""
    file, count = header.path.name, math.prod(info.shape)
    if info.type in PLAIN:
        tensor = SafeTensor(info.name, file, header.path, info.shape, PLAIN[info.type], info.start)
        return tensor, count * (4 if info.type == 0 else 2)
    if (kind := TYPES.get(info.type)) is None:
        known = ", ".join([*(one.name for one in TYPES.values()), "F32", "F16", "BF16"])
        raise Refusal(
            f"{header.where}: tensor {info.name!r} is of type {info.type} of ggml, which is not read; {known} are"
        )
    if info.shape[-1] % kind.weights:
        raise Refusal(
            f"{header.where}: tensor {info.name!r} has rows of {info.shape[-1]} weights in {kind.name}: expected a multiple "
            f"of {kind.weights}; download it again"
        )
    shape = count // info.shape[-1], info.shape[-1]
    tensor = BlockWeight(info.name, file, header.path, shape, "float32", type=kind, start=info.start)
    return tensor, count // kind.weights * kind.bytes
