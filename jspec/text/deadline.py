"""``limited``: calls Python code that was not written here, and ends it when it takes too much CPU time."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LOOKS_PER_LIMIT = 20  # how often the CPU time is looked at before it can be over


class TooSlow(Exception):
    """The code took more CPU time than it may."""


class _Ended(BaseException):
    """Raised inside of the code; a BaseException, so that no ``except Exception`` in there goes on."""


class _Watch(threading.Thread):
    """Raises ``_Ended`` in the thread that makes this object, when that has used ``seconds`` of CPU time."""

    def __init__(self, seconds: float):
        super().__init__(name="jspec-deadline", daemon=True)
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._end, self._pause = time.clock_gettime(self._clock) + seconds, seconds / LOOKS_PER_LIMIT
        self._over, self._lock = threading.Event(), threading.Lock()
        self.raised = False

    def run(self):
        while not self._over.wait(self._pause):
            with self._lock:
                if self._over.is_set():
                    return
                if time.clock_gettime(self._clock) >= self._end:
                    self.raised = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Ended))
                    return

    def stop(self):
        """Raise nothing from now on."""
        with self._lock:
            self._over.set()


def limited(work: Callable[[], T], seconds: float) -> T:
    """The result of ``work``, which may use so many seconds of this thread's CPU time.

    Only Python code can be ended: a single long call into C, ``"a" * 10**9`` say, ends when it is over.

    Raises:
      TooSlow: it was not done by then.
      Exception: what ``work`` raised.
    """
    watch = _Watch(seconds)
    watch.start()
    try:
        try:
            return work()
        finally:
            watch.stop()
            if watch.raised and not isinstance(sys.exception(), _Ended):
                _wait_for_it()
    except _Ended:
        raise TooSlow(f"took more than {seconds:g} s of CPU time") from None


def _wait_for_it():
    """Let an exception that is on its way come here and nowhere else: it comes between two instructions of Python."""
    for _ in range(1000):
        time.sleep(0)
