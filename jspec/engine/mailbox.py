"""The mailbox of the engine's thread: requests that were submitted to it, and commands."""

import collections
import dataclasses
import queue
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jspec.engine.request import Request
from jspec.engine.subscriber import Subscriber

_WAKE, _STOP = "wake", "stop"


class Submission(NamedTuple):
    """Requests that a subscriber submits.

    Attributes:
      subscriber: whose requests.
      requests: in the order in which they are to be served.
      orders: their numbers among all requests of the engine; None if they are to get one when there is room for them.
    """

    subscriber: Subscriber
    requests: Sequence[Request]
    orders: Sequence[int] | None = None


class Cancel(NamedTuple):
    """A command to the engine's thread: cancel requests of a subscriber.

    Attributes:
      subscriber: its number.
      order: the request's, or None for all of the subscriber.
      leaves: whether the subscriber gets nothing more, not even their ends.
    """

    subscriber: int
    order: int | None = None
    leaves: bool = False


@dataclasses.dataclass(eq=False)
class ThreadCall:
    """A command to the engine's thread: call a function.

    Attributes:
      function: what to call.
      idle: whether only when no request is under way. Those that wait let it pass.
      always: whether also while the model is asleep.
      answer: gets its result and None, or None and what it raised.
      left: not empty when nobody waits for the answer any more.
    """

    function: Callable[[], Any]
    idle: bool
    always: bool = False
    answer: "queue.SimpleQueue[tuple[Any, BaseException | None]]" = dataclasses.field(default_factory=queue.SimpleQueue)
    left: list[bool] = dataclasses.field(default_factory=list)


class Mailbox:
    """What others want of the engine's thread. Any of them may put something in, and only the thread takes it out.

    Args:
      error: what ended the thread before this one; None if there was none.

    Attributes:
      post: puts in a command, which is obeyed between two steps. A C function that can be called anywhere, by a destructor
        within itself too.
      arriving: what was submitted and not taken yet; the thread takes it before it obeys a command.
      error: what ended the thread; until the first step that goes well, what ended the one before.
    """

    def __init__(self, error: BaseException | None):
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._taken: collections.deque[Any] = collections.deque()  # commands that were looked at and not obeyed yet
        self.post: Callable[[Any], None] = self._commands.put
        self.arriving: collections.deque[Submission] = collections.deque()
        self.error = error

    def submit(self, submission: Submission):
        """Have requests served."""
        self.arriving.append(submission)
        self.wake()

    def wake(self):
        """Have the thread look into its mailbox."""
        self.post(_WAKE)

    def stop(self):
        """Have the thread end."""
        self.post(_STOP)

    def wait(self):
        """Wait for a command, unless one is there."""
        if not self.commands():
            self._taken.append(self._commands.get())

    def commands(self) -> collections.deque[Any]:
        """All commands that are there, the oldest first. Who obeys one takes it out."""
        while not self._commands.empty():
            self._taken.append(self._commands.get())
        return self._taken

    @property
    def is_stopping(self) -> bool:
        """Whether the thread was told to end."""
        return _STOP in self.commands()
