"""Modules whose arrays lie on the devices of a mesh: split into shards, or the same on every device.

A module of shards has the structure of one shard, and arrays that are those of all shards side by side. It is called
inside of ``jax.shard_map``, where every device sees the arrays of its own shard. Outside of that it only says what it is."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.config import ModelConfig, Shards
from jspec.config.shards import SPLIT, Split
from jspec.models.decoder import Decoder
from jspec.models.params import DTYPES, named_leaves, require_params, stored
from jspec.parameters import GATE_UPS, Axis


def mesh_of(count: int, axis: str) -> Mesh:
    """A mesh of the first ``count`` devices along one axis.

    Raises:
      ValueError: there are fewer devices.
    """
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"tensor_parallel={count}: expected at most {len(devices)}, the number of devices that JAX sees"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"tensor_parallel={count}: expected {len(devices)}, the number of devices of all {jax.process_count()} processes"
        )
    return Mesh(np.array(devices[:count]), (axis,))


def build_shards(
    config: ModelConfig, params: Mapping[str, jax.typing.ArrayLike], dtype: str, shards: Shards, mesh: Mesh
) -> Decoder:
    """The module of ``config`` in shards on the devices of ``mesh``.

    Each device is sent its own parts, one array after another, so that one array at a time is in host memory if ``params``
    reads them when they are asked for.

    Args:
      config: the architecture.
      params, dtype: as for ``jspec.models.params.build``.
      shards: how many shards, along which axis of the mesh.
      mesh: of one axis.

    Raises:
      ValueError: as for ``build``, or the model cannot be split so.
    """
    require_params(config, params, dtype)
    splits, dimensions = shards.splits(config), config.dimensions

    def filled(name: str, leaf) -> jax.Array:
        split, array = splits[name], np.asarray(stored(params, name, leaf.dtype))

        def part(index: Any) -> np.ndarray:
            shard = 0
            if split.axis is not None:
                shard = (index[split.axis].start or 0) * shards.count // leaf.shape[split.axis]
            return part_of(array, split, dimensions, shards, shard).astype(leaf.dtype, copy=False)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)

    return with_leaves(abstract_shards(config, shards, mesh, dtype), filled)


def abstract_shards(config: ModelConfig, shards: Shards, mesh: Mesh, dtype: str = "bfloat16") -> Decoder:
    """The same module with shapes in place of arrays, which say how the arrays lie on the devices."""
    splits = shards.splits(config)

    def placed(name: str, leaf) -> jax.ShapeDtypeStruct:
        axis = splits[name].axis
        shape = tuple(n * (shards.count if i == axis else 1) for i, n in enumerate(leaf.shape))
        spec = PartitionSpec(*(shards.axis if i == axis else None for i in range(leaf.ndim)))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    one = nnx.eval_shape(lambda: Decoder(config, shards=shards, dtype=DTYPES[dtype], rngs=nnx.Rngs(0)))
    return with_leaves(one, placed)


def with_leaves(module: Decoder, make: Callable[[str, Any], Any]) -> Decoder:
    """The module with ``make(name, leaf)`` in place of each of its arrays, or of their shapes."""
    graph, state = nnx.split(module)
    leaves, tree = named_leaves(state)
    return nnx.merge(graph, jax.tree.unflatten(tree, [make(name, leaf) for name, leaf in leaves]))


def on_every_device(model: Any, mesh: Mesh) -> Any:
    """A module, or any pytree that acts as one, with all of its arrays on each device of ``mesh``."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def placed(tree):
        if not mesh.is_multi_process:
            return jax.device_put(tree, sharding)
        here = lambda x: jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)  # noqa: E731
        return jax.tree.map(here, tree)

    if not isinstance(model, nnx.Module):
        return placed(model)
    graph, state = nnx.split(model)
    return nnx.merge(graph, placed(state))


def part_of(array: np.ndarray, split: Split, dimensions: Mapping[str, int], shards: Shards, shard: int) -> np.ndarray:
    """What a shard has of an array on the host.

    Args:
      array: the whole array.
      split: how it is split.
      dimensions: of the model's config.
      shards: of the model.
      shard: the number of the shard, from 0.
    """
    if split.axis is None:
        return array
    if not split.by_tensor:
        return _block(array, split.axis, shards, shard)
    parts, start = [], 0
    parameter = split.parameter
    for axis, length in zip(parameter.tensors.values(), parameter.tensor_lengths(dimensions), strict=True):
        parts.append(_part_of_outputs(array[start : start + length], axis, dimensions, shards, shard))
        start += length
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _part_of_outputs(
    array: np.ndarray, axis: Axis, dimensions: Mapping[str, int], shards: Shards, shard: int
) -> np.ndarray:
    """What a shard has of the outputs of one tensor, along axis 0."""
    n, G = shards.count, dimensions["G"]
    if axis == GATE_UPS:  # of each expert the rows of gate, then those of up
        each = array.reshape(-1, dimensions["Fe"], *array.shape[1:])
        return _block(each, 1, shards, shard).reshape(-1, *array.shape[1:])
    if axis.name == "vocab":
        rows = shards.vocabulary(dimensions["V"])
        mine = array[shard * rows : (shard + 1) * rows]
        return np.pad(mine, [(0, rows - len(mine)), *[(0, 0)] * (array.ndim - 1)])
    if axis.name == "kv" and n > G:  # shards whose attention heads share a KV head have it each
        size, head = len(array) // G, shard * G // n
        return array[head * size : (head + 1) * size]
    return _block(array, 0, shards, shard) if axis.name in SPLIT else array


def _block(array: np.ndarray, axis: int, shards: Shards, shard: int) -> np.ndarray:
    size = array.shape[axis] // shards.count
    return array[(slice(None),) * axis + (slice(shard * size, (shard + 1) * size),)]
