"""A pytest plugin: a test that takes far too long fails, where it is, and the others run."""

import signal
import threading
import time

import pytest
import tiers

QUICK, OF_ANOTHER_TIER = 900, 3600  # seconds, many times what the longest test takes on slow cores
AGAIN = 30  # seconds, if what it waits for in a ``finally`` does not end either


class TookTooLong(Exception):
    """Where a test was after so many seconds."""


class Patience:
    """Raises ``TookTooLong`` in the main thread, wherever it is: a signal also ends its waiting for a lock or a process."""

    def __init__(self, look_again: float = 1.0):
        self._deadline: float | None = None
        self._look_again, self._main = look_again, threading.get_ident()
        signal.signal(signal.SIGUSR1, self._raise)
        threading.Thread(target=self._watch, name="patience", daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        del nextitem
        elsewhere = any(item.get_closest_marker(tier) for tier in tiers.TIERS)
        self._deadline = time.monotonic() + (OF_ANOTHER_TIER if elsewhere else QUICK)
        try:
            return (yield)
        finally:
            self._deadline = None

    def _watch(self):
        while True:
            time.sleep(self._look_again)
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._deadline = time.monotonic() + AGAIN
                signal.pthread_kill(self._main, signal.SIGUSR1)

    def _raise(self, *_):
        if self._deadline is not None:
            raise TookTooLong
