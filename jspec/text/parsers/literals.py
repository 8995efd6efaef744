"""Values in notations that are nearly JSON, written as JSON while they come."""

import json
import re
from abc import ABC, abstractmethod

from jspec.text.parsers.argument_writer import STRING, RawValue
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps
from jspec.text.parsers.schema_types import Types, raw_to_json

MOST_DEPTH = 64  # lists and objects within each other
CLOSING = {"[": "]", "(": ")", "{": "}"}


class Notation(ABC):
    """How values are written: lists and objects as in JSON, strings and words in a way of their own.

    Attributes:
      opening: brackets that begin a list or an object.
      bare: what a word or a number consists of.
    """

    opening: str
    bare: re.Pattern

    @abstractmethod
    def string(self, reader: Reader, sink: Sink) -> Steps[bool]:
        """Pass on the text of a string, if one comes next; returns whether one did."""

    @abstractmethod
    def key(self, reader: Reader) -> Steps[str]:
        """Read an object's key and the colon behind it."""

    def word(self, text: str) -> str:
        """A word or a number as JSON writes it, if it has a meaning there."""
        return text

    def value(self, calls: Calls, types: Types = frozenset(), depth: int = 0) -> Steps[None]:
        """Read a value of these types.

        Args:
          types: that the schema allows; none are known if it is empty.
          depth: how many lists and objects it lies in.

        Raises:
          BrokenError: this is no value, or it is incomplete.
        """
        reader = calls.reader
        next_ = yield from reader.peek()
        text = RawValue(calls, STRING if not types or "string" in types else types)
        if (yield from self.string(reader, text.add)):
            text.end()
        elif next_ and next_ in self.opening:
            yield from self._container(calls, depth + 1)
        else:
            word = (yield from reader.all(self.bare)).strip()
            if not word:
                raise BrokenError
            calls.arguments(raw_to_json(calls.restore(self.word(word)), types))

    def _container(self, calls: Calls, depth: int) -> Steps[None]:
        if depth > MOST_DEPTH:
            raise BrokenError
        reader = calls.reader
        bracket = reader.take(1)
        calls.arguments("{" if bracket == "{" else "[")
        separator = ""
        while True:
            yield from reader.blanks()
            if (yield from reader.match(CLOSING[bracket])):
                break
            calls.arguments(separator)
            separator = ", "
            if bracket == "{":
                key = calls.restore((yield from self.key(reader)))
                calls.arguments(f"{json.dumps(key, ensure_ascii=False)}: ")
                yield from reader.blanks()
            yield from self.value(calls, depth=depth)
            yield from reader.blanks()
            if (yield from reader.expect(CLOSING[bracket], ",")) != ",":
                break
        calls.arguments("}" if bracket == "{" else "]")
