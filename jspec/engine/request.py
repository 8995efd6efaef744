"""A request as the engine sees it, and what has become of one that is in a row. Nothing here needs JAX."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jspec._arguments import LARGEST_INT, require
from jspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jspec.engine.step import RoundLog

# The outcome of a row: it still decodes; a stop token or stop string; the length limit; logits that are not finite.
LIVE, STOPPED, FULL, BROKEN = range(4)
FINISH_REASONS = {STOPPED: "stop", FULL: "length", BROKEN: "error"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to complete, and how.

    Attributes:
      index: the number by which the caller knows this request.
      prompt: its tokens, at least one.
      params: how to sample, and when to end.
      key_data: uint32 ``[2]``, the data of the request's Threefry key.
      stop_tokens: ids of the tokens that end it.
      find_stop: looks for a stop string. It is given all new tokens, and how many of them it has been given before. It
        returns how many of them to keep if the text that they make contains a stop string, else None.

    Raises:
      ValueError: a value that the arrays of a row cannot hold.
    """

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    key_data: np.ndarray
    stop_tokens: tuple[int, ...] = ()
    find_stop: Callable[[list[int], int], int | None] | None = None

    def __post_init__(self):
        # ``SamplingParams`` bounds the rest by what arrays hold.
        what, largest = f"prompt {self.index}", LARGEST_INT
        for token in self.stop_tokens:
            require(0 <= token <= largest, f"{what}: stop_tokens", token, f"token ids in 0..{largest}")
        key = np.asarray(self.key_data)
        ok = key.dtype == np.uint32 and key.shape == (2,)
        require(ok, f"{what}: key_data", self.key_data, "a Threefry key, uint32 of shape (2,)")


@dataclasses.dataclass
class ActiveRequest:
    """A request that has a row and pages; after its end, what has become of it.

    Attributes:
      request: what was asked for.
      pages: the pages that it holds, in the order of its tokens.
      tokens: the new tokens so far.
      from_draft: for each of them, whether it was drafted and accepted; else the target drew it.
      drafted: for each round that counts, how many drafts were verified.
      accepted: for each round that counts, how many of them the target accepted.
      outcome: LIVE until it ends, then STOPPED, FULL or BROKEN.
    """

    request: Request
    pages: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    from_draft: list[bool] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    outcome: int = LIVE

    def follow(self, log: "RoundLog"):
        """Add what the row of this request did in one call, up to the request's end.

        The device knows nothing of stop strings and may have gone on behind one. Such rounds, and the tokens behind the
        stop string in its own round, are left out.

        Args:
          log: the rounds of this row alone: fields ``[rounds]``, tokens ``[rounds, K + 1]``.
        """
        for i in range(log.count.shape[0]):
            if self.outcome != LIVE or log.accepted[i] < 0:
                break
            count, accepted = int(log.count[i]), int(log.accepted[i])
            looked_at = len(self.tokens)
            self.tokens += log.tokens[i, :count].tolist()
            self.from_draft += [j < accepted for j in range(count)]
            self.drafted.append(int(log.drafted[i]))
            self.accepted.append(accepted)
            self.outcome = int(log.outcome[i])
            keep = self.request.find_stop(self.tokens, looked_at) if self.request.find_stop else None
            if keep is not None:
                del self.tokens[keep:], self.from_draft[keep:]
                self.outcome = STOPPED
