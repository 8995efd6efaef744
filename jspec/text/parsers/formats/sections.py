"""Calls as a header and JSON arguments between markers, within a section: DeepSeek V3, R1 and V3.1, Kimi K2."""

import dataclasses
from collections.abc import Sequence

from jspec.text.parsers.call_grammar import NEWLINE, CallGrammar, Function
from jspec.text.parsers.calls import Calls, begins_name
from jspec.text.parsers.json_text import pass_arguments
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat


@dataclasses.dataclass(frozen=True)
class SectionCalls(ToolFormat):
    """Calls ``<call>name<separator>{..}<call_end>`` between ``opens`` and ``closes``, which may be missing.

    Attributes:
      opens: markers that begin the section: the first is usual.
      closes: the same at its end.
      call: begins a call.
      separator: stands between its header and its arguments.
      call_end: ends it.
      fenced: whether the name stands behind the separator, in a line of its own, and a fence around the arguments.
      numbered: whether the header is ``functions.f:0``, the call's id, and not a bare name.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    call: str
    separator: str
    call_end: str
    fenced: bool = False
    numbered: bool = False

    def __post_init__(self):
        object.__setattr__(self, "markers", (*self.opens, *self.closes, self.call, self.separator, self.call_end))
        object.__setattr__(self, "begins", (*self.opens, self.call))
        object.__setattr__(self, "between", NEWLINE)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, marker = calls.reader, begin
        while True:
            if marker != self.call:
                yield from reader.blanks()
                yield from reader.expect(self.call)
            yield from self._call(calls)
            yield from reader.blanks()
            while (yield from reader.match("}", "```", self.call_end)):
                yield from reader.blanks()
                reader.keep()
            marker = yield from reader.expect(self.call, *self.closes)
            if marker in self.closes:
                return

    def _call(self, calls: Calls) -> Steps[None]:
        reader = calls.reader
        stops = (self.call_end, self.call, *self.closes)
        fence = ()
        header, marker = yield from reader.name((self.separator, *stops), begins_name)
        if self.fenced and marker == self.separator:
            header, marker = yield from reader.name(("\n", "```json", *stops), calls.may_begin)
        if marker is None or marker in stops:
            raise BrokenError
        header = header.strip()
        if self.numbered:
            name, id = _numbered(header)
            calls.start(name, id)
        else:
            calls.start(header)
        if self.fenced:
            yield from reader.blanks()
            fence = ("```",) if (yield from reader.match("```json")) else ()
        calls.end((yield from pass_arguments(calls, (*stops, *fence))))

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        return grammar.around(self.opens[0], super().grammar(grammar, functions, several), self.closes[0])

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        name, arguments = function.name, grammar.json(function.parameters)
        if self.fenced:
            begin, end = f"{self.call}function{self.separator}{name}\n```json\n", f"\n```{self.call_end}"
            return grammar.around(begin, arguments, end)
        if self.numbered:
            header = f"{grammar.literal(f'{self.call}functions.{name}:')} /[0-9]{{1,4}}/"
            return f"{header} {grammar.around(self.separator, arguments, self.call_end)}"
        return grammar.around(f"{self.call}{name}{self.separator}", arguments, self.call_end)


def _numbered(header: str) -> tuple[str, str | None]:
    """The name in ``functions.f:0``, and the header as an id if it has a number."""
    name, colon, number = header.removeprefix("functions.").rpartition(":")
    if colon and number.isdecimal():
        return name, header
    return header.removeprefix("functions."), None


DEEPSEEK_V31 = SectionCalls(
    opens=("<｜tool▁calls▁begin｜>",),
    closes=("<｜tool▁calls▁end｜>",),
    call="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
)
DEEPSEEK_V3 = dataclasses.replace(DEEPSEEK_V31, fenced=True)  # and R1: ``function`` stands where V3.1 has the name
KIMI_K2 = SectionCalls(  # which sometimes writes the section's markers in the singular
    opens=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    closes=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    numbered=True,
)
