"""The logs of rounds, as the device returns them and as the host reads them."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class CallLogs(NamedTuple):
    """The logs of a call, as the device returns them.

    Attributes:
      rounds: ``RoundLog.packed`` of every round, int32 ``[rounds, B, K + 7]``.
      logprobs: ``TokenLogprobs.packed`` of the emitted tokens, int32 ``[rounds, B, K + 1, PACKED]``; entries of
        rows that want none mean nothing. None where no request may want any.
      epochs: ``Exchange.epochs`` after the call; None where no sums over GPUs are made by packets.
    """

    rounds: Any
    logprobs: Any = None
    epochs: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundLog:
    """The log of a round, for the host.

    The logs of a call have one axis more in front, for its rounds: ``count``, for example, is ``[rounds, B]``. For a row
    that did not take part in a round, ``count`` is 0, ``outcome`` is the one before, and all other fields are -1.

    Attributes:
      tokens: int32 ``[B, K + 1]``, the emitted tokens, padded with -1.
      count: int32 ``[B]``, how many tokens were emitted.
      drafted: int32 ``[B]``, how many drafts were valid.
      accepted: int32 ``[B]``, how many of these drafts the verification rule accepted. ``count`` is one
        more, or less where a stop token, the length limit or broken logits cut the emitted tokens off.
      outcome: int32 ``[B]``, the row's outcome after the round: LIVE, STOPPED, FULL or BROKEN of ``engine.request``.
      deepest: int32 ``[B]``, how many drafts could have been accepted: those of a chain, or the depth of a tree.
      rejects: int32 ``[B]``, 1 if a draft was rejected behind the accepted ones, so that a recovered token took its place; 0
        if none followed them.
      logprobs: ``CallLogs.logprobs`` of the same rounds, if there are any; ``packed`` leaves it out.

    Example::

        import numpy as np

        one, two = np.array([1]), np.array([2])  # one row with K = 2: one of two drafts accepted, and a recovered token
        log = RoundLog(np.array([[5, 9, -1]]), two, drafted=two, accepted=one, outcome=one * 0, deepest=two, rejects=one)
        assert log.tokens[0, : log.count[0]].tolist() == [5, 9]
    """

    tokens: Any
    count: Any
    drafted: Any
    accepted: Any
    outcome: Any
    deepest: Any
    rejects: Any
    logprobs: Any = None

    def packed(self) -> jax.Array:
        """All fields side by side in one array, int32 ``[B, K + 7]``, so that one transfer brings them to the host."""
        others = (self.count, self.drafted, self.accepted, self.outcome, self.deepest, self.rejects)
        return jnp.concatenate([self.tokens, *(x[:, None] for x in others)], axis=1)

    @classmethod
    def unpacked(cls, logs: CallLogs) -> "RoundLog":
        """The logs of a call, on the host or in a trace."""
        packed = logs.rounds
        return cls(packed[..., :-6], *(packed[..., i] for i in range(-6, 0)), logprobs=logs.logprobs)

    def by_row(self) -> list["RoundLog"]:
        """The logs of a call on the host by row, in lists, which are faster to iterate over than arrays.

        Fields ``[rounds, B]`` become B lists of one number for each round, and tokens lists of K + 1 numbers for each. Those
        of ``logprobs`` stay arrays, ``[rounds, K + 1, PACKED]``.
        """
        fields = self.tokens, self.count, self.drafted, self.accepted, self.outcome, self.deepest, self.rejects
        rows = zip(*(field.swapaxes(0, 1).tolist() for field in fields), strict=True)
        logprobs = itertools.repeat(None) if self.logprobs is None else self.logprobs.swapaxes(0, 1)
        return [RoundLog(*row, logprobs=of_row) for row, of_row in zip(rows, logprobs, strict=False)]

    def of_rows(self, places: Sequence[int]) -> "RoundLog":
        """The logs of some rows of a call, fields ``[rounds, len(places)]``."""
        at = np.asarray(places, np.intp)
        return jax.tree.map(lambda field: field[:, at], self)

    @property
    def num_rounds(self) -> int:
        """How many rounds of a call any row took part in; for logs ``[rounds, B]`` on the host."""
        return int(np.any(self.accepted >= 0, axis=1).sum())
