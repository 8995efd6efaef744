"""A worker on this host as a child process: start it, receive its reports, and kill it if it hangs."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Mapping
from typing import Protocol

from jspec._child_process import python_command
from jspec.serving.supervisor.messages import (
    END,
    MOST_BYTES,
    PING,
    Alive,
    Ended,
    Failed,
    Ready,
    Report,
    Task,
    report_of,
)

log = logging.getLogger("jspec.serve")

START_PATIENCE = 300.0  # seconds that a starting worker may be silent, since loading libraries stops its threads
PINGS = 5  # pings in ``lost_after`` seconds; without a response to any of them the worker is lost


class WorkerHandle(Protocol):
    """A running worker of the group, or the workers of all hosts."""

    async def report(self) -> Report | Ended:
        """The next report; ``Ended`` is the last, after which no process is left."""
        ...

    def end(self):
        """Ask the worker to shut down gracefully, once it is ready; a second call cancels requests under way."""
        ...

    def kill(self, why: str):
        """Kill the worker at once."""
        ...


class WorkerProcess:
    """A worker on this host. It is killed if it no longer responds to pings.

    Args:
      process: the child process.
      reader, writer: the connection to it.
      lost_after: seconds within which it has to respond.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost_after: float,
    ):
        self._process, self._reader, self._writer, self._lost_after = process, reader, writer, lost_after
        self._reports: asyncio.Queue[Report | Ended] = asyncio.Queue()
        self._why: str | None = None
        self._ready, self._unanswered = False, 0
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._watch())]

    @classmethod
    async def start(
        cls, task: Task, lost_after: float, environment: Mapping[str, str] | None = None
    ) -> "WorkerProcess":
        """Start a worker.

        Args:
          task: its task.
          lost_after: seconds within which it has to respond.
          environment: environment variables in addition to those of this process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *python_command("jspec.serving.worker.main", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor
                env={**os.environ, **(environment or {})},
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_BYTES)
        writer.write(task.line())
        return cls(process, reader, writer, lost_after)

    async def report(self) -> Report | Ended:
        return await self._reports.get()

    def end(self):
        self._writer.write(END)

    def kill(self, why: str):
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _listen(self):
        """Queue reports until the worker ends. The reason in ``Failed`` becomes that of ``Ended``."""
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                self._unanswered = 0
                self._receive(report_of(line))
        except OSError as error:  # it has ended before it had read all messages
            log.debug("the connection to a worker has ended: %r", error)
        except (ValueError, LookupError, TypeError) as error:
            self.kill(f"its reports could not be read ({error!r})")
        code = await self._process.wait()
        self._tasks[1].cancel()
        self._writer.close()
        self.kill("")  # children of the worker, if it had any
        self._reports.put_nowait(Ended(code if code >= 0 else 128 - code, self._why or _ending(code)))

    def _receive(self, report: Report):
        self._ready |= isinstance(report, Ready)
        if isinstance(report, Failed):
            self._why = self._why or report.why
        elif not isinstance(report, Alive):
            self._reports.put_nowait(report)

    async def _watch(self):
        """Kill a worker that does not respond. Pings are counted instead of time, so that a supervisor that was stopped for
        a while does not take its own silence for the worker's."""
        wait = self._lost_after / PINGS
        while True:
            await asyncio.sleep(wait)
            most = PINGS if self._ready else max(START_PATIENCE / wait, PINGS)
            if self._unanswered >= most - 1:
                self.kill(f"it did not respond to its supervisor within {most * wait:.0f} seconds")
                return
            self._unanswered += 1
            self._writer.write(PING)


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it was ended by signal {-code}"
