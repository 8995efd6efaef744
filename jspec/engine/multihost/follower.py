"""What a process does that follows another (``jspec.engine.multihost.leader``): it sends the programs that it is told
to send."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jspec.engine.multihost.leader import Follower
from jspec.engine.runner.model_runner import Runner
from jspec.engine.runner.programs import PackedProgram, Program
from jspec.engine.runner.swap import moved


class Following:
    """Carries out what process 0 says, which is the name of a method and its arguments.

    What a program gave that another one takes stays here: drafts that are to be judged, and requests in host memory.

    Args:
      runner: with the same programs as that of process 0.
      when_serving: is called when process 0 begins to take requests.
    """

    def __init__(self, runner: Runner, when_serving: Callable[[], None] = lambda: None):
        assert isinstance(runner.group, Follower), runner.group
        self._when_serving = when_serving
        self._runner, self._group, self._programs = runner, runner.group, list(runner.programs)
        # The programs that draft, and those that judge what these propose, by how many rows they have.
        self._drafts, self._judges = (
            {id(program): rows for rows, program in by_rows.items()}
            for by_rows in (runner.programs.draft, runner.programs.judge)
        )
        self._proposals: dict[int, Any] = {}  # the newest for so many rows
        self._gave: Any = None  # beside the state, by the last program
        self._kept: dict[int, Any] = {}
        self._fetched: Any = None

    def run(self):
        """Do as told until process 0 lets this one go.

        Raises:
          ProcessLost: process 0 has ended without a word.
        """
        for what, *told in self._group:
            getattr(self, what)(*told)

    def meet(self):
        """Let process 0 know that all of this is done."""
        self._group.answer()

    def serving(self):
        """Know that process 0 has compiled, and takes requests."""
        self._when_serving()

    def send(self, place: int, on_host: Sequence[Any]):
        """Send a program with weights, state, what is here for it, and these arguments."""
        program = self._programs[place]
        if id(program) in self._judges:
            on_host = [self._proposals[self._judges[id(program)]], *on_host]
        elif program is self._runner.programs.restore:
            saved = self._arguments(program)[-1] if self._fetched is None else self._fetched
            on_host, self._fetched = [*on_host, saved], None
        self._gave = self._runner._send(program, *on_host)
        if id(program) in self._drafts:
            self._proposals[self._drafts[id(program)]] = self._gave

    def compile(self, places: Sequence[int], threads: int | None):
        """Compile programs."""
        programs = [self._programs[place] for place in places]
        self._runner._compile([(program, self._arguments(program)) for program in programs], threads)

    def keep(self, key: int):
        """Move to host memory what the last program saved of a request."""
        self._kept[key] = moved(self._gave, "device", "pinned_host")

    def fetch(self, key: int):
        """Move it back, for the next program."""
        self._fetched = moved(self._kept[key], "pinned_host", "device")

    def drop(self, keys: Sequence[int]):
        """Forget what was kept."""
        for key in keys:
            self._kept.pop(key, None)

    def begin_anew(self):
        """Have the state of an empty batch."""
        self._gave = self._fetched = None
        self._runner.begin_anew()

    def _arguments(self, program: Program) -> tuple:
        """What a program gets that does nothing to an idle batch."""
        if not isinstance(program, PackedProgram):
            return next(args for one, args in self._runner.movers() if one is program)
        if id(program) in self._judges:
            return self._proposals[self._judges[id(program)]], program.idle
        return (program.idle,)


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, in the main thread; in others it does not come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
