"""What a public layout of draft checkpoints consists of; each is declared as data at the end of its file."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints.fields import Fields
from jspec.checkpoints.folder import Folder
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.tensor import Tensor
from jspec.checkpoints.weights import SINGLE


@dataclasses.dataclass(frozen=True)
class HeadFormat:
    """A public layout: how to tell it, read it and write it.

    Attributes:
      recognises: ``(config.json, names of the tensors)`` -> whether a folder has this layout, given that it has none of
        those that are asked before.
      read: ``(folder, config.json, tensors, what the user says of it)`` -> what the folder holds; raises a ``Refusal``.
      write_config: ``(config, name of the target, its architectures)`` -> config.json; None if it cannot be written.
      write_tensors: tensors under their public names, in the form of the parameters -> in the form of the layout.
      file: the name of the weights when they are written.
      needs_target: whether it is a head, which is nothing without its target; a language model is not.
      lists_layers: whether config.json may list layers of the target, which ``HeadOptions.aux_convention`` explains.
    """

    recognises: Callable[[Fields, Collection[str]], bool]
    read: Callable[[Folder, Fields, dict[str, Tensor], HeadOptions], Layout]
    write_config: Callable[[Any, str, Sequence[str]], dict[str, Any]] | None = None
    write_tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict
    file: str = SINGLE
    needs_target: bool = True
    lists_layers: bool = False


def architectures(fields: Fields) -> str:
    """What config.json lists as ``architectures``, in lower case, to search in."""
    return str(fields.raw.get("architectures")).lower()
