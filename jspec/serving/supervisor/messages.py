"""What a keeper and its member tell each other, a line of JSON each."""

import dataclasses
import json
from typing import Any

# What a keeper says after the task. A second ``END`` gives up what is being answered.
PING, END = b"ping\n", b"end\n"
MOST_BYTES = 2**20  # of a line


@dataclasses.dataclass(frozen=True)
class Task:
    """What a member is to do; the first line that it reads.

    Attributes:
      options: of ``jspec serve``, as ``argparse`` has them.
      group: arguments of ``jax.distributed.initialize``.
      host: where it listens for its keeper, if it leads.
      token: what its keeper shows it there, and nobody else knows.
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
        """The task that a line is."""
        return cls(**json.loads(line))


@dataclasses.dataclass(frozen=True)
class Joined:
    """The member has met the others: it is number ``rank`` of ``count``."""

    rank: int
    count: int


@dataclasses.dataclass(frozen=True)
class Ready:
    """The group takes requests.

    Attributes:
      address: where the member that leads listens for its keeper; None of a member that follows.
    """

    address: str | None = None


@dataclasses.dataclass(frozen=True)
class Failed:
    """The member is about to end, and why."""

    why: str


@dataclasses.dataclass(frozen=True)
class Alive:
    """The answer to ``PING``."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a keeper finds when a member has ended.

    Attributes:
      code: its exit code; 128 and the number of a signal that ended it.
      why: in words.
    """

    code: int
    why: str


Report = Joined | Ready | Failed | Alive
_REPORTS = {kind.__name__: kind for kind in (Joined, Ready, Failed, Alive)}


def report_line(report: Report) -> bytes:
    """A report as a line."""
    return json.dumps([type(report).__name__, dataclasses.asdict(report)]).encode() + b"\n"


def report_of(line: bytes) -> Report:
    """The report that a line is."""
    name, fields = json.loads(line)
    return _REPORTS[name](**fields)
