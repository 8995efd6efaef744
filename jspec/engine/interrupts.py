"""Ctrl-C, held off while something must not be torn apart."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

# The part of ``signal`` that is written in C. What ``signal`` puts around it, to and from enums, takes ten times as long,
# and this runs once for every program that is sent.
_signal = importlib.import_module("_signal")
_SIGINT = int(signal.SIGINT)


def uninterrupted(function: Callable[..., Any], *args) -> Any:
    """Call ``function(*args)``; a Ctrl-C that comes meanwhile is raised afterwards, in place of its result or exception.

    Python calls the handler of SIGINT, which raises KeyboardInterrupt, in the main thread between any two bytecodes:
    also between a call that takes the buffers of the old state and the assignment of the new state. So the handler is
    replaced during the call. (Blocking the signal by ``signal.pthread_sigmask`` would not do: another thread of the
    process gets it then, XLA has many, and Python's handler runs in the main thread all the same.)

    In other threads than the main one, where Python runs no handlers, and where SIGINT has no handler of Python's,
    there is nothing to hold off.
    """
    handler = _signal.getsignal(_SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        return function(*args)
    noted = []
    try:
        _signal.signal(_SIGINT, lambda *_: noted.append(True))
        result = function(*args)
    finally:  # begins with a call to C, so that no exception can come before it
        _signal.signal(_SIGINT, handler)
        if noted:
            signal.raise_signal(_SIGINT)
    return result


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
