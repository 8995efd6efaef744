"""Tensors that have to be finite, because a single number that is not would spoil every later token of a text."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.tensors.params import StoredParams
from jspec.config import ModelConfig
from jspec.config.tensor_names import names_of


def finite(tensor: Tensor, index: Index = ()) -> np.ndarray:
    """The values of a part of a tensor.

    Raises:
      Refusal: one of them is infinite or NaN.
    """
    values = tensor.read_part(index)
    if not isinstance(values, np.ndarray):  # on a device, where all weights are looked at before any is used
        return values
    wrong = values[~np.isfinite(values)]
    if wrong.size:
        raise Refusal(
            f"{tensor.file}: tensor {tensor.name!r} holds {wrong.flat[0]}: expected finite numbers, which some are not in "
            "float16; fetch the checkpoint as it was published, in bfloat16"
        )
    return values


def require_finite(params: StoredParams, where: str):
    """Read all parameters, which their files then have, and refuse them unless all of their numbers are finite.

    Args:
      params: of a checkpoint.
      where: its folder, for messages.

    Raises:
      Refusal: a number is infinite or NaN, or a file is damaged.
    """
    for name in params:
        for values in params.parts(name, params.pieces(name, (), 4)):
            if values.dtype.name == "bfloat16":  # as its bits, of which NumPy looks at many at a time
                wrong = bool(((values.view(np.uint16) & 0x7F80) == 0x7F80).any())
            else:
                wrong = values.dtype.kind == "f" and not np.isfinite(values).all()
            if wrong:
                raise Refusal(f"{where}: parameter {name!r} has NaN or infinity: expected finite numbers")


def with_finite_decays(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, of which those that the decays of gated delta nets are computed from are refused unless they are
    finite, before any weight is read."""
    names, replaced = names_of(config.architecture), dict(tensors)
    for layer in filter(config.has_delta_net, range(config.num_layers)):
        for name in (names.delta_decay, names.delta_bias):
            whole = f"{names.prefix}layers.{layer}.{name}"
            if whole in replaced:
                named = dataclasses.replace(replaced[whole], name=whole)
                read = functools.partial(finite, named)
                replaced[whole] = ComputedTensor.of(named, named.shape, named.dtype, read, read)
    return replaced
