"""Modules whose arrays lie on the devices of a mesh: in shards, or the same on every device.

A module in shards has the structure of one shard, and its arrays are those of all shards side by side. It is called
inside of ``jax.shard_map``, where every device sees the arrays of its own shard. Outside of that it only describes the
model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.config import ModelConfig, Shards
from jspec.config.decoder_params import GATE_UPS
from jspec.config.param_specs import Axis
from jspec.config.sharding import SHARDED, ParameterSharding
from jspec.models.decoder import Decoder
from jspec.models.params import DTYPES, Placed, abstract_params, build, named_leaves, place, require_params
from jspec.models.placement import named_devices

# XLA of jax 0.12 has a kernel of its own for small sums. It calls ``ncclGetPeerDevicePointer``, which NCCL has since 2.29,
# while jax 0.12.0.1 asks for NCCL 2.27.7 or newer.
ONE_SHOT_OFF = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"


def mesh_of(count: int, axis: str) -> Mesh:
    """A mesh along one axis, of the first ``count`` devices, or of those that ``placed_on`` names; several GPUs have added
    up once.

    Raises:
      ValueError: there are fewer devices.
      RuntimeError: the GPUs cannot add up.
    """
    devices = named_devices() or jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"tensor_parallel={count}: expected at most {len(devices)}, the number of devices that JAX sees"
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"tensor_parallel={count}: expected {len(devices)}, the number of devices of all {jax.process_count()} processes"
        )
    mesh = Mesh(np.array(devices[:count]), (axis,))
    if count > 1 and devices[0].platform == "gpu":
        require_sums(mesh)
    return mesh


def require_sums(mesh: Mesh):
    """Add up once over the devices of a mesh of one axis.

    Raises:
      RuntimeError: that fails. The message says what to set.
    """
    [axis] = mesh.axis_names
    everywhere = PartitionSpec()
    ones = jax.shard_map(lambda: jax.lax.psum(jnp.float32(1), axis), mesh=mesh, in_specs=(), out_specs=everywhere)
    try:
        total = float(jax.jit(ones)())
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"a sum over {mesh.size} GPUs failed under jax {jax.__version__}, so that they cannot share a target "
            f"({str(error).splitlines()[0]}): if ncclGetPeerDevicePointer failed, which NCCL has since 2.29, install "
            f"'nvidia-nccl-cu13>=2.29', or set XLA_FLAGS={ONE_SHOT_OFF}; NCCL_DEBUG=INFO makes NCCL say more"
        ) from error
    if total != mesh.size:
        raise RuntimeError(f"a sum of ones over {mesh.size} GPUs is {total:g}: their connection is broken")


def build_model(config: ModelConfig, params: Mapping[str, np.ndarray], dtype: str, shards: Shards | None) -> Decoder:
    """The module of a language model, on one device or in shards; arguments and errors as for ``build_shards``."""
    if shards is not None:
        return build_shards(config, params, dtype, shards, mesh_of(shards.count, shards.axis))
    return build(config, params, dtype)


def build_shards(
    config: ModelConfig, params: Mapping[str, jax.typing.ArrayLike], dtype: str, shards: Shards, mesh: Mesh
) -> Decoder:
    """The module of ``config`` in shards on the devices of ``mesh``.

    Each device is sent its own parts, one array after another, in pieces if ``params`` reads them lazily (``place``).

    Args:
      config: the architecture.
      params, dtype: as for ``jspec.models.params.build``.
      shards: how many shards, along which axis of the mesh.
      mesh: of one axis.

    Raises:
      ValueError: as for ``build``, or the model cannot be sharded like this.
    """
    require_params(config, params, dtype)
    return with_leaves(abstract_shards(config, shards, mesh, dtype), shard_filler(config, params, dtype, shards))


def shard_filler(
    config: ModelConfig, params: Mapping[str, jax.typing.ArrayLike], dtype: str, shards: Shards
) -> Callable[[str, Any], jax.Array]:
    """A function ``(name, leaf)`` that makes an array of the shape and in the places of ``leaf``, from ``params``; the other
    arguments are those of ``build_shards``."""
    full, splits, dimensions = abstract_params(config, dtype), shards.splits(config), config.dimensions

    def filled(name: str, leaf) -> jax.Array:
        split, places = splits[name], leaf.sharding.addressable_devices_indices_map(leaf.shape)
        numbers = {device: _shard_of(index, leaf.shape, split, shards) for device, index in places.items()}
        local = sorted(set(numbers.values()))
        indices = {shard: indices_of(full[name].shape, split, dimensions, shards, shard) for shard in local}
        size, having = leaf.sharding.shard_shape(leaf.shape), {shard: [] for shard in local}
        for device, number in numbers.items():
            having[number].append(device)
        wanted = [Placed(name, indices[shard], size, leaf.dtype, having[shard]) for shard in local]
        arrays = [array for every in place(params, wanted) for array in every]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, arrays)

    return filled


def abstract_shards(config: ModelConfig, shards: Shards, mesh: Mesh, dtype: str = "bfloat16") -> Decoder:
    """The same module with shapes in place of arrays, and the sharding of each."""
    splits = shards.splits(config)

    def placed(name: str, leaf) -> jax.ShapeDtypeStruct:
        axis = splits[name].axis
        shape = tuple(n * (shards.count if i == axis else 1) for i, n in enumerate(leaf.shape))
        spec = PartitionSpec(*(shards.axis if i == axis else None for i in range(leaf.ndim)))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    shard = nnx.eval_shape(lambda: Decoder(config, shards=shards, dtype=DTYPES[dtype], rngs=nnx.Rngs(0)))
    return with_leaves(shard, placed)


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


def _shard_of(index: Any, shape: tuple[int, ...], split: ParameterSharding, shards: Shards) -> int:
    """The number of the shard that has a part of an array of all shards, or 0 if they all have all of it."""
    return 0 if split.axis is None else (index[split.axis].start or 0) * shards.count // shape[split.axis]


def indices_of(
    shape: tuple[int, ...], split: ParameterSharding, dimensions: Mapping[str, int], shards: Shards, shard: int
) -> list[tuple[slice, ...]]:
    """The parts of an array that a shard has, one after the other along axis 0. Behind them a shard of the vocabulary
    may have padding.

    Args:
      shape: of the array of all shards.
      split: how it is sharded.
      dimensions: of the model's config.
      shards: of the model.
      shard: the number of the shard, from 0.
    """
    if split.axis is None:
        return [()]
    if not split.by_tensor:
        return [(slice(None),) * split.axis + (_block(0, shape[split.axis], shards, shard),)]
    indices, start = [], 0
    parameter = split.parameter
    dimensions = {**dimensions, **parameter.sizes}
    for axis, length in zip(parameter.tensors.values(), parameter.tensor_lengths(dimensions), strict=True):
        indices += [(rows,) for rows in _rows_of_outputs(start, length, axis, dimensions, shards, shard)]
        start += length
    return indices


def _rows_of_outputs(
    start: int, length: int, axis: Axis, dimensions: Mapping[str, int], shards: Shards, shard: int
) -> list[slice]:
    """The outputs of one tensor that a shard has, among ``start .. start + length - 1`` along axis 0."""
    n, G, stop = shards.count, dimensions["G"], start + length
    if axis == GATE_UPS:  # of each expert the rows of gate, then those of up
        size = dimensions["Fe"]
        return [_block(first, size, shards, shard) for first in range(start, stop, size)]
    if axis.name == "vocab":
        rows = shards.vocabulary(dimensions["V"])
        return [slice(min(start + shard * rows, stop), min(start + (shard + 1) * rows, stop))]
    if axis.name == "kv" and n > G:  # shards whose attention heads share a KV head have it each
        size, head = length // G, shard * G // n
        return [slice(start + head * size, start + (head + 1) * size)]
    return [_block(start, length, shards, shard) if axis.name in SHARDED else slice(start, stop)]


def _block(start: int, length: int, shards: Shards, shard: int) -> slice:
    """A shard's part of the places ``start .. start + length - 1``; all parts have the same size."""
    size = length // shards.count
    return slice(start + shard * size, start + (shard + 1) * size)
