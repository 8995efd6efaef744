"""Python's literals as JSON."""

import re

from jspec.text.detokenizer import REPLACEMENT
from jspec.text.parsers.literals import Notation
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps

WORDS = {"True": "true", "False": "false", "None": "null"}
NUMBER = re.compile(
    r"[+-]?(0[xX][0-9a-fA-F]{1,64}|0[oO][0-7]{1,64}|0[bB][01]{1,64}|[0-9_.]{1,400}([eE][+-]?[0-9]{1,9})?)"
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
ESCAPES |= {character: character for character in "\\'\""}
DIGITS = {"x": 2, "u": 4, "U": 8}  # of an escape with a hexadecimal number
HEXADECIMAL = re.compile(r"[0-9a-fA-F]+")
OCTAL = re.compile(r"[0-7]{1,3}")
WORD = re.compile(r"[\w.+\-]+")
IN_STRING = re.compile(r"[^\\\"']+")


class PythonValues(Notation):
    """Strings in quotes of four kinds with their escapes, ``True``, ``False``, ``None``, numbers, lists, tuples and
    dictionaries."""

    opening = "{[("
    bare = re.compile(r"[^,{}\[\]()\"'=\n\ud800-\udfff]+")

    def string(self, reader: Reader, sink: Sink) -> Steps[bool]:
        quote = yield from reader.peek()
        if quote not in ('"', "'"):
            return False
        if (yield from reader.peek(3)) == 3 * quote:
            quote *= 3
        reader.take(len(quote))
        while True:
            sink(reader.run(IN_STRING))
            next_ = yield from reader.peek()
            if next_ == "\\":
                sink((yield from self._escape(reader)))
            elif not next_:
                raise BrokenError
            elif (yield from reader.match(quote)):
                return True
            elif next_ in "\"'":
                sink(reader.take(1))

    def key(self, reader: Reader) -> Steps[str]:
        pieces = list[str]()
        if not (yield from self.string(reader, pieces.append)):
            word = yield from reader.all(WORD)
            if not word:
                raise BrokenError
            pieces.append(self.word(word))
        yield from reader.blanks()
        yield from reader.expect(":")
        return "".join(pieces)

    def word(self, text: str) -> str:
        if text in WORDS or not NUMBER.fullmatch(text):
            return WORDS.get(text, text)
        try:
            return str(int(text, 0))
        except ValueError:
            pass
        try:
            value = float(text)
        except ValueError:
            return text
        return text if abs(value) == float("inf") else repr(value)

    def _escape(self, reader: Reader) -> Steps[str]:
        """The character of an escape. One that Python does not have stands for itself."""
        kind = (yield from reader.peek(2))[1:]
        if kind in DIGITS:
            value = yield from self._number(reader, DIGITS[kind])
            if 0xD800 <= value < 0xDC00:
                value = yield from self._pair(reader, value)
            return chr(value) if 0 <= value < 0xD800 or 0xDFFF < value < 0x110000 else REPLACEMENT
        if octal := OCTAL.match((yield from reader.peek(4))[1:]):
            reader.take(1 + len(octal[0]))
            return chr(int(octal[0], 8))
        text = reader.take(1 + len(kind))
        return ESCAPES.get(kind, text)

    def _number(self, reader: Reader, digits: int) -> Steps[int]:
        """Read an escape with so many digits; a number that is no character if it has fewer."""
        match = HEXADECIMAL.match((yield from reader.peek(2 + digits))[2:])
        count = len(match[0]) if match else 0
        text = reader.take(2 + count)
        return int(text[2:], 16) if count == digits else 0x110000

    def _pair(self, reader: Reader, high: int) -> Steps[int]:
        """The character of two halves, of which JavaScript's and JSON's escapes consist."""
        following = yield from reader.peek(6)
        if not re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", following):
            return high
        reader.take(6)
        return 0x10000 + (high - 0xD800) * 0x400 + int(following[2:], 16) - 0xDC00


PYTHON_VALUES = PythonValues()
