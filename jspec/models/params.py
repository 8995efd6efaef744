"""From a flat dict of params to the module that holds them, and back.

The names are dotted paths, such as ``layers.0.attention.qkv.weight``.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig
from jspec.config.heads import DraftConfig, HeadConfig
from jspec.models.decoder import Decoder
from jspec.models.placement import first_device, named_devices
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
    devices = [first_device() if named_devices() else None]  # committed to it only if it was named
    wanted = [Placed(name, [()], leaf.shape, leaf.dtype, devices) for name, leaf in leaves]
    return nnx.merge(graph, jax.tree.unflatten(tree, [array for [array] in place(params, wanted)]))


class Placed(NamedTuple):
    """An array for devices, made of parts of a parameter.

    Attributes:
      name: of the parameter.
      indices: of its parts, one after the other along axis 0. Behind them there are zeros.
      shape, dtype: of the array.
      devices: each has all of it; None is the default one.
    """

    name: str
    indices: Sequence[tuple[slice, ...]]
    shape: tuple[int, ...]
    dtype: Any
    devices: Sequence[Any]


def place(params: Mapping[str, jax.typing.ArrayLike], wanted: Sequence[Placed]) -> Iterator[list[jax.Array]]:
    """The arrays that are wanted, each on its devices.

    Params that are read from files are read in pieces of a few megabytes, some of which are read while another is sent. So
    the host holds a few pieces, and a device its arrays and one piece besides.

    Raises:
      ValueError: a parameter is not quantised but is expected to be: a cast would round it and not compute its scales.
    """
    reads: Any = params
    lazy, cut = hasattr(params, "pieces"), []
    for one in wanted:
        pieces = [reads.pieces(one.name, index, one.dtype.itemsize) if lazy else [index] for index in one.indices]
        cut.append([(one.name, piece) for some in pieces for piece in some])
    every = [piece for own in cut for piece in own]
    parts = reads.ahead(every) if lazy else (reads[name][index] if index else reads[name] for name, index in every)
    for one, own in zip(wanted, cut, strict=True):
        # Not even copies of bfloat16 or FP8 are done as such on a CPU, whose XLA computes the whole array in float32.
        kind = jnp.dtype(f"uint{8 * one.dtype.itemsize}") if jax.default_backend() == "cpu" else one.dtype
        arrays, done = [], 0
        for _ in own:
            _require_stored(one.name, part := next(parts), one.dtype)
            axis = next((i for i, size in enumerate(np.shape(part)) if size != one.shape[i]), None)
            if axis is None:
                arrays = [_sent(part, one.dtype, device) for device in one.devices]
            else:
                start = [done * (i == axis) for i in range(part.ndim)]
                done += part.shape[axis]
                arrays = arrays or [jnp.zeros(one.shape, kind, device=device) for device in one.devices]
                bits = np.asarray(part).astype(one.dtype, copy=False).view(f"uint{8 * one.dtype.itemsize}")
                sent = (jax.device_put(bits, device) for device in one.devices)
                arrays = [_with_part(array, new, start) for array, new in zip(arrays, sent, strict=True)]
                del bits
            jax.block_until_ready(arrays)
            del part  # before the next one is read
        # The memory of a CPU's array is that of NumPy's, and stays where it is.
        yield [a if a.dtype == one.dtype else jax.device_put(np.asarray(a).view(one.dtype), a.device) for a in arrays]


def _sent(part: jax.typing.ArrayLike, dtype, device) -> jax.Array:
    """An array of its own for a device. ``jnp.asarray`` would compile a copy for each shape of NumPy's arrays."""
    if isinstance(part, np.ndarray) and part.dtype == dtype:
        return jax.device_put(part, device, may_alias=False)
    return jnp.asarray(part, dtype, device=device)


@functools.partial(jax.jit, donate_argnums=0)
def _with_part(array: jax.Array, bits: jax.Array, start: Sequence[jax.Array]) -> jax.Array:
    """``array`` with numbers of these ``bits`` from ``start`` on, in the same memory."""
    whole = jax.lax.dynamic_update_slice(jax.lax.bitcast_convert_type(array, bits.dtype), bits, start)
    return jax.lax.bitcast_convert_type(whole, array.dtype)


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
