"""Messages between a supervisor and its worker, one line each, those with content in JSON; and headers of requests."""

import dataclasses
import json
from typing import Any

# Messages of a supervisor after the task. A second ``END`` cancels the requests under way.
PING, END = b"ping\n", b"end\n"
MOST_BYTES = 2**20  # of a line

# Headers of the requests that a supervisor forwards.
HEADER = "x-jspec-supervisor"  # its token
CLIENT = "x-jspec-client"  # the address of the client


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of a worker, which is the first line that it reads.

    Attributes:
      options: of ``jspec serve``, as ``argparse`` has them.
      group: arguments of ``jax.distributed.initialize``.
      host: the address at which the leader listens for its supervisor.
      token: the secret with which the supervisor authenticates itself there.
    """

    options: dict[str, Any]
    group: dict[str, Any]
    host: str
    token: str

    def line(self) -> bytes:
        """The task as a line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> "Task":
        """The task in a line."""
        return cls(**json.loads(line))


@dataclasses.dataclass(frozen=True)
class Joined:
    """The worker has joined the group, as process ``rank`` of ``count``."""

    rank: int
    count: int


@dataclasses.dataclass(frozen=True)
class Ready:
    """The group takes requests.

    Attributes:
      address: where the leader listens for its supervisor; None of a follower.
    """

    address: str | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The worker is about to exit, for the reason ``why``."""

    why: str


@dataclasses.dataclass(frozen=True)
class Alive:
    """The response to ``PING``."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a worker, as its supervisor sees it.

    Attributes:
      code: its exit code; 128 plus the number of a signal that ended it.
      why: the reason, in words.
    """

    code: int
    why: str


Report = Joined | Ready | Failed | Alive
_REPORTS = {kind.__name__: kind for kind in (Joined, Ready, Failed, Alive)}


def report_line(report: Report) -> bytes:
    """A report as a line."""
    return json.dumps([type(report).__name__, dataclasses.asdict(report)]).encode() + b"\n"


def report_of(line: bytes) -> Report:
    """The report in a line."""
    name, fields = json.loads(line)
    return _REPORTS[name](**fields)
