"""A subscriber: the caller of some requests, and the queue on which it gets what is new of them."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jspec.engine.request import ActiveRequest, Request
from jspec.outputs import Delta


class Failure(NamedTuple):
    """The last output of a subscriber: nothing more comes of its requests, because of an error that is not theirs alone."""

    error: BaseException

    @property
    def finished(self) -> bool:
        """True, as of the last ``Delta``."""
        return True

    def raised(self) -> RuntimeError:
        """What the subscriber raises, with the error as its cause."""
        error = RuntimeError(f"the thread that steps the engine failed: {self.error!r}")
        error.__cause__ = self.error
        return error


# What is new of a request; or one that has ended, for subscribers that do not stream.
Output = Delta | ActiveRequest | Failure


@dataclasses.dataclass(eq=False)
class Subscriber:
    """What the engine's thread knows of a subscriber. Only that thread looks at the fields behind ``cancel``, and changes
    them.

    Attributes:
      number: its number among all subscribers of the engine.
      outputs: its output queue.
      deliver: puts lists of outputs into the queues of subscribers. It is called once in a step for all subscribers that
        have the same.
      streams: whether it gets a ``Delta`` of all progress, or only its requests when they have ended.
      cancel: cancels all of its requests; then it gets nothing more. A C function (``SimpleQueue.put``): no signal handler
        can run halfway through it.
      unfinished: its requests that the loop has, by their order.
      pending: its requests that wait for room in the scheduler's queue.
    """

    number: int
    outputs: Any
    deliver: "Deliver"
    streams: bool
    cancel: Callable[[], None]
    unfinished: dict[int, ActiveRequest] = dataclasses.field(default_factory=dict)
    pending: collections.deque[Request] = dataclasses.field(default_factory=collections.deque)


Deliver = Callable[[Sequence[tuple[Subscriber, list[Output]]]], None]  # hashable


def deliver(outputs: Sequence[tuple[Subscriber, list[Output]]]):
    """Put outputs into the ``queue.SimpleQueue`` of each subscriber."""
    for subscriber, some in outputs:
        subscriber.outputs.put(some)
