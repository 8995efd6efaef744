"""Checkpoints that hold the maps of all experts of a layer in one tensor, as those of gpt-oss do.

Their form is not that of the parameters, in which the rows of one expert follow those of another, and of each expert the
rows of gate come before those of up:

| tensor | in the files | in the params |
|---|---|---|
| ``gate_up_proj``, ``down_proj`` | ``[X, in, out]`` | ``[X out, in]`` |
| ``*_bias`` | ``[X, out]`` | ``[X out]`` |
| ``*_blocks`` | uint8 ``[X, out, in / 32, 16]``, two codes of MXFP4 in a byte | uint8 ``[pairs, X out, 32]`` |
| ``*_scales`` | uint8 ``[X, out, in / 32]`` | uint32 ``[pairs, X out]`` |

In the files, row 2i of gate and up is row i of gate, and row 2i + 1 is row i of up. A tensor is read and reordered one
expert at a time."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, Tensor, joined
from jspec.config import ModelConfig
from jspec.config.tensor_names import names_of
from jspec.quantization import mxfp4_pairs


@dataclasses.dataclass(frozen=True)
class StackedTensor(Tensor):
    """A tensor of all experts of a layer in the form of its parameter; its ``shape`` and values are in that form.

    Attributes:
      origin: the tensor in the files.
      gate_up: whether its rows are those of gate and up in turn.
    """

    origin: Tensor
    gate_up: bool

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. Only the experts are read of which the part has rows, each of them whole."""
        bounds = bounds_of(index, self.shape)
        first, stop = bounds.pop(self.outputs)
        others, each, parts = [slice(*bound) for bound in bounds], self.shape[self.outputs] // self.origin.shape[0], []
        for expert in range(first // each, -(-stop // each)):
            begin, end = max(first, expert * each), min(stop, (expert + 1) * each)
            rows = self._in_order(self.origin.read_part((slice(expert, expert + 1),))[0])
            parts.append(rows[(slice(begin - expert * each, end - expert * each), *others)].swapaxes(0, self.outputs))
        return joined(parts, self.outputs)

    @property
    def outputs(self) -> int:
        """The axis of the output features in the params."""
        return 1 if self.name.endswith(("_blocks", "_scales")) else 0

    def _in_order(self, expert: np.ndarray) -> np.ndarray:
        """One expert, with output features along axis 0, in the order of the params."""
        rows = self._rows(expert)
        return joined([rows[0::2], rows[1::2]]) if self.gate_up else rows

    def _rows(self, expert: np.ndarray) -> np.ndarray:
        """One expert, with output features along axis 0."""
        if self.name.endswith("_blocks"):
            return repacked(expert)
        if self.name.endswith("_scales"):
            if (largest := expert.max()) > mxfp4_pairs.LARGEST_SCALE:
                raise Refusal(
                    f"{self.file}: tensor {self.name!r} has a scale of {largest}: expected at most "
                    f"{mxfp4_pairs.LARGEST_SCALE}, for weights up to 12; 255 is no number in MXFP4"
                )
            padded = np.pad(expert, ((0, 0), (0, expert.shape[1] % 2))).astype(np.uint32)
            return mxfp4_pairs.factors(padded[:, 0::2], padded[:, 1::2])
        return expert.T if expert.ndim == 2 else expert


def as_in_files(config: ModelConfig, tensors: Mapping[str, Tensor]) -> ModelConfig:
    """``config`` with experts that are not quantised where the files hold all of them so, though config.json says MXFP4.

    transformers leaves that there when it is asked to dequantise what was not quantised, and loads such a folder."""
    if config.experts is None or config.experts.stored is None:
        return config
    plain = dataclasses.replace(config, experts=dataclasses.replace(config.experts, stored=None))
    in_codes = file_shapes(config).keys() - file_shapes(plain).keys()
    return plain if file_shapes(plain).keys() <= tensors.keys() and tensors.keys().isdisjoint(in_codes) else config


def with_stacked_experts(config: ModelConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, with a ``StackedTensor`` for each that holds all experts of a layer.

    Raises:
      Refusal: one of them has another shape or dtype than ``config`` asks for, or is in floats where others are in MXFP4, as
        config.json says.
    """
    replaced = dict(tensors)
    for name, shape in file_shapes(config).items():
        if name not in tensors:
            plain = tensors.get(name.removesuffix("_blocks"))
            if plain is not None:
                raise Refusal(
                    f"{plain.file}: tensor {plain.name!r} is {plain.dtype}, but quantization_config of config.json says "
                    "that experts are stored in MXFP4; remove quantization_config if they are not"
                )
            continue
        tensor, four_bits = tensors[name], name.endswith(("_blocks", "_scales"))
        known = ("uint8",) if four_bits else tuple(FLOAT_DTYPES)
        if tensor.shape != shape or tensor.dtype not in known:
            raise Refusal(
                f"{tensor.file}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but config.json asks for "
                f"{' or '.join(known)} {list(shape)}"
            )
        dtype = "uint32" if name.endswith("_scales") else tensor.dtype
        replaced[name] = StackedTensor(
            name, tensor.file, tensor.path, _shape_of_parameter(name, shape), dtype, tensor, "gate_up" in name
        )
    return replaced


def file_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape in the files of each tensor that holds the maps of all experts of a layer; none if there are none."""
    experts, names = config.experts, names_of(config.architecture)
    if experts is None or names.stacked_maps is None:
        return {}
    X, D, Fe, groups, shapes = experts.count, config.hidden_size, experts.width, mxfp4_pairs.GROUP, {}
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
    if name.endswith(("_blocks", "_scales")):
        pairs = mxfp4_pairs.num_pairs(rest[1] * mxfp4_pairs.GROUP), X * rest[0]
        return pairs if name.endswith("_scales") else (*pairs, mxfp4_pairs.GROUP)
    return (X * rest[0],) if name.endswith("_bias") else (X * rest[1], rest[0])


def repacked(blocks: np.ndarray) -> np.ndarray:
    """The bytes that jspec keeps, uint8 ``[out, pairs, 32]``, of the blocks of a checkpoint, uint8 ``[out, in / 32, 16]``.

    Byte j of a block holds the codes of input features 2j, in its low four bits, and 2j + 1."""
    padded = np.pad(blocks, ((0, 0), (0, blocks.shape[1] % 2), (0, 0)))
    code = np.stack([padded & 15, padded >> 4], axis=-1).astype(np.uint16)
    code = code.reshape(len(blocks), -1, 2, mxfp4_pairs.GROUP // 4, 2, 2)  # [out, pairs, group, words, a or b, half]
    letters = dict(zip("abcd", (code[:, :, group, :, which] for group in (0, 1) for which in (0, 1)), strict=True))
    halves = np.zeros(letters["a"].shape, "<u2")  # [out, pairs, words, half]
    for letter, (magnitude, sign) in mxfp4_pairs.BITS.items():
        halves |= (letters[letter] & 7) << magnitude | (letters[letter] >> 3) << sign
    return halves.reshape(*halves.shape[:2], -1).view(np.uint8)
