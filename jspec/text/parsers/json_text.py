"""The raw text of JSON values, as the model wrote it, and calls that are JSON objects."""

import json
import re

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.lexer import SURROGATES
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps
from jspec.text.parsers.schema_types import finite_json

IN_STRING = re.compile(r'[^"\\]+')
PLAIN = re.compile(r"[^\"{}\[\]<`,:\s\ud800-\udfff]+")  # outside of strings, where no marker begins
ARGUMENTS = ("arguments", "parameters")
KEYS = ("name", "type", "id", *ARGUMENTS)


def pass_string(reader: Reader, sink: Sink) -> Steps[bool]:
    """Pass on the raw text of the string that comes next, quotes included; returns whether it was complete."""
    sink(reader.take(1))
    while True:
        sink(reader.run(IN_STRING))
        next_ = yield from reader.peek()
        if next_ == "\\":
            next_ = yield from reader.peek(2)
            sink(reader.take(len(next_)))
        elif next_:  # a quote, or text of the next piece
            if next_ == '"':
                sink(reader.take(1))
                return True
        else:
            return False


def read_string(reader: Reader) -> Steps[str | None]:
    """The value of the string that comes next; None if it is incomplete or wrong."""
    pieces = list[str]()
    if not (yield from pass_string(reader, pieces.append)):
        return None
    try:
        return json.loads("".join(pieces), strict=False)
    except ValueError:
        return None


def pass_value(reader: Reader, sink: Sink, stops: tuple[str, ...], depth: int = 0) -> Steps[bool]:
    """Pass on the raw text of the value that comes next; returns whether it was complete.

    Brackets are counted, and strings are left alone. One of the markers ``stops`` outside of a string ends a value that
    is incomplete. It is not read. ``depth`` is how many brackets are open already.
    """
    begun = False  # whether a number or a word has begun outside of brackets
    while True:
        next_ = yield from reader.peek()
        if not next_ or (yield from reader.at(*stops)):
            return begun and depth == 0
        if depth == 0 and begun and (next_ in '{["' or next_ in ",:]}" or next_.isspace()):
            return True
        if next_ == '"':
            if not (yield from pass_string(reader, sink)):
                return False
        elif next_ in "{[":
            depth += 1
            sink(reader.take(1))
        elif next_ in "}]":
            if depth == 0:
                return False
            depth -= 1
            sink(reader.take(1))
        else:
            if depth == 0 and (next_ in ",:" or next_.isspace()):
                return False
            begun = begun or depth == 0
            sink(reader.run(PLAIN) or reader.take(1))
            continue
        if depth == 0:
            return True


def pass_arguments(calls: Calls, stops: tuple[str, ...], before_name: Sink | None = None) -> Steps[bool]:
    """As ``pass_value``, for a call's arguments, or for those ``before_name``. They are an object, or a string with the JSON
    of one, which becomes that object. ``null``, an empty string and nothing become ``{}``, and all else is no call."""
    reader, sink = calls.reader, before_name or calls.arguments
    yield from reader.blanks()
    if (yield from reader.at(*stops)) or (yield from reader.match("null", '""')):
        sink("{}")
        return True
    next_ = yield from reader.peek()
    if next_ == "{":
        return (yield from pass_value(reader, sink, stops))
    if next_ != '"':
        raise BrokenError
    if before_name is None:
        calls.commit()  # since a string may be long
    pieces = list[str]()
    complete = yield from pass_string(reader, pieces.append)
    sink(_unwrapped("".join(pieces)) if complete else "".join(pieces))
    return complete


def _unwrapped(text: str) -> str:
    try:
        inner = finite_json(text)
        if isinstance(inner, str) and isinstance(finite_json(inner), dict) and not SURROGATES.search(inner):
            return inner
    except ValueError:
        pass
    return text


def pass_call(calls: Calls, stops: tuple[str, ...], *, opened: bool = False, strict: bool = False) -> Steps[None]:
    """Read a call that is a JSON object with ``name`` and ``arguments`` or ``parameters``, in any order.

    Args:
      calls: where the call goes.
      stops: markers that end the object where it is incomplete.
      opened: whether its ``{`` has been read.
      strict: whether the object may also be plain text, because no marker has come before it. Then it has no other
        keys than those of calls, and it has arguments.

    Raises:
      BrokenError: this is no call of a tool.
    """
    reader, has_name, has_arguments, complete = calls.reader, False, False, False
    ended, waiting = False, list[str]()
    if not opened:
        yield from reader.expect("{")
    while not ended:
        yield from reader.blanks()
        next_ = yield from reader.peek()
        if next_ in ("}", ","):
            reader.take(1)
            ended = next_ == "}"
            continue
        if next_ != '"':
            break
        key = yield from read_string(reader)
        yield from reader.blanks()
        if not (yield from reader.match(":")):
            break
        yield from reader.blanks()
        if key == "name" and not has_name:
            name = (yield from read_string(reader)) if (yield from reader.peek()) == '"' else None
            if name is None:
                raise BrokenError
            calls.start(name)
            calls.arguments("".join(waiting))
            has_name = True
        elif key in ARGUMENTS and not has_arguments:
            has_arguments = True
            complete = yield from pass_arguments(calls, stops, None if has_name else waiting.append)
            if not complete:
                break
        elif (strict and key not in KEYS) or not (yield from pass_value(reader, lambda text: None, stops)):
            break
    if not has_name:
        raise BrokenError
    if not has_arguments and not strict and (ended or (yield from reader.at(*stops))):
        calls.arguments("{}")
        complete = True
    calls.end(complete)
