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
        self._held, self._streams = list[str](), types == STRING
        self._begun = False  # whether the string that is passed on has

    def add(self, text: str):
        if not self._streams:
            self._held.append(self._calls.restore(text))
            held = "".join(self._held) if self._types == NULLABLE else ""
            if "null".startswith(held.lower()):
                return
            text, self._streams = held, True
        text = json.dumps(self._calls.restore(text), ensure_ascii=False)[1:-1]
        self._calls.arguments(text if self._begun else f'"{text}')
        self._begun = True

    def end(self):
        if self._streams:
            self._calls.arguments('"' if self._begun else '""')
        else:
            self._calls.arguments(raw_to_json("".join(self._held), self._types))
