"""Interrupts at any place of jspec's code, and the model of tables whose calls are interrupted."""

import dis
import functools
import pathlib
import signal
import sys
import types

from engines import bigram, successor_table, table_llm

import jspec
from jspec.sampling.params import SamplingParams

TABLES = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
PROMPTS = [[1], [2] * 9, [3, 4], [5]]  # one chunk or two, and one more than there are rows
PARAMS = [SamplingParams(temperature=1.0, max_tokens=20, seed=seed) for seed in range(len(PROMPTS))]
JSPEC = str(pathlib.Path(jspec.__file__).parent)


def texts(llm) -> list[list[int]]:
    return [result.token_ids for result in jspec.generate(llm, PROMPTS, PARAMS)]


def streamed(llm) -> list[int]:
    return [token for delta in jspec.stream(llm, PROMPTS[1], PARAMS[1]) for token in delta.token_ids]


def warm_llm():
    """A model that is compiled, and its texts."""
    llm = table_llm(*TABLES)
    return llm, texts(llm)


@functools.cache
def places(code: types.CodeType) -> frozenset[int]:
    """Where Python may raise KeyboardInterrupt in a function, as offsets of instructions: at its beginning, where a
    call has returned, and where a loop begins again.

    What comes when a call has returned is raised by the call, while a trace function can only raise at the next
    instruction. Where another ``finally`` or none has that one, which never happens to a real interrupt, is no place."""
    found, before = set(), None
    for instruction in dis.get_instructions(code):
        if before is not None and (
            before.opname == "RESUME"
            or (
                before.opname in ("CALL", "CALL_FUNCTION_EX")
                and _handler(code, before.offset) == _handler(code, instruction.offset)
            )
        ):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction
    return frozenset(found)


def _handler(code: types.CodeType, offset: int) -> int | None:
    """Where an exception of an instruction is handled."""
    entries = dis.Bytecode(code).exception_entries  # pyright: ignore[reportAttributeAccessIssue]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


# From Python 3.12 on, a trace function is not told of the opcodes of a frame that it has only just seen: there only the
# places where a function begins are interrupted.
OPCODES = sys.version_info < (3, 12)


class Interruption:
    """A trace function that notes the places in jspec's code, or in files ``within``, that this thread comes by, and
    interrupts at one of them.

    ``how`` is what happens there: the signal that Ctrl-C sends, or an exception, as handlers of other signals raise it."""

    def __init__(self, how=None, at: tuple[types.CodeType, int] | None = None, within: str | tuple[str, ...] = JSPEC):
        self.how, self.at, self.within = how, at, within
        self.places: dict[tuple[types.CodeType, int], None] = {}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(self.within):
            return None
        if not OPCODES:
            self._pass(frame)
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._local

    def _local(self, frame, event, _):
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self._pass(frame)
        return self._local

    def _pass(self, frame):
        place = frame.f_code, frame.f_lasti
        first = place not in self.places
        self.places[place] = None
        if first and self.how is not None and place == self.at:
            self.how()

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


def interrupted(call, llm, how, files: tuple[str, ...] = ()):
    """Call once for each place in these files of the engine, or in all of jspec, with an interrupt there.

    Yields after each call.
    """
    with Interruption() as counting:
        call(llm)
    within = tuple(str(pathlib.Path(JSPEC, "engine", name)) for name in files) or JSPEC
    ats = [place for place in counting.places if place[0].co_filename.startswith(within)]
    came = 0
    for at in ats:
        try:
            with Interruption(how, at):
                call(llm)
        except KeyboardInterrupt:
            came += 1
        yield at
    assert came > 0.9 * len(ats) > 5  # a place where a caller waits longer may not be come by


def by_signal():
    signal.raise_signal(signal.SIGINT)


def by_exception():
    raise KeyboardInterrupt
