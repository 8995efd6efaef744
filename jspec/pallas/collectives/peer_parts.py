"""Parts of arrays from every GPU of a process, in one launch: what all of them gather, or what each sends to each."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.collectives.mailboxes import Mailboxes, first_of, interleaved, words_of_thread
from jspec.pallas.collectives.workspace import MOST_BLOCKS, Exchange, Room
from jspec.pallas.triton import kernel_call

CHUNK, NUM_WARPS = 1024, 16  # words that a block sends at a time


def peer_parts_reference(x, exchange: Exchange, axis: str) -> tuple[jax.Array, jax.Array]:
    """What each device has sent to this one, inside of a ``jax.shard_map`` over n devices.

    Args:
      x: int32 ``[n, words]``, what this device sends to each of them, itself included; ``[1, words]`` is the same for all.
      exchange: of which exchange this is.
      axis: of the mesh.

    Returns:
      int32 ``[n, words]``, and the epochs of the next exchange.
    """
    same = x.shape[0] == 1
    parts = jax.lax.all_gather(x, axis, tiled=True) if same else jax.lax.all_to_all(x, axis, 0, 0, tiled=True)
    used = jnp.arange(MOST_BLOCKS, dtype=jnp.int32) < num_blocks(x.shape[1])
    return parts, jnp.where(exchange.epochs > 0, exchange.epochs + used, exchange.epochs)


def peer_parts_kernel(x, exchange: Exchange, rank) -> tuple[jax.Array, jax.Array]:
    """``peer_parts_reference`` as a kernel, on the device of ``rank``, int32 ``[1]``.

    Raises:
      ValueError: the workspace is too small.
    """
    return _launch(x, exchange, rank, None, interpret=False)


def num_blocks(words: int) -> int:
    """How many blocks the kernel has for so many words."""
    return min(pl.cdiv(words, CHUNK), MOST_BLOCKS)


@functools.partial(jax.jit, static_argnames="interpret")
def _launch(x, exchange: Exchange, rank, parts, *, interpret: bool):
    """``parts``, what all devices send to this one ``[n, words]``, take the place of packets where the kernel is
    interpreted."""
    words, room, n = x.shape[1], exchange.room, exchange.addresses.shape[0]
    if words > room.parts:
        raise ValueError(f"a part of {words} words: the workspace has room for {room.parts}")
    return kernel_call(
        _peer_parts,
        *(x, parts, exchange.addresses, rank, exchange.epochs),
        grid=(num_blocks(words),),
        out_shape=[jax.ShapeDtypeStruct((n, words), jnp.int32), jax.ShapeDtypeStruct((MOST_BLOCKS,), jnp.int32)],
        num_warps=NUM_WARPS,
        interpret=interpret,
        aliases={3 if parts is None else 4: 1},
        room=room,
        of_thread=words_of_thread(CHUNK, NUM_WARPS),
    )


def _peer_parts(
    x_ref, parts_ref, address_ref, rank_ref, epochs_ref, out_ref, next_epochs_ref, *, room: Room, of_thread: int
):
    refs = address_ref, rank_ref, epochs_ref, next_epochs_ref
    mailboxes = Mailboxes.open(*refs, room, of_thread, interpret=parts_ref is not None)
    n, words = out_ref.shape
    blocks, trips = pl.num_programs(0), pl.cdiv(pl.cdiv(words, CHUNK), num_blocks(words))

    ids = jnp.arange(CHUNK, dtype=jnp.int32)

    def chunk(i):
        """Where its words are in an array, which of them there are, and where their packets are."""
        first = (mailboxes.block + i * blocks) * CHUNK
        order = jnp.where(first + CHUNK <= words, interleaved(ids, CHUNK, of_thread), ids)
        return first + ids, first + ids < words, room.of_sums + first + order

    def words_for(gpu, place, exists):
        row = jnp.broadcast_to(gpu if x_ref.shape[0] == n else jnp.int32(0), place.shape)
        return pltriton.load(x_ref.at[(row, place)], mask=exists, other=0)

    def send(i, sent):
        place, exists, packets = chunk(i)
        return sent | mailboxes.send(lambda gpu: words_for(jnp.int32(gpu), place, exists), packets, exists)

    def receive(i, late):
        place, exists, packets = chunk(i)
        own = words_for(mailboxes.rank, place, exists)
        if parts_ref is None:
            came, absent = mailboxes.receive(sent, packets, exists)
            late = first_of(late, absent)
        else:
            came = [pltriton.load(parts_ref.at[gpu, place], mask=exists, other=0) for gpu in range(n)]
        for gpu, part in enumerate(came):
            pltriton.store(out_ref.at[gpu, place], jnp.where(gpu == mailboxes.rank, own, part), mask=exists)
        return late

    nothing = jnp.zeros(CHUNK, jnp.int32)
    sent = nothing if parts_ref is not None else jax.lax.fori_loop(0, trips, send, nothing)
    mailboxes.close(jax.lax.fori_loop(0, trips, receive, nothing + mailboxes.late))
