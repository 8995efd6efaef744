"""A client of the engine: the caller of some requests, and the queue on which it gets what is new of them."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jspec.engine.request import ActiveRequest, Request
from jspec.outputs import Delta


class Failure(NamedTuple):
    """The last output of a client: nothing more comes of its requests, because of an error that is not theirs alone."""

    error: BaseException

    @property
    def finished(self) -> bool:
        """True, as of the last ``Delta``."""
        return True

    def raised(self) -> RuntimeError:
        """What the client raises, with the error as its cause."""
        error = RuntimeError(f"the thread that steps the engine failed: {self.error!r}")
        error.__cause__ = self.error
        return error


Output = (
    Delta | ActiveRequest | Failure
)  # what is new of a request; or one that has ended, for clients that do not stream


@dataclasses.dataclass(eq=False)
class Client:
    """What the engine's thread knows of a client. Only that thread looks at the fields behind ``cancel``, and changes them.

    Attributes:
      number: its number among all clients of the engine.
      outputs: its output queue.
      deliver: puts lists of outputs into the queues of clients. It is called once in a step for all clients that have the
        same.
      streams: whether it gets a ``Delta`` of all progress, or only its requests when they have ended.
      cancel: cancels all of its requests; then it gets nothing more. It is a function in C, which a signal cannot interrupt
        before it has done its work.
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


Deliver = Callable[[Sequence[tuple[Client, list[Output]]]], None]  # hashable


class Submission(NamedTuple):
    """Requests that a client submits.

    Attributes:
      client: whose requests.
      requests: in the order in which they are to be served.
      orders: their numbers among all requests of the engine; None if they are to get one when there is room for them.
    """

    client: Client
    requests: Sequence[Request]
    orders: Sequence[int] | None = None


class Cancel(NamedTuple):
    """A command to the engine's thread: cancel requests of a client.

    Attributes:
      client: its number.
      order: the request's, or None for all of the client.
      leaves: whether the client gets nothing more, not even their ends.
    """

    client: int
    order: int | None = None
    leaves: bool = False


def deliver(outputs: Sequence[tuple[Client, list[Output]]]):
    """Put outputs into the ``queue.SimpleQueue`` of each client."""
    for client, some in outputs:
        client.outputs.put(some)
