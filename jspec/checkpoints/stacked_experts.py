"""Checkpoints that hold the maps of all experts of a layer in one tensor, as those of gpt-oss do.

Their form is not that of the parameters, in which the rows of one expert follow those of another, and of each expert the
rows of gate come before those of up:

| tensor | in the files | in the params |
|---|---|---|
| ``gate_up_proj``, ``down_proj`` | ``[X, in, out]`` | ``[X out, in]`` |
| ``*_bias`` | ``[X, out]`` | ``[X out]`` |
| ``*_blocks`` | uint8 ``[X, out, in / 32, 16]``, two codes of MXFP4 in a byte | uint8 ``[X out, bytes]`` |
| ``*_scales`` | uint8 ``[X, out, in / 32]`` | uint8 ``[X out, groups]`` |

In the files, row 2i of gate and up is row i of gate, and row 2i + 1 is row i of up. A tensor is read and reordered one
expert at a time."""

import dataclasses

import numpy as np

from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import FLOAT_DTYPES, STORED_DTYPES, Tensor
from jspec.config import ModelConfig
from jspec.pallas import mxfp4
from jspec.tensor_names import names_of


@dataclasses.dataclass(frozen=True)
class StackedTensor(Tensor):
    """A tensor of all experts of a layer in the form of its parameter; its ``shape`` and values are in that form.

    Attributes:
      origin: the tensor in the files.
      gate_up: whether its rows are those of gate and up in turn.
    """

    origin: Tensor
    gate_up: bool

    def read(self) -> np.ndarray:
        stored, found = self.origin.read(), np.empty(self.shape, STORED_DTYPES[self.dtype])
        if self.name.endswith("_scales") and (stored > mxfp4.LARGEST_SCALE).any():
            raise Refusal(f"{self.file}: tensor {self.name!r} has a scale of 255, which MXFP4 calls no number")
        for expert, into in zip(stored, np.split(found, len(stored)), strict=True):
            rows = self._rows(expert)
            into[:] = np.concatenate([rows[0::2], rows[1::2]]) if self.gate_up else rows
        return found

    def _rows(self, expert: np.ndarray) -> np.ndarray:
        """One expert, with output features along axis 0."""
        if self.name.endswith("_blocks"):
            return mxfp4.repacked(expert)
        if self.name.endswith("_scales"):
            return np.pad(expert, ((0, 0), (0, expert.shape[1] % 2)))
        return expert.T if expert.ndim == 2 else expert


def in_form_of_parameters(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, of which those of stacked experts are ``StackedTensor``.

    Raises:
      Refusal: one of them has another shape or dtype than ``config`` asks for.
    """
    found = dict(tensors)
    for name, shape in file_shapes(config).items():
        if name not in tensors:
            continue
        tensor, four_bits = tensors[name], name.endswith(("_blocks", "_scales"))
        known = ("uint8",) if four_bits else tuple(FLOAT_DTYPES)
        if tensor.shape != shape or tensor.dtype not in known:
            raise Refusal(
                f"{tensor.file}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but config.json asks for "
                f"{' or '.join(known)} {list(shape)}"
            )
        found[name] = StackedTensor(
            name, tensor.file, tensor.path, _shape_of_parameter(name, shape), tensor.dtype, tensor, "gate_up" in name
        )
    return found


def file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape in the files of each tensor that holds the maps of all experts of a layer; none if there are none."""
    experts, names = config.experts, names_of(config.architecture)
    if experts is None or names.stacked_maps is None:
        return {}
    X, D, Fe, groups, shapes = experts.count, config.hidden_size, experts.width, mxfp4.GROUP, {}
    for layer in filter(config.has_experts, range(config.num_layers)):
        for name, (out, inputs) in zip(names.stacked_maps, ((2 * Fe, D), (D, Fe)), strict=True):
            tensor = f"{names.prefix}layers.{layer}.{name}"
            if experts.stored is None:
                shapes[tensor] = X, inputs, out
            else:
                shapes[f"{tensor}_blocks"] = X, out, inputs // groups, groups // 2
                shapes[f"{tensor}_scales"] = X, out, inputs // groups
            if experts.biases:
                shapes[f"{tensor}_bias"] = X, out
    return shapes


def _shape_of_parameter(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    X, *rest = shape
    if name.endswith("_blocks"):
        return X * rest[0], mxfp4.stored_width(rest[1] * mxfp4.GROUP)
    if name.endswith("_scales"):
        return X * rest[0], mxfp4.stored_groups(rest[1] * mxfp4.GROUP)
    return (X * rest[0],) if name.endswith("_bias") else (X * rest[1], rest[0])
