"""Follower process of a multi-host engine: replays the leader's dispatches (``jspec.engine.multihost.leader``)."""

from collections.abc import Callable, Sequence
from typing import Any

from jspec.engine.multihost.leader import Follower
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.programs import EngineProgram, PackedProgram
from jspec.engine.runner.swap import to_memory_kind


class FollowerRunner:
    """Executes the messages of process 0, each the name of a method here and its arguments.

    Results that another program takes stay here: drafts to be verified, the tokens that grammars allow, and requests in
    host memory.

    Args:
      batch: has the same programs as that of process 0.
      when_serving: is called when process 0 begins to take requests.
    """

    def __init__(self, batch: DeviceBatch, when_serving: Callable[[], None] = lambda: None):
        assert isinstance(batch.group, Follower), batch.group
        self._when_serving = when_serving
        self._batch, self._group, self._programs = batch, batch.group, list(batch.programs)
        self._given: dict[
            Any, Any
        ] = {}  # the newest results that other programs take, as ``ProgramSpec.gives`` names them
        self._result: Any = None  # of the last program, beside the state
        self._swapped: dict[int, Any] = {}  # key -> swap block
        self._restored: Any = None  # block for the next ``restore``

    def run(self):
        """Execute messages until process 0 ends this.

        Raises:
          ProcessLost: process 0 has ended without a message.
        """
        for method, *args in self._group:
            getattr(self, method)(*args)

    def acknowledge(self):
        """Tell process 0 that every message so far is done."""
        self._group.answer()

    def serving(self):
        """Process 0 has compiled, and takes requests."""
        self._when_serving()

    def send(self, index: int, on_host: Sequence[Any]):
        """Send a program with weights, state, results that are here, and these arguments."""
        program = self._programs[index]
        on_host = [*self._taken(program), *on_host]
        if program in (self._batch.programs.restore, self._batch.programs.restore_states):
            saved = self._arguments(program)[-1] if self._restored is None else self._restored
            on_host, self._restored = [*on_host, saved], None
        self._result = self._batch.send(program, *on_host)
        if program.spec.gives is not None:
            self._given[program.spec.gives] = self._result

    def compile(self, indices: Sequence[int], threads: int | None):
        """Compile programs."""
        programs = [self._programs[index] for index in indices]
        self._batch.compile([(program, self._arguments(program)) for program in programs], threads)

    def swap_out(self, key: int):
        """Copy the result of the last program, ``save`` or ``save_states``, to host memory."""
        self._swapped[key] = to_memory_kind(self._result, "device", "pinned_host")

    def swap_in(self, key: int):
        """Copy a swap block back, for the next program."""
        self._restored = to_memory_kind(self._swapped[key], "pinned_host", "device")

    def drop(self, keys: Sequence[int]):
        """Free swap blocks."""
        for key in keys:
            self._swapped.pop(key, None)

    def reset_state(self):
        """Replace the state by that of an empty batch."""
        self._result = self._restored = None
        self._batch.reset_state()

    def _arguments(self, program: EngineProgram) -> tuple:
        """Arguments of a program that leave an idle batch as it is."""
        if not isinstance(program, PackedProgram):
            return next(args for other, args in self._batch.swap_programs() if other is program)
        return *self._taken(program), program.idle

    def _taken(self, program: EngineProgram) -> list[Any]:
        """The results of other programs that a program takes before its own arguments."""
        return [self._given[what] for what in program.spec.takes]
