"""A member on this host, as its keeper sees it: a child process."""

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

START_PATIENCE = (
    300.0  # seconds that a member may be silent while it starts; libraries that are loaded stop its threads
)
PINGS = 5  # of which one in ``lost_after`` seconds has to be answered


class Started(Protocol):
    """What a keeper has started and watches: its member of the group, or the members of all hosts."""

    async def report(self) -> Report | Ended:
        """The next news; ``Ended`` is the last, and nothing of what was started is left then."""
        ...

    def end(self):
        """Have it end in order, once it is ready; a second time, without waiting for what is being answered."""
        ...

    def kill(self, why: str):
        """End it at once."""
        ...


class Child:
    """A member that runs on this host. One that no longer answers is killed.

    Args:
      process: what was started.
      reader, writer: the connection to it.
      lost_after: seconds within which it has to answer.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost_after: float,
    ):
        self._process, self._reader, self._writer, self._lost_after = process, reader, writer, lost_after
        self._news: asyncio.Queue[Report | Ended] = asyncio.Queue()
        self._why: str | None = None
        self._ready, self._unanswered = False, 0
        self._tasks = [asyncio.ensure_future(self._listen()), asyncio.ensure_future(self._watch())]

    @classmethod
    async def start(cls, task: Task, lost_after: float, environment: Mapping[str, str] | None = None) -> "Child":
        """Start a member.

        Args:
          task: what it is to do.
          lost_after: seconds within which it has to answer.
          environment: variables that it has beside those of this process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *python_command("jspec.serving.supervisor.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the keeper
                env={**os.environ, **(environment or {})},
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=MOST_BYTES)
        writer.write(task.line())
        return cls(process, reader, writer, lost_after)

    async def report(self) -> Report | Ended:
        return await self._news.get()

    def end(self):
        self._writer.write(END)

    def kill(self, why: str):
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _listen(self):
        """Pass reports on until the member ends. ``Failed`` says why, and comes with ``Ended``."""
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                self._unanswered = 0
                self._hear(report_of(line))
        except OSError as error:  # it has ended, before it had read all that it was told
            log.debug("the connection to a member has ended: %r", error)
        except (ValueError, LookupError, TypeError) as error:
            self.kill(f"its reports could not be read ({error!r})")
        code = await self._process.wait()
        self._tasks[1].cancel()
        self._writer.close()
        self.kill("")  # children of the member, if it had any
        self._news.put_nowait(Ended(code if code >= 0 else 128 - code, self._why or _ending(code)))

    def _hear(self, report: Report):
        self._ready |= isinstance(report, Ready)
        if isinstance(report, Failed):
            self._why = self._why or report.why
        elif not isinstance(report, Alive):
            self._news.put_nowait(report)

    async def _watch(self):
        """Kill a member that does not answer. It is pings that are counted and no clock, so that a keeper that has been
        stopped for a while does not take its own silence for its member's."""
        wait = self._lost_after / PINGS
        while True:
            await asyncio.sleep(wait)
            most = PINGS if self._ready else max(START_PATIENCE / wait, PINGS)
            if self._unanswered >= most - 1:
                self.kill(f"it did not answer its keeper within {most * wait:.0f} seconds")
                return
            self._unanswered += 1
            self._writer.write(PING)


def _ending(code: int) -> str:
    if code >= 0:
        return f"it ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-code).name}"
    return f"it was ended by signal {-code}"
