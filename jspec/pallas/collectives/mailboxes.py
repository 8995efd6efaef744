"""Where the packets of an exchange lie in the workspaces; for kernels.

A block of a kernel exchanges packets with the same block of the other GPUs, and counts its own epochs. The packets of
epoch e go into slot e mod 2. Two slots are enough if every GPU sends to every other one in every epoch of a block: who
sends epoch e + 2 has received all of e + 1, which the others sent after their kernel of e had ended. Epochs never return,
however many programs use a workspace. A place of the workspace always belongs to the same block. So what an earlier
exchange has left there has an earlier epoch of the same block.

A block whose packets do not come gives up (``packets.PATIENCE``): its epoch is ``LOST``, and from then on it neither
sends nor waits, so that the program ends soon. The block of the other GPU gives up likewise."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.collectives.packets import PACKET_BYTES, receive, send
from jspec.pallas.collectives.workspace import LOST, SLOTS, Room

THREADS = 32  # of a warp


@dataclasses.dataclass(frozen=True)
class Mailboxes:
    """In a kernel: one exchange of a block. Entries of arrays are for ``size`` elements.

    Attributes:
      addresses, epochs, next_epochs: refs of ``Exchange.addresses`` and ``epochs``, and of the epochs afterwards.
      rank: int32 ``[]``, this GPU's place among the n.
      block: int32 ``[]``.
      epoch: int32 ``[]``, of the exchange, ``LOST`` after one in which a packet did not come.
      room: of the workspaces.
      together: as for ``packets.receive``.
    """

    addresses: Any
    epochs: Any
    next_epochs: Any
    rank: Any
    block: Any
    epoch: Any
    room: Room
    together: int

    @staticmethod
    def open(addresses, rank_ref, epochs, next_epochs, room: Room, together: int, interpret: bool) -> "Mailboxes":
        """For this block of the kernel, at its beginning; counts the exchange."""
        block, rank = pl.program_id(0), rank_ref[0]
        epoch = epochs[block]
        if not interpret:  # both are the same memory: every thread has to read its epoch before one of them counts on
            pltriton.debug_barrier()
        next_epochs[block] = jnp.where(epoch > 0, epoch + 1, jnp.int32(LOST))
        return Mailboxes(addresses, epochs, next_epochs, rank, block, epoch, room, together)

    @property
    def count(self) -> int:
        """n, how many GPUs there are."""
        return self.addresses.shape[0]

    def send(self, words: Callable[[int], jax.Array], place, exists) -> jax.Array:
        """Send words to all other GPUs.

        Args:
          words: (GPU) -> int32 ``[size]``, what it is sent.
          place: int32 ``[size]``, the place in the workspaces' room of each.
          exists: bool ``[size]``, which of them there are.

        Returns:
          what ``receive`` takes.
        """
        sent = jnp.zeros_like(place)
        for gpu in range(self.count):
            base = self.addresses[gpu, 0], self.addresses[gpu, 1]
            wanted = exists & (gpu != self.rank) & (self.epoch > 0)
            sent |= send(words(gpu), base, self._offsets(self.rank, place), self.epoch, wanted)
        return sent

    def receive(self, sent, place, exists) -> tuple[list[jax.Array], jax.Array]:
        """Wait for the words of all other GPUs; arguments as for ``send``, behind what it returned.

        Returns:
          the words of each GPU, zeros of this one; and where some have not come, bool ``[size]``.
        """
        mine = [pltriton.load(self.addresses.at[self.rank, half]) for half in (0, 1)]
        words, late = [], jnp.broadcast_to(self.epoch <= 0, place.shape)
        for gpu in range(self.count):
            wanted = exists & (gpu != self.rank) & (self.epoch > 0)
            came, absent = receive(sent, mine, self._offsets(gpu, place), self.epoch, wanted, self.together)
            words.append(came)
            late |= absent
        return words, late

    def close(self, late):
        """At the end: note that packets have not come. This is later by ``PATIENCE`` than the store of ``open``, which
        another thread may have made."""
        lost, here = (jnp.broadcast_to(value, late.shape) for value in (jnp.int32(LOST), self.block))
        pltriton.store(self.next_epochs.at[here], lost, mask=late)

    def _offsets(self, sender, place):
        slot = (self.epoch & (SLOTS - 1)) * self.count + sender
        return (slot * self.room.size + place) * PACKET_BYTES


def packets_together(size: int, num_warps: int) -> int:
    """For how many packets a thread can wait at a time, of a kernel with arrays of so many elements."""
    return 2 if size >= 2 * num_warps * THREADS else 1
