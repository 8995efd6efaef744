"""Tensors that have to be finite, because a single number that is not would spoil every later token of a text."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import RangedTensor, Tensor
from jspec.config import ModelConfig
from jspec.config.tensor_names import names_of


@dataclasses.dataclass(frozen=True)
class FiniteTensor(RangedTensor):
    """A tensor that is refused if one of its numbers is infinite or NaN, by ``check`` before any weight is read.

    Attributes:
      origin: the tensor in the files.
    """

    origin: Tensor

    def check(self):
        self.origin.check()
        self.read()

    def read_part(self, index: Index) -> np.ndarray:
        values = self.origin.read_part(index)
        wrong = values[~np.isfinite(values)]
        if wrong.size:
            raise Refusal(
                f"{self.file}: tensor {self.name!r} holds {wrong.flat[0]}: expected finite numbers, which some are not in "
                "float16; fetch the checkpoint as it was published, in bfloat16"
            )
        return values


def with_finite_decays(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, with a ``FiniteTensor`` for each that the decays of gated delta nets are computed from."""
    names, replaced = names_of(config.architecture), dict(tensors)
    for layer in filter(config.has_delta_net, range(config.num_layers)):
        for name in (names.delta_decay, names.delta_bias):
            whole = f"{names.prefix}layers.{layer}.{name}"
            if whole in replaced:
                origin = replaced[whole]
                replaced[whole] = FiniteTensor(whole, origin.file, origin.path, origin.shape, origin.dtype, origin)
    return replaced
