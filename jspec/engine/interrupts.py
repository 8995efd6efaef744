"""Where Ctrl-C does not come."""

import contextlib
import signal
import threading
from collections.abc import Iterator


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
    """Have Ctrl-C come after the ``with``, in the main thread; in others it does not come.

    It is for short calls of Python's own that take locks, such as that a thread is started: an interrupt between a lock that
    was taken and the block that gives it back leaves it taken, and whoever waits for it then waits forever."""
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
