"""The memory of each GPU that the others store packets into."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.pallas.collectives.packets import PACKET_BYTES

SLOTS = 2  # exchanges of one epoch and of the next; see ``mailboxes``
MOST_BLOCKS = 96  # that wait for those of other GPUs, and so have to run together; an H100 has 132 multiprocessors
MOST_GPUS, _RECENT = 64, (1 << 24) - 1  # what ``lost`` has room for


class Room(NamedTuple):
    """How much an exchange may send to each of the other GPUs.

    Attributes:
      tokens: the most tokens of a sum.
      words: the most 32-bit words of a token of it.
      parts: the most words of a part of an array that is gathered.
    """

    tokens: int
    words: int
    parts: int = 0

    @property
    def of_sums(self) -> int:
        """How many words sums have room for; parts lie behind them."""
        return self.tokens * self.words

    @property
    def size(self) -> int:
        """How many words there is room for in all."""
        return self.of_sums + self.parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """What programs know of the workspaces, and how many exchanges there have been. The same on every GPU.

    Attributes:
      addresses: int32 ``[n, 2]``, the low and high halves of the addresses of all n workspaces.
      epochs: int32 ``[MOST_BLOCKS]``, of each block of a kernel the epoch of its next exchange, from 1 on; after an exchange
        in which a packet did not come, what ``lost`` says, which may differ from GPU to GPU. A block that an exchange does
        not need does not count it.
      room: of each workspace.
    """

    addresses: jax.Array
    epochs: jax.Array
    room: Room = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Memory for exchanges between n GPUs of one process.

    On each GPU there is room for ``SLOTS`` exchanges with each of the n, itself included, which leaves its own part unused.

    Attributes:
      mesh: the GPUs, along its one axis.
      room: how much an exchange may send.
      memory: the arrays, one for each GPU, which have to live as long as any program that has their addresses.
    """

    mesh: Mesh
    room: Room
    memory: Any

    @staticmethod
    def create(mesh: Mesh, room: Room) -> "Workspace":
        """For the GPUs of a mesh of one axis, all of them of this process.

        It returns when every GPU has done what it was sent before, and no packet is in memory. Epochs may then begin at 1.

        Raises:
          ValueError: some of the devices belong to another process.
        """
        devices = list(mesh.devices.flat)
        if any(device.process_index != jax.process_index() for device in devices):
            raise ValueError("a workspace is for GPUs of one process: sums over several processes are those of XLA")
        [axis] = mesh.axis_names
        # A program behind all others of a GPU: one that still runs may be sending.
        jax.block_until_ready([jax.device_put(np.int32(0), device) + 1 for device in devices])
        shape = len(devices), bytes_of(room, len(devices)) // 4
        memory = jax.device_put(np.zeros(shape, np.int32), NamedSharding(mesh, PartitionSpec(axis)))
        return Workspace(mesh, room, memory.block_until_ready())

    def exchange(self) -> Exchange:
        """Before the first exchange, on every GPU."""
        by_device = {shard.device: shard.data.unsafe_buffer_pointer() for shard in self.memory.addressable_shards}
        pointers = np.array([by_device[device] for device in self.mesh.devices.flat], np.uint64)
        halves = np.stack([pointers & 0xFFFFFFFF, pointers >> np.uint64(32)], axis=1).astype(np.uint32).view(np.int32)
        put = lambda array: jax.device_put(array, NamedSharding(self.mesh, PartitionSpec()))  # noqa: E731
        return Exchange(put(halves), put(np.ones(MOST_BLOCKS, np.int32)), self.room)

    def renewed(self) -> "Workspace":
        """Another one of the same size, for epochs that begin anew. Packets of this one are never seen again."""
        return Workspace.create(self.mesh, self.room)


def bytes_of(room: Room, gpus: int) -> int:
    """The memory of a workspace on each of so many GPUs."""
    return SLOTS * gpus * room.size * PACKET_BYTES


def lost(gpu, epoch):
    """The negative number that a block has for its epoch when it waited for a packet of a GPU in vain; in kernels, too.

    Of two such numbers the larger one is of the earlier exchange (of the last 2^24)."""
    return -1 - ((epoch & _RECENT) * MOST_GPUS + gpu)


def are_lost(epochs) -> bool:
    """Whether a packet has not come, by the epochs after some exchanges; for the host."""
    return bool(np.any(np.asarray(epochs) < 0))


def who_was_late(epochs) -> tuple[int, list[int]]:
    """The GPU whose packets did not come, and those that waited for them in vain, by their places on the mesh axis.

    A GPU that comes too late finds the packets that the others sent before they gave up, and then waits in vain itself, in
    a later exchange. So of a block's losses the earliest one tells.

    Args:
      epochs: int32 ``[n, MOST_BLOCKS]``, the copies of all n GPUs, of which some are lost.
    """
    of_block = next(column for column in np.asarray(epochs).T if are_lost(column))
    first = of_block[of_block < 0].max()
    return int(-1 - first) % MOST_GPUS, np.flatnonzero(of_block == first).tolist()
