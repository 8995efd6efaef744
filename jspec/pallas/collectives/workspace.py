"""The memory of each GPU that the others store packets into."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.pallas.collectives.packets import PACKET_BYTES

SLOTS = 2  # exchanges of one epoch and of the next; see ``peer_sum``


class Peers(NamedTuple):
    """What a kernel knows of the devices that it exchanges packets with.

    Attributes:
      addresses: int32 ``[n, 2]``, the low and high halves of the addresses of all workspaces.
      rank: int32 ``[1]``, which of them is this device's.
    """

    addresses: jax.Array
    rank: jax.Array

    @staticmethod
    def of(addresses: jax.Array, axis: str) -> "Peers":
        """Inside of a ``jax.shard_map``; once in a program, since finding out the rank is a kernel of its own."""
        return Peers(addresses, jax.lax.axis_index(axis).astype(jnp.int32).reshape(1))


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Memory for exchanges of up to ``words`` words between n GPUs of one process.

    On each GPU there is room for ``SLOTS`` exchanges with each of the n, itself included, which leaves its own part unused.

    Attributes:
      words: the most words that a GPU sends to each of the others in an exchange.
      memory: the arrays, one for each GPU, which have to live as long as any program that has their addresses.
      addresses: int32 ``[n, 2]`` on every GPU, the low and high halves of the addresses of all of them.
    """

    words: int
    memory: Any
    addresses: jax.Array

    @staticmethod
    def create(mesh: Mesh, words: int) -> "Workspace":
        """For the GPUs of a mesh of one axis, all of them of this process.

        Packets are zeros at first, so that epochs begin at 1.

        Raises:
          ValueError: some of the devices belong to another process.
        """
        devices = list(mesh.devices.flat)
        if any(device.process_index != jax.process_index() for device in devices):
            raise ValueError("a workspace is for GPUs of one process: sums over several processes are those of XLA")
        size = SLOTS * len(devices) * words * PACKET_BYTES
        [axis] = mesh.axis_names
        memory = jax.device_put(np.zeros((len(devices), size // 4), np.int32), NamedSharding(mesh, PartitionSpec(axis)))
        memory.block_until_ready()
        by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
        pointers = np.array([by_device[device] for device in devices], np.uint64)
        halves = np.stack([pointers & 0xFFFFFFFF, pointers >> np.uint64(32)], axis=1).astype(np.uint32).view(np.int32)
        return Workspace(words, memory, jax.device_put(halves, NamedSharding(mesh, PartitionSpec())))
