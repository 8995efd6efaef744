"""Has Ctrl-C end a command also where Python drops the exception."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

AGAIN = 0.02  # seconds until an interrupt that was dropped is repeated


@contextlib.contextmanager
def repeated_interrupts() -> Iterator[None]:
    """A ``with`` in which an interrupt that Python drops is repeated until it is raised.

    Python cannot raise an exception in callbacks of the garbage collector and of weak references, and drops it. JAX has such
    callbacks, and they are often the first Python code that runs after a signal while modules are imported, weights are read
    or programs are traced.
    """
    usual, ended = sys.unraisablehook, threading.Event()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def repeat():
        if not ended.wait(AGAIN):
            signal.pthread_kill(main_thread, signal.SIGINT)  # which ends a sleep or a read as well

    def hook(unraisable: Any):
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            threading.Thread(target=repeat, name="jspec.interrupt", daemon=True).start()
        else:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        ended.set()
        sys.unraisablehook = usual
