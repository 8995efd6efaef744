"""``HuggingFaceModel``: a language model or draft head in a Hugging Face folder, whose params are assembled one at a time.

It also compares the tensors in the files with those that config.json asks for."""

import dataclasses
import functools
import itertools
import warnings

import numpy as np

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.pickles import PickledTensor
from jspec.checkpoints.files.ranges import Index, bounds_of, pieces
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, NUMPY_DTYPES, STORED_DTYPES, Tensor
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, Placement
from jspec.checkpoints.tensors.params import StoredParams
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig
from jspec.quantization.formats import StoredArray


@dataclasses.dataclass(frozen=True)
class HuggingFaceModel:
    """What a Hugging Face folder was recognised as: its config, its tensors, and where each tensor goes.

    The tensors stay on disk until ``param`` reads those of one parameter.

    Attributes:
      folder: the folder.
      layout: what it was recognised as.
      target_name: name or path of the target that a draft head was made for; None if the checkpoint does not say.
    """

    folder: Folder
    layout: Layout
    target_name: str | None = None

    @property
    def config(self) -> ModelConfig | HeadConfig:
        """The config of the language model or the draft head."""
        return self.layout.config

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensor name -> tensor, for every tensor in the files."""
        return self.layout.tensors

    @property
    def table(self) -> dict[str, Placement]:
        """Tensor name -> where the tensor goes, for every tensor that the config needs."""
        return self.layout.table

    @property
    def missing(self) -> list[str]:
        """Names of the tensors that the config needs and the files lack."""
        return [name for name in self.table if name not in self.tensors]

    @property
    def ignored(self) -> list[str]:
        """Names of the tensors in the files that are not loaded, because nothing needs them or they repeat others."""
        return sorted(n for n in self.tensors if n not in self.table and self.layout.ignores(n))

    @property
    def unused(self) -> list[str]:
        """Names of the tensors in the files that the config has no place for; ``require_match`` refuses them."""
        return sorted(n for n in self.tensors if n not in self.table and not self.layout.ignores(n))

    @property
    def misshapen(self) -> list[str]:
        """Names of the tensors whose shape in the files is not the one that config.json asks for."""
        return [
            name for name, at in self.table.items() if name in self.tensors and self.tensors[name].shape != at.shape
        ]

    @property
    def exact_dtype(self) -> str:
        """The narrower of ``bfloat16`` and ``float32`` that holds every tensor without rounding.

        Weights that are stored in eight bits, and their scales, are not counted: they are kept as they are."""
        return "bfloat16" if self._plain_dtypes == {"bfloat16"} else "float32"

    @property
    def default_dtype(self) -> str:
        """The dtype of the parameters by default: ``exact_dtype``, and ``bfloat16`` beside weights in blocks that are kept
        or dequantised, because float32 would take four bytes where the files have one or less."""
        is_small = self.layout.dequantized or self.layout.dequantized_instead is not None
        return "bfloat16" if is_small else self.exact_dtype

    @property
    def has_float16(self) -> bool:
        return "float16" in self._plain_dtypes

    @property
    def is_pickled(self) -> bool:
        return any(isinstance(tensor, PickledTensor) for tensor in self.tensors.values())

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of the whole parameter as it is stored, for all that the files hold: scales are left out
        if they are yet to be computed."""
        return self.config.param_shapes() | {name: array.shape for name, array in self._kept.items()}

    @property
    def mistyped(self) -> dict[str, str]:
        """Tensor name -> the dtypes that its parameter can be made of, for tensors of another dtype."""
        numbers = {name: array.dtype for name, array in self._kept.items() if array.dtype not in FLOAT_DTYPES}
        wanted = {name: numbers.get(self.table[name].param) for name in self._floats}
        return {
            name: kind or f"one of {', '.join(FLOAT_DTYPES)}"
            for name, kind in wanted.items()
            if self.tensors[name].dtype not in ((kind,) if kind else FLOAT_DTYPES)
        }

    def require_match(self):
        """Raise a ``Refusal`` that names the first disagreement between config.json and the tensors."""
        where, wholes = self.folder.given, self.layout.wholes
        for name in self.misshapen:
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} has shape {list(self.tensors[name].shape)}, "
                f"but config.json asks for {list(self.table[name].shape)}"
            )
        for name, expected in self.mistyped.items():
            why = ", quantised as quantization_config says," if self.layout.holds_scales else ""
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {wholes.get(name, name)!r} is stored as "
                f"{self.tensors[name].dtype}, but {self.layout.label}{why} needs {expected}"
            )
        for name in self.missing:
            tied = "is the output head tied to the embedding (tie_word_embeddings)?"
            fix = tied if name == OUTPUT_HEAD else "fetch the checkpoint again"
            raise Refusal(
                f"{where}: tensor {wholes.get(name, name)!r} is missing, and {self.layout.label} needs it; {fix}"
            )
        for name in self.unused:
            maps = (weight.removesuffix("weight") for weight in self.layout.table if weight.endswith(".weight"))
            of = next((one.removesuffix(".") for one in maps if name.startswith(one)), None)
            fix = (
                "do they belong together?"
                if of is None
                else f"what it does to {of!r} is not read; is there a plain copy?"
            )
            raise Refusal(
                f"{where}/{self.tensors[name].file}: tensor {name!r} has no place in {self.layout.label} "
                f"as config.json describes it; {fix}"
            )
        self._require_equal_duplicates()

    def params(self, dtype: str | None) -> StoredParams:
        """The params, read one at a time, with a warning if weights are dequantised.

        Args:
          dtype: as for ``param``; None for ``default_dtype``.

        Raises:
          Refusal: scales of FP8 or int8 weights are wrong.
        """
        for name in self.table:
            self.tensors[name].check()
        if self.layout.dequantized:
            warnings.warn(f"{self.folder.given}: {self.layout.dequantized}", stacklevel=6)
        chosen = dtype or self.default_dtype
        return StoredParams(self.folder.given, self.shapes, lambda name, index: self.param(name, chosen, index))

    def param(self, name: str, dtype: str, index: Index = ()) -> np.ndarray:
        """The values of the parameter ``name``, read from the files and stacked along axis 0.

        Args:
          name: the parameter, for example ``layers.0.attention.qkv.weight``.
          dtype: ``float32`` or ``bfloat16``; integer parameters are int32 whatever it is, and weights that the files hold
            in eight bits, and their scales, are as they are stored.
          index: which part of them, slices with steps of 1. Bytes of other parts are not read (``Tensor.read_part``).
        """
        kept = self._kept.get(name)
        kind = param_dtype(self.config, name, dtype) if kept is None else STORED_DTYPES[kept.dtype]
        sizes = self.shapes[name]
        (start, stop), *others = bounds_of(index, sizes)
        shape = stop - start, *(end - begin for begin, end in others)
        parts = []
        for tensor in self._tensors_of[name]:
            at = self.table[tensor]
            first, last = max(start, at.start), min(stop, at.start + at.shape[0])
            if first < last:
                parts.append((tensor, slice(first - start, last - start), slice(first - at.start, last - at.start)))

        def read(tensor: str, rows: slice) -> np.ndarray:
            is_whole = shape[1:] == sizes[1:] and rows == slice(0, self.table[tensor].shape[0])
            return self.tensors[tensor].read() if is_whole else self.tensors[tensor].read_part((rows, *index[1:]))

        if len(parts) == 1:  # it is copied only if it is of another dtype, or transposed
            return np.ascontiguousarray(read(parts[0][0], parts[0][2]), kind)
        out = np.empty(shape, kind)
        for tensor, into, rows in parts:
            out[into] = read(tensor, rows)
        return out

    @functools.cached_property
    def _tensors_of(self) -> dict[str, list[str]]:
        """Parameter name -> names of the tensors that fill it."""
        tensors: dict[str, list[str]] = {}
        for tensor, at in self.table.items():
            tensors.setdefault(at.param, []).append(tensor)
        return tensors

    @functools.cached_property
    def _kept(self) -> dict[str, StoredArray]:
        """Shape and dtype of the arrays of quantised parameters, by their names, if the files hold them so."""
        params = self.config.stored_params().values() if self.layout.holds_scales else ()
        return {name: array for stored in params for name, array in stored.arrays.items()}

    @property
    def _plain_dtypes(self) -> set[str]:
        """The dtypes of the tensors whose parameter takes the dtype of the weights."""
        others = self._kept.keys() | self.config.param_dtypes().keys()
        return {self.tensors[name].dtype for name in self._floats if self.table[name].param not in others}

    @property
    def _floats(self) -> list[str]:
        """Names of the tensors in the files whose parameter holds floats."""
        integers = {name for name, dtype in self.config.param_dtypes().items() if dtype not in FLOAT_DTYPES}
        return [name for name, at in self.table.items() if name in self.tensors and at.param not in integers]

    def _require_equal_duplicates(self):
        for duplicate, name in self.layout.duplicates.items():
            copy, original = self.tensors[duplicate], self.tensors[name]
            both = ((copy.read_part(some), original.read_part(some)) for some in pieces((), original.shape, 4))
            if copy.shape != original.shape or not all(itertools.starmap(np.array_equal, both)):
                raise Refusal(
                    f"{self.folder.given}/config.json: {self.layout.tied_by} is true, but {duplicate} differs from {name}; "
                    "set it to false"
                )


def param_dtype(config: ModelConfig | HeadConfig, name: str, dtype: str) -> np.dtype:
    """The dtype of the parameter ``name``: its own, such as int32 of ``draft_ids``, or else that of the weights."""
    return NUMPY_DTYPES.get(own := config.param_dtypes().get(name, dtype), np.dtype(own))
