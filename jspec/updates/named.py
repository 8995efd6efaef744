"""Which parameters the arrays fill that a caller has by name, by the same maps as the tensors of files."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jspec.checkpoints.files.tensor import FLOAT_DTYPES, ArrayTensor, Tensor, joined
from jspec.checkpoints.huggingface.multimodal import text_tensors
from jspec.checkpoints.tensors.layout import Layout, decoder_layout, params_as_tensors
from jspec.checkpoints.tensors.names import Placement, with_values_apart
from jspec.checkpoints.tensors.parts import Part, TensorPart
from jspec.config import ModelConfig

Names = Literal["huggingface", "jspec"]
WHERE = "weights"  # what messages call the place of an array


class NamedArrays:
    """Arrays by name, and where they go.

    Args:
      given: name -> array, of which shape and dtype matter here.
      layout_of: the layout of tensors like these.

    Attributes:
      arrays: as given.
      layout: which tensor goes where. Its tensors are parts of an array where several tensors are in one.
      unknown: names of tensors that have no place.

    Raises:
      ValueError: an array has another shape or dtype than the model asks for.
    """

    def __init__(self, given: Mapping[str, Any], layout_of: Callable[[dict[str, Tensor]], Layout]):
        self.arrays = dict(given)
        for name, array in given.items():
            require_array(name, array)
        tensors: dict[str, Tensor] = {
            name: ArrayTensor(name, WHERE, Path(), tuple(array.shape), array.dtype.name, self.arrays, name)
            for name, array in given.items()
        }
        self.layout = layout = layout_of(tensors)
        self.unknown = [name for name in layout.tensors if name not in layout.table and not layout.ignores(name)]
        integers = {name for name, dtype in layout.config.param_dtypes().items() if dtype not in FLOAT_DTYPES}
        for name, at in layout.table.items():
            if name in layout.tensors:
                _require_alike(layout.tensors[name], at, at.param in integers)

    @functools.cached_property
    def tensors_of(self) -> dict[str, list[str]]:
        """Name of a parameter -> names of the tensors that fill it, in the order of its rows."""
        filling: dict[str, list[str]] = {}
        for name, at in sorted(self.layout.table.items(), key=lambda item: item[1].start):
            filling.setdefault(at.param, []).append(name)
        return filling

    @property
    def missing(self) -> list[str]:
        """Names of tensors that the model needs."""
        return [name for name in self.layout.table if name not in self.layout.tensors]

    def is_whole(self, param: str) -> bool:
        """Whether all tensors of a parameter are there."""
        return all(name in self.layout.tensors for name in self.tensors_of[param])

    def param(self, name: str) -> Any:
        """A parameter, of the arrays that are bound."""
        return joined(self.parts(name))

    def parts(self, name: str) -> list[Any]:
        """What stands one after another in it."""
        return [self.layout.tensors[tensor].read() for tensor in self.tensors_of[name]]

    @contextlib.contextmanager
    def bound(self, arrays: Mapping[str, Any]) -> Iterator[None]:
        """Parameters are made of other arrays meanwhile, and of none that is not among them."""
        own = dict(self.arrays)
        self.arrays.clear()
        self.arrays.update(arrays)
        try:
            yield
        finally:
            self.arrays.clear()
            self.arrays.update(own)

    def recipe(self, param: str) -> tuple:
        """Of which arrays a parameter is made, and how: the same for two that are made alike."""
        return tuple(_recipe(self.layout.tensors[tensor]) for tensor in self.tensors_of[param])

    def needed(self, params: Iterable[str]) -> list[str]:
        """The names of the arrays that parameters are made of."""
        tensors = (self.layout.tensors[tensor] for param in params for tensor in self.tensors_of[param])
        found = map(_origin, tensors)
        return list(dict.fromkeys(one.key for one in found if isinstance(one, ArrayTensor)))


def decoder_tensors(config: ModelConfig, names: Names, tensors: dict[str, Tensor]) -> Layout:
    """The layout of a language model's tensors that are not quantised, whatever ``config`` says of its weights.

    Args:
      config: that of the model.
      names: ``huggingface`` for those of a checkpoint of this architecture, in any of the layouts that are loaded, or
        ``jspec`` for those of the parameters.
      tensors: by name.

    Raises:
      ValueError: a tensor has a shape that no layout has, or the names begin in two ways.
    """
    if names == "jspec":
        return params_as_tensors(config, tensors | dict(_values_apart(config, tensors)))
    text, others = text_tensors(tensors, WHERE)
    layout = decoder_layout(dataclasses.replace(config, quantization=None, other_formats=()), text)
    table = with_values_apart(layout.table, config)
    return dataclasses.replace(layout, table=table, left_out=layout.left_out | others)


def _values_apart(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Queries with keys, and values, of tensors that have all three, as those of models do that are not quantised, where
    values are a parameter of their own."""
    shapes = config.param_shapes()
    for values in (name for name in shapes if ".attention.values." in name and name not in tensors):
        joint = values.replace(".values.", ".qkv.")
        if joint not in tensors or (whole := tensors[joint]).shape[0] != shapes[joint][0] + shapes[values][0]:
            continue
        for name, start in ((joint, 0), (values, shapes[joint][0])):
            rows = np.arange(start, start + shapes[name][0])
            part = Part(joint, 0, len(rows), lambda rows=rows: rows)
            yield name, TensorPart(name, whole.file, whole.path, shapes[name], whole.dtype, whole, part)


def require_array(name: Any, array: Any):
    """Raise a TypeError unless a name is one, and an array one of JAX or NumPy."""
    if not isinstance(name, str) or not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(
            f"{WHERE}[{name!r}] is {type(array).__name__}: expected names with arrays of JAX or NumPy; of torch, give "
            "numpy.from_dlpack(tensor)"
        )


def _origin(tensor: Any) -> Any:
    """The array that a tensor is, or is a part of."""
    while not isinstance(tensor, ArrayTensor):
        inside = getattr(tensor, "origin", None)
        if inside is None:
            inside = next((one for one in getattr(tensor.values, "args", ()) if isinstance(one, Tensor)), None)
        if inside is None:  # its values were looked at
            return None
        tensor = inside
    return tensor


def _recipe(tensor: Any) -> tuple:
    """What is done to an array that a tensor is made of, and its name."""
    if isinstance(tensor, ArrayTensor):
        return tensor.key, tensor.shape
    if isinstance(tensor, TensorPart):
        return tensor.name, tensor.part.axis, _recipe(tensor.origin)
    if (origin := getattr(tensor, "origin", None)) is not None:
        return tensor.name, _recipe(origin)
    args = getattr(tensor.values, "args", ())
    return tuple(_recipe(one) if isinstance(one, Tensor) else str(one) for one in args)


def _require_alike(tensor: Tensor, at: Placement, is_integer: bool):
    if tensor.shape != at.shape:
        raise ValueError(f"weights[{tensor.name!r}] has shape {list(tensor.shape)}: expected {list(at.shape)}")
    if tensor.dtype not in FLOAT_DTYPES and not is_integer:
        raise ValueError(f"weights[{tensor.name!r}] is {tensor.dtype}: expected one of {', '.join(FLOAT_DTYPES)}")
