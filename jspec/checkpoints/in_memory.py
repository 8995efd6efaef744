"""``InMemory``: a model whose weights are arrays, in the place of a checkpoint folder."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jspec._validation import require
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.folder import Folder, MemoryFolder
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import STORED_DTYPES, ArrayTensor, Tensor
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.layouts.options import NO_OPTIONS, HeadOptions
from jspec.checkpoints.tensors.layout import params_as_tensors
from jspec.config import ModelConfig
from jspec.config.param_specs import Declared

WHERE, CONFIG = "jspec.InMemory", "config.json"


@dataclasses.dataclass(frozen=True, eq=False)
class InMemory:
    """A target or a draft for ``jspec.load`` whose weights are arrays, as a trainer has them, and not files.

    The weights pass through host memory once, a few megabytes at a time, as those of files do; no reference to them is
    kept after ``jspec.load``.

    Example::

        from jspec.models import flat_params

        llm = jspec.load("path/to/target")
        weights = {name: array.copy() for name, array in flat_params(llm.target).items()}
        twin = jspec.load(jspec.InMemory(llm.target.config, weights, llm.tokenizer), draft="ngram")

    Attributes:
      config: what the model is. The fields of a Hugging Face ``config.json``, ``architectures`` among them, as a mapping or
        as a config of transformers; or a folder that has that file, ``generation_config.json`` and the tokenizer's, and
        whose weights are not read; or the config of a jspec model or draft head.
      weights: name -> array of JAX or NumPy. The names are those of Hugging Face files, in any layout that is loaded,
        quantised ones too; for a config of jspec, those of ``jspec.models.flat_params``.
      tokenizer: one of transformers. None takes that of the folder; with neither, prompts are token ids.
    """

    config: Any
    weights: Mapping[str, Any]
    tokenizer: Any = None

    def __post_init__(self):
        require(isinstance(self.weights, Mapping), "weights", type(self.weights), "a mapping of names to arrays")
        for name, array in self.weights.items():
            if not isinstance(name, str) or not hasattr(array, "__array__") or not isinstance(array.dtype, np.dtype):
                raise TypeError(f"weights[{name!r}] is {type(array).__name__}: expected an array of JAX or NumPy")

    def __repr__(self) -> str:
        """Without the weights."""
        return f"InMemory({type(self.config).__name__}, {len(self.weights)} arrays)"

    def checkpoint(self, options: HeadOptions = NO_OPTIONS) -> Checkpoint:
        """The same as a checkpoint, for ``options`` as the user gave them.

        Raises:
          ValueError: ``config`` is none.
        """
        given = dict(self.weights), self.tokenizer
        if isinstance(self.config, Declared):
            return _ParamsInMemory(MemoryFolder(WHERE, {CONFIG: dict}), options, *given, self.config)
        if isinstance(self.config, str | os.PathLike):
            return TensorsInMemory(Folder(self.config), options, *given)
        fields = self.config
        if hasattr(fields, "to_json_string"):  # of transformers: the text that it would write
            fields = json.loads(fields.to_json_string())
        known = "the fields of config.json, a config of transformers or of jspec, or a folder with config.json"
        require(isinstance(fields, Mapping), "config", fields, known)
        return TensorsInMemory(MemoryFolder(WHERE, {CONFIG: lambda: dict(fields)}), options, *given)


class TensorsInMemory(Checkpoint):
    """Arrays under the names of a Hugging Face checkpoint; the other files are those of ``folder``.

    Args:
      folder, options: as for ``Checkpoint``.
      arrays: name -> array.
      tokenizer: None takes that of the folder.
      declared: the config of a jspec model or draft head, by whose names the arrays go; None for those of ``folder``.
    """

    is_in_memory = True

    def __init__(
        self, folder: Folder, options: HeadOptions, arrays: dict[str, Any], tokenizer: Any, declared: Any = None
    ):
        super().__init__(folder, options)
        self._arrays, self._tokenizer, self._declared = arrays, tokenizer, declared

    def with_options(self, options: HeadOptions) -> Checkpoint:
        return type(self)(self.folder, options, self._arrays, self._tokenizer, self._declared)

    def release(self):
        self._arrays.clear()  # which the tensors share

    @functools.cached_property
    def is_converted(self) -> bool:
        return False

    @functools.cached_property
    def tokenizer(self) -> Any:
        return Checkpoint.tokenizer.func(self) if self._tokenizer is None else self._tokenizer

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        for name, array in self._arrays.items():
            if array.dtype.name not in STORED_DTYPES:
                raise Refusal(f"weights[{name!r}] is {array.dtype}: expected one of {', '.join(STORED_DTYPES)}")
        return {
            name: _HostTensor(name, "weights", Path(WHERE), tuple(array.shape), array.dtype.name, self._arrays, name)
            for name, array in self._arrays.items()
        }


class _ParamsInMemory(TensorsInMemory):
    """The same under the names of parameters of a jspec model or draft head."""

    @functools.cached_property
    def hugging_face(self) -> HuggingFaceModel:
        return HuggingFaceModel(self.folder, params_as_tensors(self._declared, self._tensors, as_stored=True))

    @functools.cached_property
    def target_config(self) -> ModelConfig:
        config = self._declared.language_model
        told = "a language model; a draft head is given as draft="
        require(config is not None, "target", self._declared.method, told)
        return config

    @functools.cached_property
    def kind(self) -> Literal["language_model", "draft_head"]:
        return "draft_head" if self._declared.language_model is None else "language_model"


@dataclasses.dataclass(frozen=True)
class _HostTensor(ArrayTensor):
    """An array of a caller, whose parts are read into host memory."""

    def read_part(self, index: Index) -> np.ndarray:
        part = super().read_part(index)
        # JAX keeps the host's copy of an array that was read with that array, here with the caller's.
        return np.asarray(part.copy() if part is self.arrays[self.key] else part)
