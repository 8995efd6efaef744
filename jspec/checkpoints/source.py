"""A Hugging Face folder held against the architecture it declares, and its parameters, assembled one at a time."""

import dataclasses
import functools
import os

import ml_dtypes
import numpy as np

from jspec.checkpoints.folder import Folder
from jspec.checkpoints.heads.kinds import is_head, recognise
from jspec.checkpoints.heads.options import NOTHING_SAID, HeadOptions
from jspec.checkpoints.heads.speculators import verifier
from jspec.checkpoints.hf_config import read_fields
from jspec.checkpoints.layout import Layout
from jspec.checkpoints.names import HEAD, Placement
from jspec.checkpoints.pickles import PickledTensor
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import FLOAT_DTYPES, Tensor
from jspec.checkpoints.weights import read_headers
from jspec.config import ModelConfig
from jspec.heads import HeadConfig

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Source:
    """An open Hugging Face folder: what it declares, what it holds, and where each tensor goes.

    Attributes:
      folder: the folder.
      layout: what it was recognised as.
      verifier: the target that a draft head says it was made for.
    """

    folder: Folder
    layout: Layout
    verifier: str | None = None

    @property
    def config(self) -> ModelConfig | HeadConfig:
        """The architecture of its config.json."""
        return self.layout.config

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor on disk, by name."""
        return self.layout.tensors

    @property
    def table(self) -> dict[str, Placement]:
        """Every tensor that the architecture needs, with its place."""
        return self.layout.table

    @property
    def missing(self) -> list[str]:
        """Tensors that the architecture needs and the files lack."""
        return [name for name in self.table if name not in self.tensors]

    @property
    def ignored(self) -> list[str]:
        """Tensors on disk that follow from others."""
        return sorted(n for n in self.tensors if n not in self.table and self.layout.ignores(n))

    @property
    def unused(self) -> list[str]:
        """Tensors on disk that the architecture has no place for."""
        return sorted(n for n in self.tensors if n not in self.table and not self.layout.ignores(n))

    @property
    def misshapen(self) -> list[str]:
        """Tensors whose shape disagrees with config.json."""
        return [n for n, rows in self.table.items() if n in self.tensors and self.tensors[n].shape != rows.shape]

    @property
    def exact_dtype(self) -> str:
        """The narrower of ``bfloat16`` and ``float32`` that holds every tensor without rounding."""
        used = {self.tensors[name].dtype for name in self._floats}
        return "bfloat16" if used == {"bfloat16"} else "float32"

    @property
    def has_float16(self) -> bool:
        return any(tensor.dtype == "float16" for tensor in self.tensors.values())

    @property
    def is_pickled(self) -> bool:
        return any(isinstance(tensor, PickledTensor) for tensor in self.tensors.values())

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape."""
        return self.config.param_shapes()

    def require_match(self):
        """Raise a ``Refusal`` that names the first disagreement between config.json and the tensors."""
        where = self.folder.given
        for name in self.misshapen:
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} has shape {list(self.tensors[name].shape)}, "
                f"but config.json asks for {list(self.table[name].shape)}"
            )
        for name in self._misplaced_integers:
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} is stored as {self.tensors[name].dtype}, "
                f"but {self.layout.label} needs one of {', '.join(FLOAT_DTYPES)}"
            )
        for name in self.missing:
            hint = "; is the head tied (tie_word_embeddings)?" if name == HEAD else ""
            raise Refusal(f"{where}: tensor {name!r} is missing, and {self.layout.label} needs it{hint}")
        for name in self.unused:
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} has no place in {self.layout.label} "
                "as config.json describes it"
            )
        self._require_equal_spares()

    def param(self, name: str, dtype: str) -> np.ndarray:
        """The parameter ``name`` in ``dtype``, stacked from its tensors."""
        out = np.empty(self.shapes[name], param_dtype(self.config, name, dtype))
        for tensor in self._parts[name]:
            rows = self.table[tensor]
            out[rows.start : rows.start + rows.shape[0]] = self.tensors[tensor].read()
        return out

    @functools.cached_property
    def _parts(self) -> dict[str, list[str]]:
        parts: dict[str, list[str]] = {}
        for tensor, rows in self.table.items():
            parts.setdefault(rows.param, []).append(tensor)
        return parts

    @property
    def _misplaced_integers(self) -> list[str]:
        return [name for name in self._floats if self.tensors[name].dtype not in FLOAT_DTYPES]

    @property
    def _floats(self) -> list[str]:
        """Tensors of the files whose parameter takes the dtype of the weights."""
        integers = self.config.integer_names()
        return [n for n, rows in self.table.items() if n in self.tensors and rows.param not in integers]

    def _require_equal_spares(self):
        for spare, name in self.layout.spares.items():
            copy, original = self.tensors[spare], self.tensors[name]
            if copy.shape != original.shape or not np.array_equal(copy.read(), original.read()):
                raise Refusal(
                    f"{self.folder.given}/config.json: {self.layout.shared_by} is true, but {spare} differs from {name}; "
                    "set it to false"
                )


def open_source(path: str | os.PathLike, allow_pickle: bool = False, options: HeadOptions = NOTHING_SAID) -> Source:
    """Read the config and the headers of a Hugging Face folder; of the weights, only a map of a reduced vocabulary.

    Args:
      path: the folder.
      allow_pickle: read tensors from pickles too, where there is no safetensors file.
      options: what the user says of an EAGLE-3 head.

    Raises:
      Refusal: see ``read_fields``, ``read_headers`` and ``recognise``.
    """
    folder = Folder(path)
    fields = read_fields(folder)
    layout = recognise(folder, fields, read_headers(folder, allow_pickle), options)
    return Source(folder, layout, verifier(fields))


def open_model(path: str | os.PathLike) -> Source:
    """The same for a folder that has to hold a language model.

    Raises:
      Refusal: it holds a draft head.
    """
    folder = Folder(path)
    fields = read_fields(folder)
    tensors = read_headers(folder)
    if is_head(fields, tensors):
        raise Refusal(f"{path}: holds a draft head, not a language model; give it as draft=, with its target")
    return Source(folder, recognise(folder, fields, tensors))


def param_dtype(config: ModelConfig | HeadConfig, name: str, dtype: str) -> np.dtype:
    """What the parameter ``name`` of ``config`` is in when the weights are in ``dtype``."""
    return np.dtype(np.int32) if name in config.integer_names() else NUMPY_DTYPES[dtype]
