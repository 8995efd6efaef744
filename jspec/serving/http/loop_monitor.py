"""Measures how long an event loop runs without a pause for others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

TICK = 0.02  # seconds
PERIOD = 60.0  # seconds


class LoopMonitor:
    """The longest pause of an event loop: for how long something else kept it from what was due.

    While nothing runs on the loop for longer than a few milliseconds, every response and ``/health`` are as fast as they
    can be.
    """

    def __init__(self):
        self._longest, self._before = 0.0, 0.0  # of this period and of the one before

    @property
    def longest_pause(self) -> float:
        """Seconds of the longest pause of the last minute or two."""
        return max(self._longest, self._before)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure the loop of the caller until the context ends."""
        task = asyncio.ensure_future(self._measure())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _measure(self):
        loop = asyncio.get_running_loop()
        ends = loop.time() + PERIOD
        while True:
            due = loop.time() + TICK
            await asyncio.sleep(TICK)
            now = loop.time()
            self._longest = max(self._longest, now - due)
            if now >= ends:
                ends, self._before, self._longest = now + PERIOD, self._longest, 0.0
