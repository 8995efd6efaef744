"""Writes the arguments of a call whose format is no JSON as JSON, parameter by parameter."""

import json

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.schema_types import Types, raw_to_json

STRING = frozenset({"string"})
NULLABLE = frozenset({"string", "null"})


class ArgumentWriter:
    """The arguments of one call as a JSON object.

    A parameter that occurs twice is written twice: JSON's readers take the last value, at the place of the first.

    Args:
      calls: where the call has begun.
      name: of its tool.
    """

    def __init__(self, calls: Calls, name: str):
        self._calls, self._types = calls, calls.types(name)
        self._separator = "{"

    def key(self, key: str) -> Types:
        """Begin a parameter; returns the types that the schema allows for its value."""
        key = self._calls.restore(key)
        self._calls.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: ")
        self._separator = ", "
        return self._types.get(key, frozenset())

    def close(self):
        """End the object."""
        self._calls.arguments("{}" if self._separator == "{" else "}")


class RawValue:
    """A parameter's value as raw text that comes in pieces.

    A string is passed on as it comes, and a value that may be of another type when it is complete.

    Args:
      calls: where it goes.
      types: that the schema allows; none are known if it is empty.
    """

    def __init__(self, calls: Calls, types: Types):
        self._calls, self._types = calls, types
        self._held, self._streams = list[str](), False
        if types == STRING:
            self._stream()

    def add(self, text: str):
        text = self._calls.restore(text)
        if self._streams:
            self._calls.arguments(escaped(text))
            return
        self._held.append(text)
        if self._types == NULLABLE and not "null".startswith("".join(self._held).lower()):
            self._stream()

    def end(self):
        if self._streams:
            self._calls.arguments('"')
        else:
            self._calls.arguments(raw_to_json("".join(self._held), self._types))

    def _stream(self):
        self._calls.arguments('"' + escaped("".join(self._held)))
        self._held, self._streams = [], True


def escaped(text: str) -> str:
    """A text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
