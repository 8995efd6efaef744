"""From a flat dict of params to the module that holds them, and back.

The names are dotted paths, such as ``layers.0.attention.qkv.weight``.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.config.heads import DraftConfig, HeadConfig
from jspec.models.decoder import Decoder
from jspec.quantization.formats import KINDS
from jspec.registry import entry_of, resolve

_QUANTIZED = {jnp.dtype(form.numbers) for form in KINDS.values()}  # dtypes of quantised weights
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def abstract_params(config: DraftConfig, dtype: str = "float32") -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of ``config`` by its name. Nothing is allocated."""
    flat = flat_params(_abstract(config, dtype))
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in flat.items()}


def init(config: DraftConfig, rngs: nnx.Rngs, dtype: str = "float32"):
    """The module of ``config`` with random weights."""
    module = resolve(entry_of(config).module or "")
    return module(config.language_model or config, dtype=DTYPES[dtype], rngs=rngs)


def build(config: ModelConfig, params: Mapping[str, jax.typing.ArrayLike], dtype: str = "float32") -> Decoder:
    """The module of ``config`` with the weights ``params``.

    Args:
      config: the architecture.
      params: the arrays by their dotted names. They are cast to ``dtype``. Quantised weights must have the dtype that
        they are stored in, because a cast would round them.
      dtype: ``float32`` or ``bfloat16``.

    Raises:
      ValueError: a parameter is missing, unknown or of another shape, or one that ought to be quantised is not.
    """
    return _build(config, params, dtype)


def build_head(config: HeadConfig, params: Mapping[str, jax.typing.ArrayLike], dtype: str = "float32"):
    """The module of a draft head with the weights ``params``; arguments and errors as for ``build``.

    Integer parameters stay integers.
    """
    return _build(config, params, dtype)


def require_params(
    config: DraftConfig, params: Mapping[str, jax.typing.ArrayLike], dtype: str
) -> dict[str, jax.ShapeDtypeStruct]:
    """``abstract_params`` of the config; a ValueError, as for ``build``, unless ``params`` are like these."""
    expected = abstract_params(config, dtype)
    # Params that are read from files when they are asked for say their shapes without that.
    shapes = getattr(params, "shapes", None) or {name: np.shape(array) for name, array in params.items()}
    for name in sorted(set(expected) | set(params)):
        if name not in params:
            raise ValueError(f"parameter {name!r} is missing")
        if name not in expected:
            raise ValueError(f"parameter {name!r} is unknown to {type(config).__name__}")
        if tuple(shapes[name]) != expected[name].shape:
            raise ValueError(f"parameter {name!r} has shape {shapes[name]}, expected {expected[name].shape}")
    return expected


def named_leaves(state) -> tuple[list[tuple[str, Any]], Any]:
    """The arrays of a module's state with their dotted names, and the structure that holds them."""
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    return [(_dotted(path), leaf) for path, leaf in paths], tree


def _build(config, params, dtype: str) -> Any:
    require_params(config, params, dtype)
    graph, state = nnx.split(_abstract(config, dtype))
    leaves, tree = named_leaves(state)
    arrays = [jnp.asarray(stored(params, name, leaf.dtype), dtype=leaf.dtype) for name, leaf in leaves]
    return nnx.merge(graph, jax.tree.unflatten(tree, arrays))


def stored(params: Mapping[str, jax.typing.ArrayLike], name: str, expected) -> jax.typing.ArrayLike:
    """The parameter ``name``, which is to become an array of the dtype ``expected``.

    Raises:
      ValueError: it is not quantised but is expected to be: a cast would round it and not compute its scales.
    """
    _require_stored(name, array := params[name], expected)
    return array


def stored_parts(
    params: Mapping[str, jax.typing.ArrayLike], name: str, expected, indices: Sequence[tuple[slice, ...]]
) -> Iterator[np.ndarray]:
    """The given parts of the same on the host, one after another. Params with a method ``parts`` read no others.

    Raises:
      ValueError: as for ``stored``.
    """
    read_parts: Any = getattr(params, "parts", None)
    if read_parts is None:
        array = np.asarray(params[name])
        parts = (array[index] for index in indices)
    else:
        parts = read_parts(name, indices)
    for part in parts:
        _require_stored(name, part, expected)
        yield part
        del part  # before the next one is read


def _require_stored(name: str, array: jax.typing.ArrayLike, expected):
    dtype = jnp.result_type(array)
    if expected in _QUANTIZED and dtype != expected:
        raise ValueError(
            f"parameter {name!r} is {dtype}: expected {expected}, as jspec.models.quantization.quantize has it"
        )


def flat_params(model: nnx.Module) -> dict[str, jax.Array]:
    """Every parameter of ``model`` by its dotted name."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param))
    return {_dotted(path): leaf for path, leaf in leaves}


def _abstract(config, dtype: str):
    return nnx.eval_shape(lambda: init(config, nnx.Rngs(0), dtype))


def _dotted(path) -> str:
    return ".".join(str(part.key) for part in path if hasattr(part, "key"))
