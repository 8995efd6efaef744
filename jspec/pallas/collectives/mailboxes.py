"""Where the packets of an exchange lie in the workspaces; for kernels.

A block of a kernel exchanges packets with the same block of the other GPUs, and counts its own epochs. The packets of
epoch e go into slot e mod 2. Two slots are enough if every GPU sends to every other one in every epoch of a block: who
sends epoch e + 2 has received all of e + 1, which the others sent after their kernel of e had ended. Epochs never return,
however many programs use a workspace. A place of the workspace always belongs to the same block. So what an earlier
exchange has left there has an earlier epoch of the same block.

A kernel of two trips has two epochs. In the first one each GPU sends a word to its owner alone, in the second the owner
sends what it made of them to all. The same two slots are enough if every GPU owns some words of each block: an owner sends
its word of the second epoch when it has read all of the first, and a GPU goes on to the next kernel when it has all words.

A block whose packets do not come gives up (``packets.PATIENCE``): its epoch says for whom it has waited
(``workspace.lost``), and from then on it neither sends nor waits, so that the program ends soon. The block of the other GPU
gives up likewise."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.collectives.packets import PACKET_BYTES, receive, send
from jspec.pallas.collectives.workspace import SLOTS, Room, lost

THREADS = 32  # of a warp


@dataclasses.dataclass(frozen=True)
class Mailboxes:
    """In a kernel: one exchange of a block. Entries of arrays are for ``size`` elements.

    Attributes:
      addresses, epochs, next_epochs: refs of ``Exchange.addresses`` and ``epochs``, and of the epochs afterwards.
      rank: int32 ``[]``, this GPU's place among the n.
      block: int32 ``[]``.
      epoch: int32 ``[]``, of the exchange; negative, ``lost``, after one in which a packet did not come.
      room: of the workspaces.
      of_thread: how many of the elements each thread has.
    """

    addresses: Any
    epochs: Any
    next_epochs: Any
    rank: Any
    block: Any
    epoch: Any
    room: Room
    of_thread: int

    @staticmethod
    def open(
        addresses, rank_ref, epochs, next_epochs, room: Room, of_thread: int, interpret: bool, trips: int = 1
    ) -> "Mailboxes":
        """The first exchange of this block of the kernel, at its beginning; counts as many as the kernel has trips."""
        block, rank = pl.program_id(0), rank_ref[0]
        epoch = epochs[block]
        if not interpret:  # both are the same memory: every thread has to read its epoch before one of them counts on
            pltriton.debug_barrier()
        next_epochs[block] = jnp.where(epoch > 0, epoch + trips, epoch)
        return Mailboxes(addresses, epochs, next_epochs, rank, block, epoch, room, of_thread)

    @property
    def count(self) -> int:
        """n, how many GPUs there are."""
        return self.addresses.shape[0]

    def following(self) -> "Mailboxes":
        """The next exchange of this block, in the same kernel."""
        return dataclasses.replace(self, epoch=jnp.where(self.epoch > 0, self.epoch + 1, self.epoch))

    def send(self, words: Callable[[int], jax.Array], place, exists, to=None) -> jax.Array:
        """Send words to other GPUs.

        Args:
          words: (GPU) -> int32 ``[size]``, what it is sent.
          place: int32 ``[size]``, the place in the workspaces' room of each.
          exists: bool ``[size]``, which of them there are.
          to: int32 ``[size]``, the only GPU that is sent each; None for all of them.

        Returns:
          what ``receive`` takes.
        """
        sent = jnp.zeros_like(place)
        for gpu in range(self.count):
            base = self.addresses[gpu, 0], self.addresses[gpu, 1]
            wanted = exists & (gpu != self.rank) & (self.epoch > 0)
            wanted = wanted if to is None else wanted & (to == gpu)
            sent |= send(words(gpu), base, self._offsets(self.rank, place), self.epoch, wanted)
        return sent

    def receive(self, sent, place, exists) -> tuple[list[jax.Array], jax.Array]:
        """Wait for the words of all other GPUs; arguments as for ``send``, behind what it returned.

        Returns:
          the words of each GPU, zeros of this one; and int32 ``[size]``, ``lost`` where some have not come, else 0.
        """
        mine = self._address()
        words, late = [], jnp.zeros(place.shape, jnp.int32)
        for gpu in range(self.count):  # what has waited in vain for one of them waits for no other
            came, absent = self._wait(mine, gpu, sent, place, exists & (late == 0))
            words.append(came)
            late = first_of(late, absent)
        return words, late

    def receive_from(self, sender, sent, place, exists) -> tuple[jax.Array, jax.Array]:
        """Wait for one word of each element, that of GPU ``sender``, int32 ``[size]``; others as for ``receive``.

        Returns:
          the words, zeros where this GPU is the sender; and int32 ``[size]``, as ``receive`` has it.
        """
        return self._wait(self._address(), sender, sent, place, exists)

    def _address(self) -> list:
        """The halves of the address of this GPU's workspace."""
        return [pltriton.load(self.addresses.at[self.rank, half]) for half in (0, 1)]

    def _wait(self, mine, sender, sent, place, exists):
        wanted = exists & (sender != self.rank) & (self.epoch > 0)
        together = min(self.of_thread, 2)
        words, late = receive(sent, mine, self._offsets(sender, place), self.epoch, wanted, together)
        late = jnp.where(late, lost(sender, self.epoch), jnp.int32(0))
        return words, jnp.where(self.epoch > 0, late, self.epoch)

    @property
    def late(self):
        """int32 ``[]``, what elements have for ``late`` before they wait: 0, or the epoch of a block that is lost."""
        return jnp.minimum(self.epoch, 0)

    def close(self, late, trips: int = 1):
        """At the end: note for whom elements have waited in vain, int32 ``[size]`` as of ``receive``. This is later by
        ``PATIENCE`` than the store of ``open``, which another thread may have made.

        A GPU that is late in the first of two trips keeps the others from handing on what they own in the second. So what
        was lost in the first is stored behind everything else."""
        here = self.next_epochs.at[jnp.broadcast_to(self.block, late.shape)]
        pltriton.store(here, late, mask=late < 0)
        if trips > 1:
            pltriton.debug_barrier()
            in_first = (late < 0) & (late > lost(0, self.epoch + 1))
            pltriton.store(here, late, mask=in_first)

    def _offsets(self, sender, place):
        slot = (self.epoch & (SLOTS - 1)) * self.count + sender
        return (slot * self.room.size + place) * PACKET_BYTES


def first_of(late, absent):
    """In a kernel: for whom elements have waited in vain, those of ``late`` before those of ``absent``."""
    return jnp.where(late < 0, late, absent)


def words_of_thread(size: int, num_warps: int) -> int:
    """How many of ``size`` words, a power of two, each thread of a block has."""
    return max(size // (num_warps * THREADS), 1)


def interleaved(ids, width: int, of_thread: int):
    """In which order the packets of ``width`` words lie, int32: a permutation of ``ids`` 0 .. width - 1.

    Triton gives a thread up to four neighbouring words, and an instruction of a warp stores one of each thread. In this
    order the 32 packets of an instruction are neighbours, and cross in whole sectors.
    """
    each = min(of_thread, 4)
    return ids if each == 1 or width % each else ids % each * (width // each) + ids // each
