"""A Hugging Face folder held against the architecture it declares, and its parameters, assembled one at a time."""

import dataclasses
import functools
import os

import ml_dtypes
import numpy as np

from convert.folder import Folder
from convert.hf_config import read_config
from convert.names import EMBEDDING, HEAD, Rows, is_ignored, param_shapes, tensor_table
from convert.refusal import Refusal
from convert.weights import Tensor, read_headers
from jspec.config import ModelConfig

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Source:
    """An open Hugging Face folder: what it declares, what it holds, and where each tensor goes.

    Attributes:
      folder: the folder.
      config: the architecture of its config.json.
      tensors: every tensor on disk, by name.
      table: every tensor that the architecture needs, with its place.
    """

    folder: Folder
    config: ModelConfig
    tensors: dict[str, Tensor]
    table: dict[str, Rows]

    @property
    def missing(self) -> list[str]:
        """Tensors that the architecture needs and the files lack."""
        return [name for name in self.table if name not in self.tensors]

    @property
    def ignored(self) -> list[str]:
        """Tensors on disk that follow from others."""
        return sorted(n for n in self.tensors if n not in self.table and is_ignored(n, self.config))

    @property
    def unused(self) -> list[str]:
        """Tensors on disk that the architecture has no place for."""
        return sorted(n for n in self.tensors if n not in self.table and not is_ignored(n, self.config))

    @property
    def misshapen(self) -> list[str]:
        """Tensors whose shape disagrees with config.json."""
        return [n for n, rows in self.table.items() if n in self.tensors and self.tensors[n].shape != rows.shape]

    @property
    def exact_dtype(self) -> str:
        """The narrower of ``bfloat16`` and ``float32`` that holds every tensor without rounding."""
        used = {tensor.dtype for name, tensor in self.tensors.items() if name in self.table}
        return "bfloat16" if used == {"bfloat16"} else "float32"

    @property
    def has_float16(self) -> bool:
        return any(tensor.dtype == "float16" for tensor in self.tensors.values())

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape."""
        return param_shapes(self.table)

    def require_match(self):
        """Raise a ``Refusal`` that names the first disagreement between config.json and the tensors."""
        where = self.folder.given
        for name in self.misshapen:
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} has shape {list(self.tensors[name].shape)}, "
                f"but config.json asks for {list(self.table[name].shape)}"
            )
        for name in self.missing:
            hint = "; is the head tied (tie_word_embeddings)?" if name == HEAD else ""
            raise Refusal(f"{where}: tensor {name!r} is missing, and {self.config.architecture} needs it{hint}")
        for name in self.unused:
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} has no place in {self.config.architecture} "
                "as config.json describes it"
            )
        self._require_tied_head()

    def param(self, name: str, dtype: str) -> np.ndarray:
        """The parameter ``name`` in ``dtype``, stacked from its tensors."""
        out = np.empty(self.shapes[name], NUMPY_DTYPES[dtype])
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

    def _require_tied_head(self):
        if self.config.tie_embeddings and HEAD in self.tensors and EMBEDDING in self.tensors:
            head, embedding = self.tensors[HEAD], self.tensors[EMBEDDING]
            if head.shape != embedding.shape or not np.array_equal(head.read(), embedding.read()):
                raise Refusal(
                    f"{self.folder.given}/config.json: tie_word_embeddings is true, but {HEAD} differs from "
                    f"{EMBEDDING}; set it to false"
                )


def open_source(path: str | os.PathLike) -> Source:
    """Read the config and the headers of a Hugging Face folder; no weights.

    Raises:
      Refusal: see ``read_config`` and ``read_headers``.
    """
    folder = Folder(path)
    config = read_config(folder)
    tensors = read_headers(folder)
    return Source(folder, config, tensors, tensor_table(config, tensors))
