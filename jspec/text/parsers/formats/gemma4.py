"""Calls of Gemma 4, whose strings stand between markers."""

import dataclasses
import re

from jspec.text.parsers.argument_writer import ArgumentWriter
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.literals import Notation
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps
from jspec.text.parsers.tool_format import ToolFormat

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class GemmaValues(Notation):
    """``{k:<|"|>text<|"|>,n:42,a:[true,null]}``, with keys without quotes."""

    opening = "{["
    bare = re.compile(r"[^,{}\[\]<\ud800-\udfff]+")

    def string(self, reader: Reader, sink: Sink) -> Steps[bool]:
        if not (yield from reader.match(QUOTE)):
            return False
        if not (yield from reader.until((QUOTE,), sink)):
            raise BrokenError
        return True

    def key(self, reader: Reader) -> Steps[str]:
        quoted = yield from reader.match(QUOTE)
        key, ended = yield from reader.name((QUOTE, ":") if quoted else (":",))
        if quoted and ended == QUOTE:
            yield from reader.blanks()
            ended = yield from reader.match(":")
        if ended is None:
            raise BrokenError
        return key.strip()

    def word(self, text: str) -> str:
        return "null" if text == "None" else text  # which the chat template writes for it


GEMMA_VALUES = GemmaValues()


@dataclasses.dataclass(frozen=True)
class Gemma4(ToolFormat):
    """``<|tool_call>call:f{k:<|"|>text<|"|>,n:42}<tool_call|>``."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (BEGIN, END, QUOTE)

    @property
    def begins(self) -> tuple[str, ...]:
        return (BEGIN,)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, separator = calls.reader, ","
        while separator == ",":
            yield from reader.blanks()
            yield from reader.expect("call:")
            yield from self._call(calls)
            yield from reader.blanks()
            separator = yield from reader.expect(END, ",")

    def _call(self, calls: Calls) -> Steps[None]:
        reader = calls.reader
        name, opened = yield from reader.name(("{", BEGIN, END))
        if opened != "{":
            raise BrokenError
        calls.start(name.strip())
        arguments = ArgumentWriter(calls, name.strip())
        while True:
            yield from reader.blanks()
            ended = yield from reader.match("}", ",")
            if ended == "}":
                break
            if ended == ",":
                continue
            types = arguments.key((yield from GEMMA_VALUES.key(reader)))
            yield from reader.blanks()
            yield from GEMMA_VALUES.parameter(calls, types)
        arguments.close()
        calls.end()


GEMMA4 = Gemma4()
