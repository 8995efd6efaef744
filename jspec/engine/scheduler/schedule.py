"""The schedule of a step: decided by the scheduler, executed by the model runner. Nothing here needs JAX."""

import dataclasses
from typing import NamedTuple

from jspec.engine.request import ActiveRequest
from jspec.engine.scheduler.prefill_batching import Chunk
from jspec.engine.scheduler.snapshots import Restore, Snapshot


class Swap(NamedTuple):
    """A request that is swapped out of a row to host memory, or back, and its pages on the device."""

    active: ActiveRequest
    row: int
    pages: list[int]


@dataclasses.dataclass
class Schedule:
    """The work of a step on the device, in this order.

    Attributes:
      swap_out: requests to copy to host memory.
      restores: snapshots to copy into rows, which read what follows.
      chunks: the chunks of the prefill batch; none if there is no prefill.
      snapshots: of recurrent states, to make behind that batch.
      admitted: requests whose prompt ends in that batch, which are put into their rows.
      swap_in: requests to copy back from host memory.
      verifying: requests whose drafts, of an earlier schedule, are verified under what their grammars allow.
      drafting: requests to draft for, behind that.
      decoding: the requests that the rounds of the call decode; none if there is no call.
      rounds: how many rounds the call makes.
    """

    swap_out: list[Swap] = dataclasses.field(default_factory=list)
    restores: list[Restore] = dataclasses.field(default_factory=list)
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    admitted: list[ActiveRequest] = dataclasses.field(default_factory=list)
    swap_in: list[Swap] = dataclasses.field(default_factory=list)
    verifying: list[ActiveRequest] = dataclasses.field(default_factory=list)
    drafting: list[ActiveRequest] = dataclasses.field(default_factory=list)
    decoding: list[ActiveRequest] = dataclasses.field(default_factory=list)
    rounds: int = 0

    @property
    def needs_processing(self) -> bool:
        """Whether rounds have to process logits for one of the requests, or to compute log-probabilities."""
        return any(active.request.needs_processing for active in self.decoding)
