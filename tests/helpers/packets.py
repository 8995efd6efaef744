"""For tests of exchanges between GPUs: an exchange without GPUs, packets between simulated devices, and functions of real
GPUs."""

import dataclasses
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import code_of

from jspec.models.sharding import mesh_of
from jspec.pallas.collectives import mailboxes
from jspec.pallas.collectives.packets import PACKET_BYTES
from jspec.pallas.collectives.workspace import MOST_BLOCKS, SLOTS, Exchange, Room, lost

AXIS = "model"


def needs(gpus: int):
    """The mark of tests on so many real GPUs."""
    few = jax.default_backend() != "gpu" or len(jax.devices()) < gpus
    return pytest.mark.skipif(few, reason=f"packets need {gpus} GPUs")


GPUS = [pytest.param(n, marks=needs(n), id=f"{n}-gpus") for n in (2, 4, 8)]  # of tests that any number may run


def exchange_of(n: int, room: Room, blocks: int) -> Exchange:
    """Of n GPUs whose memory is nowhere."""
    return Exchange(jnp.zeros((n, 2), jnp.int32), jnp.ones(blocks, jnp.int32), room)


class SimulatedPackets:
    """``packets.send`` and ``receive`` in kernels that are interpreted on n simulated devices, all at the same time: packets
    lie in memory of the host.

    Args:
      n, room, blocks: as for ``exchange_of``.
      late: the device whose program begins when all others have given up waiting for it; None if none is late.

    Attributes:
      exchange: the first one.
    """

    def __init__(self, n: int, room: Room, blocks: int, late: int | None = None):
        device = jnp.arange(n, dtype=jnp.int32)
        self.exchange = dataclasses.replace(exchange_of(n, room, blocks), addresses=jnp.stack([device, device], axis=1))
        self._room, self._late, self._given_up = room, late, set()
        self._memory = np.zeros((n, SLOTS * n * room.size, 2), np.int32)

    def take_part(self, monkeypatch):
        """Have kernels that are traced from now on send and receive here."""
        monkeypatch.setattr(mailboxes, "send", self._send)
        monkeypatch.setattr(mailboxes, "receive", self._receive)
        monkeypatch.setattr(mailboxes.Mailboxes, "_address", lambda one: [one.rank, one.rank])
        monkeypatch.setattr(mailboxes, "pltriton", SimpleNamespace(store=_store_one, debug_barrier=lambda: None))

    def begin(self, rank) -> jax.Array:
        """On each device, int32 ``[]``: 0, when its program may begin."""

        def wait(rank):
            others = len(self._memory) - 1
            while rank == self._late and len(self._given_up) < others:
                time.sleep(0.01)
            return np.int32(0)

        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.int32), rank)

    def _send(self, words, base, offsets, epoch, exists):
        def store(*args):
            words, to, offsets, epoch, exists = map(np.asarray, args)
            places = offsets[exists] // PACKET_BYTES
            self._memory[to, places, 0] = words[exists]
            self._memory[to, places, 1] = epoch  # last: who sees it has the word
            return np.zeros_like(words)

        return jax.pure_callback(store, words, words, base[0], offsets, epoch, exists)

    def _receive(self, sent, base, offsets, epoch, exists, together):
        del together

        def load(*args):
            rank, offsets, epoch, exists = map(np.asarray, args[1:])
            places = np.where(exists, offsets // PACKET_BYTES, 0)
            came = lambda: ~exists | (self._memory[rank, places, 1] == epoch)  # noqa: E731
            end = time.monotonic() + self._patience(int(places.max()), int(rank))
            while not came().all() and time.monotonic() < end:
                time.sleep(0.001)
            absent = ~came()
            if absent.any():
                self._given_up.add(int(rank))
            return np.where(exists & ~absent, self._memory[rank, places, 0], np.int32(0)), absent

        shapes = sent, jax.ShapeDtypeStruct(sent.shape, bool)
        return jax.pure_callback(load, shapes, sent, base[0], offsets, epoch, exists)

    def _patience(self, place: int, rank: int) -> float:
        """Seconds: hardly any for what never comes, or for whom nobody sends any more."""
        sender = place // self._room.size % len(self._memory)
        return 0.1 if self._late in (sender, rank) or rank in self._given_up else 60.0


def lose(engine, late: int):
    """Have every block of the next exchange find that an earlier one was lost, because a device was late: it has waited in
    vain, too, in the exchange after that."""
    batch, exchange = engine.runner.batch, engine.runner.batch.state.exchange
    devices = list(exchange.epochs.sharding.mesh.devices.flat)
    losses = [lost(0 if late else 1, 8) if place == late else lost(late, 7) for place in range(len(devices))]
    copies = [jax.device_put(np.full(MOST_BLOCKS, one, np.int32), at) for one, at in zip(losses, devices, strict=True)]
    epochs = jax.make_array_from_single_device_arrays((MOST_BLOCKS,), exchange.epochs.sharding, copies)
    batch.state = dataclasses.replace(batch.state, exchange=dataclasses.replace(exchange, epochs=epochs))


def _store_one(at, values, mask):
    """A store of many threads to one place, of which one wins: here the smallest number. Interpreted, those that do not take
    part would store what was there before."""
    place = at.transforms[-1].indices[0][0]
    smallest = jnp.min(jnp.where(mask, values, jnp.iinfo(values.dtype).max))
    at.ref[place] = jnp.where(jnp.any(mask), smallest, at.ref[place])


def over_devices(function, in_specs, out_specs, gpus: int = 2):
    """A function of the inside of a ``jax.shard_map`` over so many devices, compiled."""
    mesh = mesh_of(gpus, AXIS)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def assert_epochs_are_read_before_they_are_counted(lowered: str):
    """Both lie in the same memory: a thread that reads behind the store of another one would be an exchange ahead."""
    for name, code in code_of(lowered):
        order = re.findall(r"tt\.load|gpu\.barrier|tt\.store", code)
        assert order[:3] == ["tt.load", "tt.load", "gpu.barrier"], name  # of the rank, and of the epoch
