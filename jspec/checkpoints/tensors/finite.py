"""Tensors that have to be finite, because a single number that is not would spoil every later token of a text."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
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
