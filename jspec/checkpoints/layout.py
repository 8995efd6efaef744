"""What a checkpoint was recognised as, and how its tensors become parameters."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.names import EMBEDDING, HEAD, Placement, is_buffer, tensor_table
from jspec.checkpoints.tensor import Tensor
from jspec.config import ModelConfig
from jspec.heads import HeadConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """A checkpoint as its reader understood it.

    Attributes:
      config: the architecture.
      label: what it is, for people.
      table: every tensor that the config needs, with its place.
      tensors: every tensor of the files, by name; one whose form differs from its parameter's stands here converted.
      spares: tensor -> the tensor that it repeats.
      shared_by: the key of config.json that says so.
      left_out: tensors that are understood and follow from others.
      aux_convention: what its layer ids were said to mean, if it lists any.
      norm_output: what its ``norm_output`` means, if it has it.
      notes: what the user ought to know of how it was read, a sentence each.
    """

    config: ModelConfig | HeadConfig
    label: str
    table: dict[str, Placement]
    tensors: dict[str, Tensor]
    spares: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared_by: str = ""
    left_out: frozenset[str] = frozenset()
    aux_convention: str | None = None
    norm_output: str | None = None
    notes: tuple[str, ...] = ()

    def ignores(self, name: str) -> bool:
        """Whether a tensor outside the table is harmless."""
        return is_buffer(name) or name in self.spares or name in self.left_out


@dataclasses.dataclass(frozen=True)
class Derived(Tensor):
    """A tensor made from what the files hold, in the form of its parameter."""

    values: np.ndarray

    def read(self) -> np.ndarray:
        return self.values


def derived(origin: Tensor, values: np.ndarray) -> Derived:
    """``values`` in the place of ``origin``."""
    return Derived(origin.name, origin.file, origin.path, values.shape, values.dtype.name, values)


def reshaped(tensor: Tensor, *shape: int) -> Tensor:
    """``tensor`` with leading dimensions of one dropped, or added, if its size allows."""
    return dataclasses.replace(tensor, shape=shape) if math.prod(tensor.shape) == math.prod(shape) else tensor


def decoder_layout(config: ModelConfig, tensors: dict[str, Tensor]) -> Layout:
    """The layout of a causal language model."""
    table, tied = tensor_table(config), config.tie_embeddings and HEAD in tensors
    twice = tied and EMBEDDING in tensors
    if tied and not twice:  # a tied pair may be stored under the output head's name alone
        table[HEAD] = table.pop(EMBEDDING)
    return Layout(
        config,
        config.architecture,
        table,
        tensors,
        spares={HEAD: EMBEDDING} if twice else {},
        shared_by="tie_word_embeddings",
    )
