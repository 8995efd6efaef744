"""``CheckpointFormat``: one public layout of draft checkpoints. Each file of this package declares its own at its end."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.weights import SINGLE
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.checkpoints.tensors.layout import Layout


@dataclasses.dataclass(frozen=True)
class CheckpointFormat:
    """A public layout of checkpoints: how it is recognised, read and written.

    Attributes:
      recognises: ``recognises(config.json, tensor names)`` says whether a folder has this layout. It is only asked
        about folders that none of the earlier formats in the registry recognised.
      read: ``read(folder, config.json, tensors, options)`` returns the ``Layout`` of the folder; it raises a ``Refusal``
        if config.json and the tensors contradict each other.
      write_config: ``write_config(config, target_name, target_architectures)`` returns the config.json to write; None
        for a layout that jspec only reads.
      write_tensors: converts tensors (public name -> array) from the form of jspec's parameters into the form of this
        layout. Example: EAGLE-3's ``draft_ids`` become ``d2t`` and ``t2d``.
      file: the file name of the weights that are written.
      needs_target: True for a draft head, which cannot run without its target; False for a language model.
      lists_layers: whether config.json may list layers of the target. ``HeadOptions.aux_convention`` then says what the
        layer ids mean.
      classes: the names that ``architectures`` may have. A head of any other class is refused, whatever its tensors are,
        because it may compute something else. None if ``read`` looks at ``architectures`` itself.
      names_target: whether ``architectures`` may name a language model, too, because heads of the layout are published with
        the config of their target.
      name: what kind of layout it is: ``native``, that of a method's authors or of other tools, or ``speculators``.
    """

    recognises: Callable[[Fields, Collection[str]], bool]
    read: Callable[[Folder, Fields, dict[str, Tensor], HeadOptions], Layout]
    write_config: Callable[[Any, str, Sequence[str]], dict[str, Any]] | None = None
    write_tensors: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = dict
    file: str = SINGLE
    needs_target: bool = True
    lists_layers: bool = False
    classes: tuple[str, ...] | None = None
    names_target: bool = False
    name: str = "native"


def architectures(fields: Fields) -> str:
    """The ``architectures`` of config.json as one lower-case string, in which callers search for a class name."""
    return str(fields.raw.get("architectures")).lower()


def refuse_gemma(fields: Fields):
    """Raise a ``Refusal`` if the class of a draft head has layers of Gemma 4, as DeepSpec's heads for it do."""
    if "gemma" in architectures(fields):
        raise fields.refuse("architectures", "a class with layers of Qwen3; draft heads of Gemma 4 are not supported")
