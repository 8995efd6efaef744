"""What the scheduler decides and the runner carries out. Nothing here needs JAX."""

import dataclasses
from typing import NamedTuple

from jspec.engine.request import ActiveRequest
from jspec.engine.scheduler.prefill_batching import Segment


class Move(NamedTuple):
    """A request that leaves a row for host memory, or comes back, and its pages on the device."""

    active: ActiveRequest
    row: int
    pages: list[int]


@dataclasses.dataclass
class Plan:
    """What the device does next, in this order.

    Attributes:
      leaving: requests to copy to host memory.
      segments: the segments of the prefill pass; none if there is no pass.
      entering: requests whose prompt has been read with that pass, which are to be put into their rows.
      returning: requests to copy back from host memory.
      drafting: constrained requests to draft for.
      judging: constrained requests whose drafts are to be judged, those that are drafted now or were with an earlier plan.
      decoding: the requests that the rounds of the call decode; none if there is no call.
      rounds: how many rounds the call makes.
    """

    leaving: list[Move] = dataclasses.field(default_factory=list)
    segments: list[Segment] = dataclasses.field(default_factory=list)
    entering: list[ActiveRequest] = dataclasses.field(default_factory=list)
    returning: list[Move] = dataclasses.field(default_factory=list)
    drafting: list[ActiveRequest] = dataclasses.field(default_factory=list)
    judging: list[ActiveRequest] = dataclasses.field(default_factory=list)
    decoding: list[ActiveRequest] = dataclasses.field(default_factory=list)
    rounds: int = 0

    @property
    def needs_processing(self) -> bool:
        """Whether rounds have to process logits for one of the requests, or to find log-probabilities."""
        return any(active.request.needs_processing for active in self.decoding)
