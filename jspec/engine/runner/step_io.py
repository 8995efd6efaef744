"""Inputs of the programs: chunks to prefill, and rows to decode."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec._validation import LARGEST_INT
from jspec.config import NULL_PAGE, EngineConfig
from jspec.drafting.base import FixedDrafts
from jspec.pallas.delta_net.state import PrefillRows
from jspec.sampling.processors import num_words

_EVERY_TOKEN = 2**32 - 1  # 32 flags, all of them set


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillInputs:
    """A prefill batch: n chunks of at most c consecutive tokens of prompts.

    Attributes:
      row: int32 ``[n]``, the batch row of the chunk's request if the chunk has the last token of its prompt that
        prefill reads, else any number of B or more.
      tokens: int32 ``[n, c + 1]``. The first ``count`` tokens are read. The token behind them is not read; the drafter
        needs it because slot i of an EAGLE head reads token i + 1.
      start: int32 ``[n]``, the position of the first token.
      count: int32 ``[n]``, how many of the first c tokens are real; the others are padding.
      table: int32 ``[n, M]``, the pages of the chunk's request.
      request_row: int32 ``[n]``, the batch row of the chunk's request, whether its prompt ends or not; any number of B or
        more for a chunk of no request. Only targets with recurrent states need it.
    """

    row: Any
    tokens: Any
    start: Any
    count: Any
    table: Any
    request_row: Any = None

    def recurrent_rows(self, num_rows: int) -> PrefillRows:
        """Which rows of recurrent states, of which there are so many, the chunks belong to."""
        row, before = self.request_row, jnp.roll(self.request_row, 1)
        follows = (row == before) & (row < num_rows) & (jnp.arange(len(row)) > 0)
        return PrefillRows(row, self.count, self.start == 0, follows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeRows:
    """The rows that a decode program decodes, in arrays on the host.

    Attributes:
      rows: int32 ``[b]``, the rows; B, which is no row, fills up the program's number.
      table: int32 ``[b, M]``, the pages of each of them, padded with the null page.
      rounds: int32 ``[]``, how many rounds to make, at most ``config.rounds``.
    """

    rows: Any
    table: Any
    rounds: Any

    @staticmethod
    def of(config: EngineConfig, bucket: int, rows: Sequence[int], pages: Sequence[Sequence[int]], rounds: int):
        """A call of the program for ``bucket`` rows, for these rows with these pages."""
        every_row = np.full(bucket, config.num_rows, np.int32)
        every_row[: len(rows)] = rows
        return DecodeRows(every_row, page_tables(pages, bucket, config), np.int32(rounds))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrammarInputs:
    """Which tokens may come in m rows of a call, in arrays on the host.

    Attributes:
      places: int32 ``[m]``, the rows of the call; its number of rows or more is no row.
      allowed: uint32 ``[m, positions, ceil(V / 32)]``, as ``DecodeStep.finish`` takes it.
    """

    places: Any
    allowed: Any

    @staticmethod
    def empty(rows: int, positions: int, vocab_size: int) -> "GrammarInputs":
        """For so many rows, none of which is restricted."""
        allowed = np.empty((rows, positions, num_words(vocab_size)), np.uint32)
        inputs = GrammarInputs(np.empty(rows, np.int32), allowed)
        inputs.restrict([])
        return inputs

    def restrict(self, places: Sequence[int]):
        """Have the first rows be those at these places of the call. Every token may come, until flags are cleared."""
        self.places[:] = LARGEST_INT
        self.places[: len(places)] = places
        self.allowed[:] = _EVERY_TOKEN

    def of_all_rows(self, rows: int) -> jax.Array:
        """The flags of all ``rows`` of the largest call, in a trace: every token may come in the other rows."""
        every = jnp.full((rows, *self.allowed.shape[1:]), _EVERY_TOKEN, jnp.uint32)
        return every.at[self.places].set(self.allowed, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyInputs:
    """Inputs of a program with a verify pass, in arrays on the host.

    Attributes:
      call: the rows of the draft program before it, without requests that have ended meanwhile.
      jump_forward: the jump-forward tokens of these rows, which become their first drafts.
    """

    call: DecodeRows
    jump_forward: FixedDrafts


def page_tables(pages: Sequence[Sequence[int]], count: int, config: EngineConfig) -> np.ndarray:
    """Page tables int32 ``[count, M]`` that begin with ``pages``, padded with the null page."""
    table = np.full((count, config.pages_per_row), NULL_PAGE, np.int32)
    for i, held in enumerate(pages):
        if i and held is pages[i - 1]:  # chunks of one prompt follow each other, and numpy copies its own rows faster
            table[i] = table[i - 1]
        else:
            table[i, : len(held)] = held
    return table


def empty_prefill(config: EngineConfig, n: int) -> PrefillInputs:
    """A prefill batch of n chunks that reads nothing."""
    zeros, none = np.zeros(n, np.int32), np.full(n, config.num_rows, np.int32)
    tokens = np.zeros((n, config.chunk + 1), np.int32)
    return PrefillInputs(none, tokens, zeros, zeros, page_tables([], n, config), none.copy())
