"""Where Ctrl-C does not come, and threads for callers to whom it may come anywhere.

Python raises KeyboardInterrupt in the main thread wherever that is, also in its own classes between a lock that they have
taken and the block that gives it back. The lock of a ``Future`` stays taken then: the thread that computes it waits for ever
when it is done, and so does Python for the thread, when it exits. Locks and queues that are written in C have no such place.
"""

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, in the main thread; in others it does not come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def holding_interrupts() -> Iterator[None]:
    """Have Ctrl-C come after the ``with``, in the main thread; in others it does not come. It is for short calls of Python's
    own that take locks, such as that a thread is started."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *of_signal: came.append(of_signal))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])


PATIENCE = 1.0  # seconds between two looks of a thread without a call whether Python exits


class Answer(NamedTuple):
    """What a call has returned, or what it has raised."""

    value: Any
    error: BaseException | None = None

    def result(self) -> Any:
        """The value.

        Raises:
          BaseException: the error.
        """
        error = self.error
        try:
            if error is not None:
                raise error
            return self.value
        finally:
            del self, error  # whose traceback has this frame


class Threads:
    """Threads that make calls, each begun when there is a call for it. Calls begin in their order.

    Args:
      most: how many there are at most, 1 or more.
      name: that of each, before its number.
    """

    def __init__(self, most: int, name: str):
        self._most, self._name, self._begun = most, name, 0
        self._calls: queue.SimpleQueue[tuple[Callable, tuple, queue.SimpleQueue[Answer]] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._over: list[bool] = []

    def call(self, function: Callable, args: tuple, answers: "queue.SimpleQueue[Answer]"):
        """Have a thread call a function, and put the ``Answer`` into a queue."""
        self._calls.put((function, args, answers))
        if self._begun < self._most:
            with holding_interrupts():
                threading.Thread(target=self._work, name=f"{self._name}_{self._begun}").start()
                self._begun += 1

    def end(self, *, wait: bool):
        """Begin no other call; with ``wait``, come back when none is under way. Python waits for those before it exits."""
        self._over.append(True)
        self._calls.put(None)
        while wait and self._begun:
            self._ended.get()
            self._begun -= 1

    def _work(self):
        while (call := self._next()) is not None:
            function, args, answers = call
            try:
                answers.put(Answer(function(*args)))
            except BaseException as error:  # it is the caller's
                answers.put(Answer(None, error))
            del call, function, args, answers  # a thread that waits keeps nothing
        self._calls.put(None)  # for the next thread
        self._ended.put(None)

    def _next(self) -> "tuple[Callable, tuple, queue.SimpleQueue[Answer]] | None":
        """The next call; None if there will be none: a caller that something still refers to may not come to ``end``."""
        while not self._over and threading.main_thread().is_alive():
            with contextlib.suppress(queue.Empty):
                call = self._calls.get(timeout=PATIENCE)
                return None if self._over else call
        return None
