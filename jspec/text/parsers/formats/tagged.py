"""Calls whose parameters are raw text between tags: Qwen3-Coder, Seed-OSS, MiniMax M2, DeepSeek V3.2 and V4."""

import dataclasses
import json
import re
from collections.abc import Sequence

from jspec.text.parsers.argument_writer import ArgumentWriter, RawValue
from jspec.text.parsers.call_grammar import NEWLINE, CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.raw_grammar import RawArguments
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.schema_types import Types
from jspec.text.parsers.tool_format import ToolFormat

HEAD = re.compile(r"""\s*["']?([^"']*?)["']?(?:\s+string="(true|false)")?\s*""")
NO_STRING = frozenset({"null", "integer", "number", "boolean", "object", "array"})


@dataclasses.dataclass(frozen=True)
class TaggedCalls(ToolFormat):
    """One or more calls between ``opens`` and ``closes``, each with its parameters.

    What is not closed ends where the next tag begins: a value at the next parameter or at the end of its call, a call at
    the next call or at ``closes``. Arguments that end with the text stay open, so that they are not taken for complete.

    Attributes:
      opens: markers around all calls: the first is usual.
      closes: the same at their end.
      call: begins a call; its name and ``>`` follow.
      call_end: ends it.
      parameter: begins a parameter; its name and ``>`` follow.
      parameter_end: ends its value.
      bare: whether a call may stand without ``opens``, which then is around each; else it is around all of them.
      quoted: whether names have quotes.
      typed: whether a parameter says if it is a string.
      newlines: whether one newline at each end of a value is markup.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    call: str
    call_end: str
    parameter: str
    parameter_end: str
    bare: bool = False
    quoted: bool = False
    typed: bool = False
    newlines: bool = True

    def __post_init__(self):
        of_calls = (self.call, self.call_end, self.parameter, self.parameter_end)
        object.__setattr__(self, "markers", (*self.opens, *self.closes, *of_calls))
        object.__setattr__(self, "begins", (*self.opens, self.call) if self.bare else self.opens)
        object.__setattr__(self, "between", "\n" if self.bare else NEWLINE)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, marker = calls.reader, begin
        while True:
            if marker in self.opens:
                yield from reader.blanks()
                yield from reader.expect(self.call)
            marker = yield from self._call(calls)
            if marker is None:
                yield from reader.blanks()
                marker = yield from reader.expect(*self.closes, self.call)
            if marker in self.closes:
                return

    def _call(self, calls: Calls) -> Steps[str | None]:
        """Read a call after its marker; returns the marker of ``closes`` or of the next call if that ended it."""
        reader, stops = calls.reader, (*self.closes, *self.opens, self.call)
        head, marker = yield from reader.name((">", self.call_end, self.parameter, *stops), calls.may_begin)
        if marker is None:
            raise BrokenError
        name = _head(head)[0]
        calls.start(name)
        arguments = ArgumentWriter(calls, name)
        while True:
            if marker in (">", self.parameter_end):
                yield from reader.blanks()
                marker = yield from reader.expect(self.parameter, self.call_end, *stops)
            if marker != self.parameter:
                break
            marker = yield from self._parameter(calls, arguments, stops)
        arguments.close()
        calls.end()
        return None if marker == self.call_end else marker

    def _parameter(self, calls: Calls, arguments: ArgumentWriter, stops: tuple[str, ...]) -> Steps[str]:
        """Read a parameter after its marker; returns the marker that ended the value."""
        reader = calls.reader
        head, closed = yield from reader.name((">",))
        key, is_string = _head(head)
        if closed is None or not key:
            raise BrokenError
        value = RawValue(calls, _declared(arguments.key(key), is_string))
        if self.newlines:
            yield from reader.match("\n")
        ends = (self.parameter_end, self.parameter, self.call_end, *stops)
        padded = tuple(f"\n{end}" for end in ends) if self.newlines else ()
        ended = yield from reader.until((*padded, *ends), value.add)
        if ended is None:
            raise BrokenError
        value.end()
        return ended.removeprefix("\n")

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        calls = super().grammar(grammar, functions, several)
        return calls if self.bare else self._within(grammar, calls)

    def _within(self, grammar: CallGrammar, calls: str) -> str:
        return grammar.around(self.opens[0], f"{NEWLINE} {calls} {NEWLINE}", self.closes[0])

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        quote = json.dumps('"') if self.quoted else ""

        def argument(key: str, value: str, is_string: bool) -> str:
            of_type = f' string="{json.dumps(is_string)}"' if self.typed else ""
            head = f"{grammar.literal(self.parameter)} {quote} {key} {quote} {grammar.literal(of_type + '>')}"
            return f"{head} {value} {NEWLINE}"

        raw = RawArguments(grammar, function, self.parameter_end, self.markers, self.newlines, self.typed)
        arguments = f"{NEWLINE} {raw.all(argument)}"
        name = json.dumps(function.name) if self.quoted else function.name
        call = grammar.around(f"{self.call}{name}>", arguments, self.call_end)
        return self._within(grammar, call) if self.bare else call


def _head(text: str) -> tuple[str, str | None]:
    """The name in ``f`` or ``"f"``, and the ``string`` attribute behind it."""
    match = HEAD.fullmatch(text)
    return (match[1], match[2]) if match else (text, None)


def _declared(types: Types, is_string: str | None) -> Types:
    """The types of a value of which the model says whether it is a string."""
    if is_string == "true" and (not types or "string" in types):
        return frozenset({"string"})
    if is_string == "false":
        return types & NO_STRING or NO_STRING
    return types


QWEN3_CODER = TaggedCalls(  # and Qwen 3.5 and MiMo; Qwen3-Coder sometimes leaves out ``<tool_call>``
    opens=("<tool_call>",),
    closes=("</tool_call>",),
    call="<function=",
    call_end="</function>",
    parameter="<parameter=",
    parameter_end="</parameter>",
    bare=True,
)
SEED_OSS = dataclasses.replace(QWEN3_CODER, opens=("<seed:tool_call>",), closes=("</seed:tool_call>",))
MINIMAX_M2 = TaggedCalls(
    opens=("<minimax:tool_call>",),
    closes=("</minimax:tool_call>",),
    call="<invoke name=",
    call_end="</invoke>",
    parameter="<parameter name=",
    parameter_end="</parameter>",
    quoted=True,
)
# DeepSeek's models say of each value whether it is a string or JSON. V4 has ``tool_calls`` for
# ``function_calls``, and sometimes writes ``toolcalls`` or ``tool``.
DSML = ("function_calls", "tool_calls", "toolcalls", "tool")
DEEPSEEK_V32 = TaggedCalls(
    opens=tuple(f"<｜DSML｜{name}>" for name in DSML),
    closes=tuple(f"</｜DSML｜{name}>" for name in DSML),
    call="<｜DSML｜invoke name=",
    call_end="</｜DSML｜invoke>",
    parameter="<｜DSML｜parameter name=",
    parameter_end="</｜DSML｜parameter>",
    quoted=True,
    typed=True,
    newlines=False,
)
