"""Checkpoints that hold the maps of all experts of a layer in one tensor, of families whose experts have names of their own.

Text models of multimodal checkpoints are stored so, and Qwen3.5. A checkpoint has one of two orientations:

| tensor | transposed, as Qwen3-VL is published | as Qwen3.5 is, and as transformers 5 writes them | of one expert |
|---|---|---|---|
| ``gate_up_proj`` | ``[X, D, 2 Fe]`` | ``[X, 2 Fe, D]`` | ``gate_proj`` and ``up_proj``, ``[Fe, D]`` each |
| ``down_proj`` | ``[X, Fe, D]`` | ``[X, D, Fe]`` | ``down_proj``, ``[D, Fe]`` |

Gate comes before up. The shapes say which orientation it is. One tensor of a layer may be square, and then the other one,
which is not, decides for both: D is Fe or 2 Fe, and never both. If the other map has a tensor for each expert, the
architecture says how published files are (``TensorNames.transposed_experts``).

In FP8 with a scale for each block, the scales of ``gate_up_proj`` are ``gate_up_proj_scale_inv``, one matrix for each
expert in the same orientation. They become those of its maps, ``<map>.weight_scale_inv``."""

import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, ComputedTensor, Tensor
from jspec.config import ModelConfig
from jspec.config.tensor_names import names_of

GATE_UP, DOWN = "gate_up_proj", "down_proj"
FP8, SCALES = "float8_e4m3fn", "_scale_inv"


def split_experts(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    layers: Sequence[int] | None = None,
    prefix: str | None = None,
    block: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """``tensors``, with the maps of each expert in place of tensors that hold those of all experts of a layer.

    Args:
      config: the config of the decoder layers.
      tensors: those in the files, by name.
      layers: the numbers that the layers have in the checkpoint; by default those of a language model.
      prefix: what stands before ``layers.``; by default what the architecture has there.
      block: output and input features that share a scale, if config.json says that there are FP8 weights.

    Raises:
      Refusal: one of them has another shape or dtype than ``config`` asks for, the two of a layer are oriented differently,
        an expert is stored twice, or blocks of gate and up are the same.
    """
    replaced, experts, names = dict(tensors), config.experts, names_of(config.architecture)
    if experts is None or names.stacked_maps is not None:
        return replaced
    start = names.prefix if prefix is None else prefix
    gate, up, down = names.expert_maps
    X, D, Fe = experts.count, config.hidden_size, experts.width
    for i, layer in enumerate(range(config.num_layers) if layers is None else layers):
        at = f"{start}layers.{layer}.{names.experts}."
        held = {part: tensors[at + part] for part in (GATE_UP, DOWN) if at + part in tensors}
        if not held or not config.has_experts(i):
            continue
        transposed = _orientation(held, {GATE_UP: (X, 2 * Fe, D), DOWN: (X, D, Fe)}, block is not None)
        transposed = names.transposed_experts if transposed is None else transposed
        for part, maps, shape in ((GATE_UP, (gate, up), (Fe, D)), (DOWN, (down,), (D, Fe))):
            if part not in held:
                continue
            del replaced[at + part]
            _add(replaced, at, held[part], maps, shape, transposed)
            scales = replaced.get(at + part + SCALES)
            if block is not None and scales is not None and held[part].dtype == FP8:
                del replaced[at + part + SCALES]
                _add(replaced, at, scales, maps, _blocks(scales, maps, shape, block, transposed), transposed, SCALES)
    return replaced


def _blocks(
    scales: Tensor, maps: Sequence[str], shape: tuple[int, int], block: tuple[int, int], transposed: bool
) -> tuple[int, int]:
    """How many blocks a map of ``shape`` has, output and input features; ``scales`` are those of all experts."""
    rows, columns = (-(-size // of) for size, of in zip(shape, block, strict=True))
    if len(maps) > 1 and shape[0] % block[0]:
        raise Refusal(
            f"{scales.file}: tensor {scales.name!r} has scales of blocks of {block[0]} output features, but the gate of an "
            f"expert has {shape[0]}, which is no multiple: blocks in which gate and up meet are not read"
        )
    X, expected = scales.shape[0], (len(maps) * rows, columns)
    expected = [X, *(expected[::-1] if transposed else expected)]
    if list(scales.shape) != expected:
        raise Refusal(
            f"{scales.file}: tensor {scales.name!r} has shape {list(scales.shape)}: expected {expected}, a scale for each "
            f"block of {block[0]} x {block[1]}; fetch it again"
        )
    return rows, columns


def _add(
    tensors: dict[str, Tensor],
    at: str,
    origin: Tensor,
    maps: Iterable[str],
    shape: tuple[int, int],
    transposed: bool,
    end: str = "",
):
    """Add the ``maps`` of each expert, which are one after another in ``origin``, under names with this ``end``."""
    for expert in range(origin.shape[0]):
        for number, name in enumerate(maps):
            own = f"{at}{expert}.{name}.weight{end}"
            if own in tensors:
                raise Refusal(
                    f"{origin.file}: holds tensor {origin.name!r} besides {own!r}, which is a part of it; delete one of them"
                )
            start = number * shape[0]
            named = origin.name if end else own  # scales that are wrong are called as the file calls them
            read = functools.partial(_read_map, origin, shape, expert, start, transposed)
            tensors[own] = ComputedTensor(named, origin.file, origin.path, shape, origin.dtype, read, origin.check)


def _read_map(
    origin: Tensor, shape: tuple[int, int], expert: int, start: int, transposed: bool, index: Index
) -> np.ndarray:
    """A part of a linear map ``[out, in]`` of one expert, in a tensor of all experts, of which no other is read.

    Args:
      origin: that tensor.
      shape: of the map.
      expert: the number of the expert.
      start: the first of its output features.
      transposed: whether the tensor has input features before output features.
      index: of the part.
    """
    rows, columns = bounds_of(index, shape)
    outputs, inputs = slice(start + rows[0], start + max(rows)), slice(*columns)
    places = (inputs, outputs) if transposed else (outputs, inputs)
    part = origin.read_part((slice(expert, expert + 1), *places))[0]
    return part.T if transposed else part


def _orientation(held: Mapping[str, Tensor], plain: Mapping[str, tuple[int, int, int]], in_fp8: bool) -> bool | None:
    """Whether the tensors of a layer have input features before output features; None if they are square.

    Args:
      held: ``GATE_UP`` or ``DOWN`` -> the tensor, for those that the files have.
      plain: the shape of each with output features first.
      in_fp8: whether they may be in FP8.
    """
    found: dict[bool, Tensor] = {}
    dtypes = (*FLOAT_DTYPES, FP8) if in_fp8 else tuple(FLOAT_DTYPES)
    for part, tensor in held.items():
        X, out, inputs = plain[part]
        if tensor.dtype not in dtypes or tensor.shape not in ((X, out, inputs), (X, inputs, out)):
            raise Refusal(
                f"{tensor.file}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, but config.json asks for "
                f"one of {', '.join(dtypes)} and {[X, inputs, out]} or {[X, out, inputs]}"
            )
        if out != inputs:
            found[tensor.shape[1] == inputs] = tensor
    if len(found) > 1:
        shapes = " and ".join(f"{tensor.name!r} {list(tensor.shape)}" for tensor in found.values())
        raise Refusal(
            f"{found[True].file}: tensors {shapes} are oriented differently: expected both with input features "
            "before output features, or both the other way round"
        )
    return next(iter(found), None)
