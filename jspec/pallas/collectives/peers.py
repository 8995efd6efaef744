"""The exchanges between GPUs of one program, one after another.

A program takes an ``Exchange`` with its state, makes ``Peers`` of it as it begins, and returns the exchange after all of
its own. The epochs are in a reference (``jax.new_ref``), whose reads and writes keep the order in which they are traced,
through calls, loops and conditions."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.pallas.collectives.peer_parts import peer_parts_kernel, peer_parts_reference
from jspec.pallas.collectives.peer_sum import KINDS, Stream, num_trips, peer_sum_kernel, peer_sum_reference
from jspec.pallas.collectives.words import as_numbers, as_words
from jspec.pallas.collectives.workspace import MOST_BLOCKS, Exchange, Room
from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.partial_sums import PartialSums, reduce_partial_sums

MOST_TOKENS = 128  # that are added up by packets: for more, XLA's sums are faster
MOST_BYTES = 8192  # of a token, where a block has several: 79 us instead of XLA's 37 for 128 tokens of 16 kB among four
MOST_WORDS = 2**22  # that a GPU receives in an exchange of parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Peers:
    """Exchanges with the other GPUs of a mesh axis by packets, inside of a ``jax.shard_map``; XLA's on other platforms.

    Attributes:
      addresses, room: as in ``Exchange``.
      epochs: a reference to ``Exchange.epochs``, which every exchange writes.
      rank: int32 ``[1]``, this GPU's place on the axis.
      axis: the mesh axis.
    """

    addresses: jax.Array
    epochs: Any
    rank: jax.Array
    room: Room = dataclasses.field(metadata={"static": True})
    axis: str = dataclasses.field(metadata={"static": True})

    @staticmethod
    def begin(exchange: Exchange, axis: str) -> "Peers":
        """For a program that has been given this exchange, over a mesh axis."""
        rank = jax.lax.axis_index(axis).astype(jnp.int32).reshape(1)
        return Peers(exchange.addresses, jax.new_ref(exchange.epochs), rank, exchange.room, axis)

    def exchange(self) -> Exchange:
        """After all exchanges so far."""
        return Exchange(self.addresses, self.epochs[...], self.room)

    def can_sum(self, y: PartialSums, dtype) -> bool:
        """Whether a sum of this dtype is over shards, and small enough."""
        *before, _, D = y.summands.shape
        known = y.reduce_axis is not None and dtype in (jnp.bfloat16, jnp.float32)
        known = known and y.summands.dtype in (dtype, jnp.float32)
        tokens, width = math.prod(before), D * jnp.dtype(dtype).itemsize
        few = tokens <= self.room.tokens and (tokens <= MOST_BLOCKS or width <= MOST_BYTES)
        return known and few and width % 4 == 0 and width // 4 <= self.room.words

    def total(self, y: PartialSums, dtype) -> jax.Array:
        """``y.total(dtype)``."""
        return self._sum(y, None, dtype=dtype, eps=0.0, kind=KINDS[0])

    def add_norm(self, x, y: PartialSums, weight, eps: float, kind: str) -> tuple[jax.Array, jax.Array]:
        """x + the total of y ``[..., D]``, and its norm of one of ``KINDS``; arguments as for ``norm``."""
        return self._sum(y, Stream(x, weight), dtype=x.dtype, eps=eps, kind=kind)

    def _sum(self, y: PartialSums, stream: Stream | None, *, dtype, eps: float, kind: str):
        trips = num_trips(y.summands.shape[-1] * jnp.dtype(dtype).itemsize // 4, self.addresses.shape[0])
        how = {"dtype": dtype, "eps": eps, "kind": kind, "trips": trips}
        kernel, reference = (functools.partial(f, **how) for f in (peer_sum_kernel, _of_any_rank))
        result, self.epochs[...] = by_platform(kernel, reference, y, stream, self.exchange(), self.rank)
        return result

    def serve_parts(self, shape: Sequence[int], dtype) -> bool:
        """Whether parts of such an array, one for each GPU, are whole words and few enough."""
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        return jnp.dtype(dtype).itemsize in (2, 4) and size % 4 == 0 and size // 4 <= self.room.parts

    def all_gather(self, x) -> jax.Array:
        """x of every GPU, ``[...] -> [n, ...]``."""
        return self._parts(x[None])

    def all_to_all(self, x) -> jax.Array:
        """``[n, ...] -> [n, ...]``: x[i] goes to GPU i, and entry i of the result has come from it."""
        return self._parts(x)

    def _parts(self, x) -> jax.Array:
        kernel, reference = peer_parts_kernel, functools.partial(_parts_of_any_rank, axis=self.axis)
        words = by_platform(kernel, reference, as_words(x.reshape(len(x), -1)), self.exchange(), self.rank)
        parts, self.epochs[...] = words
        return as_numbers(parts, x.dtype).reshape(-1, *x.shape[1:])


def reduce_with(peers: Peers | None, y, dtype) -> jax.Array:
    """As ``reduce_partial_sums``, with the sum over GPUs by ``peers`` where these can."""
    if peers is not None and isinstance(y, PartialSums) and peers.can_sum(y, dtype):
        return peers.total(y, dtype)
    return reduce_partial_sums(y, dtype)


def room_for(width: int, dtype, gpus: int) -> Room:
    """The room of workspaces of so many GPUs, for models whose residual streams have at most ``width`` numbers of a
    dtype."""
    return Room(MOST_TOKENS, -(-width * jnp.dtype(dtype).itemsize // 4), MOST_WORDS // gpus)


def _of_any_rank(y, stream, exchange, rank, **how):
    del rank
    return peer_sum_reference(y, stream, exchange, **how)


def _parts_of_any_rank(x, exchange, rank, *, axis: str):
    del rank
    return peer_parts_reference(x, exchange, axis)
