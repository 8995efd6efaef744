"""The loop of a keeper: it starts its member, and starts it again when it was lost."""

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable

from jspec.serving.openai.http_server import LAST_WORDS, signalled
from jspec.serving.supervisor.messages import Ended, Joined, Ready
from jspec.serving.supervisor.public import Public
from jspec.serving.supervisor.worker_process import Started

log = logging.getLogger("jspec.serve")

FIRST_DELAY, MOST_DELAY = 0.5, 30.0  # seconds before a member is started again: after it was ready, and at most
LOST = "a process that runs the model was lost, and is being started again: ask again later"
ENDING = "the server is shutting down: ask another one"


class Keeper:
    """Keeps a member of the group running, or all members.

    A first start that fails ends the keeper, with the member's message and exit code. Once the group has been ready, it is
    started again for ever, until it ends in order.

    Args:
      start: starts the member, which asks for the token that it is given.
      make_public: binds the public address, which the keeper of the first host has.
      leads: whether this is that keeper; None if only the member will know.
      shutdown_timeout: seconds that answers have to end.
      lost_after: seconds after which a member that is silent is lost.
    """

    def __init__(
        self,
        start: Callable[[str], Awaitable[Started]],
        make_public: Callable[[], Public],
        leads: bool | None,
        *,
        shutdown_timeout: float,
        lost_after: float,
    ):
        self._start, self._make_public = start, make_public
        self._public = make_public() if leads else None
        # The member drains, its answers reach their clients, and its group ends in order.
        self._to_end = 2 * LAST_WORDS + lost_after
        self._to_drain = shutdown_timeout + self._to_end
        self._started: Started | None = None
        self._ready = self._ever_ready = False
        self._stops: list[int] = []
        self._stopped = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Keep the member running until it ends in order, or until this process is told to end; returns the exit code.

        Raises:
          ValueError: the public address cannot be used.
        """
        with signalled() as stops:
            hearing = asyncio.ensure_future(self._hear(stops))
            try:
                return await self._keep()
            finally:
                hearing.cancel()
                if self._deadline is not None:
                    self._deadline.cancel()
                if self._public is not None:
                    await self._public.close()

    async def _keep(self) -> int:
        delay = FIRST_DELAY
        while True:
            ended = await self._once()
            was_ready, self._ready, self._started = self._ready, False, None
            if self._public is not None:
                self._public.shut(ENDING if self._stops or ended.code == 0 else LOST)
            if self._stops:
                return self._code(ended, was_ready)
            if ended.code == 0:
                return 0
            if not self._ever_ready:
                print(f"jspec serve: {ended.why}", file=sys.stderr, flush=True)
                return ended.code
            delay = FIRST_DELAY if was_ready else min(2 * delay, MOST_DELAY)
            log.warning("the group was lost: %s; it is started again in %.1f s", ended.why, delay)
            with contextlib.suppress(TimeoutError):
                # Not at the same moment as the other hosts, should they hinder each other.
                await asyncio.wait_for(self._stopped.wait(), delay * random.uniform(0.5, 1))

    async def _once(self) -> Ended:
        """Start the member, and wait for its end."""
        if self._stops:
            return Ended(1, "interrupted")
        token = secrets.token_hex(32)
        try:
            self._started = started = await self._start(token)
        except OSError as error:
            return Ended(1, f"its process could not be started ({error})")
        if self._stops:  # meanwhile
            self._stop()
        while not isinstance(report := await started.report(), Ended):
            if isinstance(report, Joined) and report.rank == 0 and self._public is None:
                await self._make_public_of(started)
            elif isinstance(report, Ready):
                try:
                    await self._be_ready(report, token)
                except OSError as error:
                    started.kill(str(error))
        return report

    async def _make_public_of(self, started: Started):
        """Bind the public address, before the member loads anything.

        Raises:
          ValueError, OSError: it cannot be used. The member has ended by then.
        """
        try:
            self._public = self._make_public()
        except (ValueError, OSError) as error:
            started.kill(str(error))
            while not isinstance(await started.report(), Ended):
                pass
            raise

    async def _be_ready(self, report: Ready, token: str):
        if report.address is not None:
            assert self._public is not None, "only the member that leads has an address"
            await self._public.open(report.address, token)
        self._ready = self._ever_ready = True
        if self._stops:  # meanwhile
            self._stop()

    async def _hear(self, stops: "asyncio.Queue[int]"):
        while True:
            self._stops.append(await stops.get())
            self._stopped.set()
            self._stop()

    def _stop(self):
        """Do what the signals so far ask for."""
        if self._started is None:
            return
        if not self._ready or len(self._stops) > (1 if self._public is None else 2):
            self._started.kill("interrupted")
        elif self._public is not None:
            self._started.end()
            self._kill_after(self._to_drain if len(self._stops) == 1 else self._to_end)
        else:
            log.info("this process ends when the first host's does, or at a second signal")
            self._kill_after(self._to_drain)

    def _kill_after(self, seconds: float):
        if self._deadline is not None:
            self._deadline.cancel()
        assert self._started is not None
        why = f"it did not end within {seconds:.0f} seconds"
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._started.kill, why)

    def _code(self, ended: Ended, was_ready: bool) -> int:
        """The exit code of a keeper that was told to end."""
        if not self._ever_ready:
            if self._stops[0] == signal.SIGINT:
                print("jspec serve: interrupted", file=sys.stderr)
            return 128 + self._stops[0]
        # A member that follows, or that was being started, may be ended at any time. Any other has clients.
        return ended.code if was_ready and self._public is not None else 0
