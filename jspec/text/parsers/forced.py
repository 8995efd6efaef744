"""Texts that are calls throughout, because a grammar forced them: the arguments of one tool, or a list of calls in JSON."""

import json
import re
from collections.abc import Sequence

from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Event
from jspec.text.parsers.parser import OutputParser

_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"parameters"\s*:')


class NamedCall(OutputParser):
    """The text is the arguments of one call.

    Args:
      name: of the tool.
    """

    def __init__(self, name: str):
        self._name, self._begun = name, False

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        del token_ids
        if not text:
            return []
        start = [] if self._begun else [CallStart(self._name)]
        self._begun = True
        return [*start, CallArguments(text)]

    def finish(self) -> list[Event]:
        return [CallEnd()] if self._begun else []


class ListOfCalls(OutputParser):
    """The text is ``[{"name": .., "parameters": {..}}, ..]``, whose parameters pass through as they are written."""

    def __init__(self):
        self._before = ""  # text in which the name of the next call is looked for
        self._value: _Value | None = None

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        del token_ids
        events: list[Event] = []
        while text:
            if self._value is None:
                self._before += text
                name = _NAME.search(self._before)
                if name is None:
                    break
                text, self._before, self._value = self._before[name.end() :], "", _Value()
                events.append(CallStart(json.loads(name[1])))
                continue
            if not self._value.begun:
                text = text.lstrip()
            size = self._value.scan(text)
            if size:
                events.append(CallArguments(text[:size]))
            text = text[size:]
            if self._value.ended:
                events.append(CallEnd())
                self._value = None
        return events

    def finish(self) -> list[Event]:
        ended: list[Event] = [CallEnd()] if self._value is not None else []
        self._value = None
        return ended


class _Value:
    """Finds the end of a JSON value that comes in pieces.

    Attributes:
      begun: whether it has had a character.
      ended: whether it is complete; a number is when another character follows.
    """

    def __init__(self):
        self.begun = self.ended = False
        self._depth, self._in_string, self._escaped = 0, False, False

    def scan(self, text: str) -> int:
        """How many characters of the next piece belong to the value."""
        for place, letter in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
                closes = not self._in_string
            elif self._depth == 0 and (letter in ",]}" or (self.begun and letter.isspace())):
                self.ended = True
                return place
            else:
                self._in_string = letter == '"'
                self._depth += (letter in "[{") - (letter in "]}")
                closes = letter in "]}"
            self.begun = True
            if closes and self._depth == 0:
                self.ended = True
                return place + 1
        return len(text)
