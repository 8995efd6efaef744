"""The main loop of a supervisor: it starts its worker, and restarts it when it was lost."""

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable

from jspec.serving.http.server import LAST_WORDS, signalled
from jspec.serving.supervisor.messages import Ended, Joined, Ready
from jspec.serving.supervisor.public import Public
from jspec.serving.supervisor.worker_process import WorkerHandle

log = logging.getLogger("jspec.serve")

FIRST_DELAY, MOST_DELAY = 0.5, 30.0  # seconds before a restart: after the worker was ready, and at most
LOST = "a process that runs the model was lost, and is being restarted: try again later"
ENDING = "the server is shutting down: use another one"


class Supervisor:
    """Starts and restarts one worker of the group, or with Ray all workers.

    A first start that fails ends the supervisor, with the worker's message and exit code. Once the group has been ready,
    it is restarted without limit, until it ends in order.

    Args:
      start: starts the worker with a token that the worker then requires.
      make_public: binds the public address, which the supervisor of the first host has.
      leads: whether this is that supervisor; None if only the worker will know.
      shutdown_timeout: seconds that requests under way have to end.
      lost_after: seconds after which a silent worker counts as lost.
    """

    def __init__(
        self,
        start: Callable[[str], Awaitable[WorkerHandle]],
        make_public: Callable[[], Public],
        leads: bool | None,
        *,
        shutdown_timeout: float,
        lost_after: float,
    ):
        self._start, self._make_public = start, make_public
        self._public = make_public() if leads else None
        # The worker drains, its responses reach their clients, and its group ends in order.
        self._to_end = 2 * LAST_WORDS + lost_after
        self._to_drain = shutdown_timeout + self._to_end
        self._started: WorkerHandle | None = None
        self._ready = self._ever_ready = False
        self._stops: list[int] = []
        self._stopped = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Run the worker until it ends in order, or until a signal ends this process; returns the exit code.

        Raises:
          ValueError: the public address cannot be used.
        """
        with signalled() as stops:
            hearing = asyncio.ensure_future(self._receive_signals(stops))
            try:
                return await self._run_group()
            finally:
                hearing.cancel()
                if self._deadline is not None:
                    self._deadline.cancel()
                if self._public is not None:
                    await self._public.close()

    async def _run_group(self) -> int:
        delay = FIRST_DELAY
        while True:
            ended = await self._run_worker()
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
            log.warning("the group was lost: %s; it is restarted in %.1f s", ended.why, delay)
            with contextlib.suppress(TimeoutError):
                # Random, so that hosts do not all start at the same moment.
                await asyncio.wait_for(self._stopped.wait(), delay * random.uniform(0.5, 1))

    async def _run_worker(self) -> Ended:
        """Start the worker, and wait for its end."""
        if self._stops:
            return Ended(1, "interrupted")
        token = secrets.token_hex(32)
        try:
            self._started = started = await self._start(token)
        except OSError as error:
            return Ended(1, f"its process could not be started ({error})")
        if self._stops:  # a signal came meanwhile
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

    async def _make_public_of(self, started: WorkerHandle):
        """Bind the public address before the worker loads the model.

        Raises:
          ValueError, OSError: the address cannot be used. The worker has ended by then.
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
            assert self._public is not None, "only the leader has an address"
            await self._public.open(report.address, token)
        self._ready = self._ever_ready = True
        if self._stops:  # a signal came meanwhile
            self._stop()

    async def _receive_signals(self, stops: "asyncio.Queue[int]"):
        while True:
            self._stops.append(await stops.get())
            self._stopped.set()
            self._stop()

    def _stop(self):
        """End or kill the worker, depending on the number of signals so far."""
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
        """The exit code of a supervisor that a signal has ended."""
        if not self._ever_ready:
            if self._stops[0] == signal.SIGINT:
                print("jspec serve: interrupted", file=sys.stderr)
            return 128 + self._stops[0]
        # A follower, or a worker that was not ready, may be ended at any time. A ready leader has clients.
        return ended.code if was_ready and self._public is not None else 0
