"""Reading a text that comes in pieces: steps that wait for more of it, as generators.

A format is written as a function of the whole text, and each step yields where it needs text that has not come. What a
step does depends on the text alone, never on where pieces end.
"""

import functools
import re
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from jspec.text.parsers.lexer import Lexer

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], object]

MOST_KEPT = 16_384  # characters of what may become a call, before they are text
MOST_NAME = 256  # characters of a name or of a tag's head
BLANKS = re.compile(r"[ \t\r\n]*")


class BrokenError(Exception):
    """The text is no call, or a call that breaks off here."""


class Reader:
    """The text of a completion, and how far it has been read.

    Attributes:
      ended: whether no more text comes.
    """

    def __init__(self, lexer: Lexer):
        self.ended = False
        self._lexer = lexer
        self._text, self._place = "", 0
        self._kept: list[str] | None = None
        self._room = 0  # characters that may still be kept
        self._searches = dict[tuple[str, ...], _Search]()

    def add(self, text: str):
        """Add the next piece of the lexer's text."""
        self._text, self._place = self._text[self._place :] + text, 0

    def keep(self, text: str = ""):
        """Keep what is read from now on, because it may turn out to be plain text; ``text`` is what was read before."""
        self._kept, self._room = [text], MOST_KEPT

    def forget(self) -> str:
        """End keeping; returns what was kept."""
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def spelled(self, marker: str) -> str:
        """A marker as it stands in what was read."""
        return self._lexer.spell(marker)

    def take(self, count: int) -> str:
        """The next characters, which have come."""
        if self._kept is not None:
            if count > self._room:
                self._kept.append(self._text[self._place : self._place + self._room])
                self._place += self._room
                raise BrokenError
            self._room -= count
            self._kept.append(self._text[self._place : self._place + count])
        self._place += count
        return self._text[self._place - count : self._place]

    def run(self, pattern: re.Pattern) -> str:
        """What matches of the text that has come; there may be more in the next piece."""
        match = pattern.match(self._text, self._place)
        return self.take(match.end() - self._place) if match else ""

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters, without reading them; fewer at the end of the text."""
        while len(self._text) - self._place < count and not self.ended:
            yield
        return self._text[self._place : self._place + count]

    def all(self, pattern: re.Pattern) -> Steps[str]:
        """As ``run``, through the pieces that come."""
        read = list[str]()
        while True:
            read.append(self.run(pattern))
            if self._place < len(self._text) or self.ended:
                return "".join(read)
            yield

    def blanks(self) -> Steps[str]:
        """Read blanks and newlines."""
        return self.all(BLANKS)

    def at(self, *markers: str) -> Steps[str | None]:
        """Which marker comes next; None if none does."""
        search = self._search(markers)
        while True:
            rest = self._text[self._place : self._place + search.longest]
            if self.ended or not search.goes_on(rest):
                return next((marker for spelled, marker in search.names.items() if rest.startswith(spelled)), None)
            yield

    def match(self, *markers: str) -> Steps[str | None]:
        """Read the marker that comes next, and return it; None if none does."""
        marker = yield from self.at(*markers)
        if marker is not None:
            self.take(len(self._lexer.spell(marker)))
        return marker

    def expect(self, *markers: str) -> Steps[str]:
        """As ``match``, where one of them has to come."""
        marker = yield from self.match(*markers)
        if marker is None:
            raise BrokenError
        return marker

    def until(self, markers: Iterable[str], sink: Sink) -> Steps[str | None]:
        """Read up to the first marker and through it, and pass the text before it on as it comes.

        Returns:
          the marker; None if the text ended without one.
        """
        search = self._search(tuple(markers))
        while True:
            spelled, end = search.first(self._text, self._place, self.ended)
            if spelled:
                if end > self._place:
                    sink(self.take(end - self._place))
                return search.names[self.take(len(spelled))]
            if end > self._place:
                sink(self.take(end - self._place))
            if self.ended:
                return None
            yield

    def name(
        self, markers: Iterable[str], may_begin: Callable[[str], bool] = lambda text: True
    ) -> Steps[tuple[str, str | None]]:
        """The text up to the first marker, which is read, and the marker; None for it at the end of the text.

        Args:
          markers: one of which has to follow.
          may_begin: whether a name may begin with a text.

        Raises:
          BrokenError: the text is longer than a name can be, or no name begins so.
        """
        search, read = self._search(tuple(markers)), ""
        while True:
            spelled, end = search.first(self._text, self._place, self.ended)
            name = read + self._text[self._place : min(end, self._place + MOST_NAME + 1)]
            fits = len(name) <= MOST_NAME and may_begin(name)
            while len(name) > MOST_NAME or (len(name) > len(read) and not may_begin(name)):
                name = name[:-1]  # what comes behind may be a marker
            read += self.take(len(name) - len(read))
            if not fits:
                raise BrokenError
            if spelled:
                return read, search.names[self.take(len(spelled))]
            if self.ended:
                return read, None
            yield

    def _search(self, markers: tuple[str, ...]) -> "_Search":
        if markers not in self._searches:
            self._searches[markers] = _search(tuple(map(self._lexer.spell, markers)), markers)
        return self._searches[markers]


class _Search:
    """Finds the first of several markers, and of those that begin there the longest."""

    def __init__(self, spelled: tuple[str, ...], markers: tuple[str, ...]):
        names = sorted(zip(spelled, markers, strict=True), key=lambda pair: -len(pair[0]))
        self.names = dict(names)
        self.longest = len(names[0][0]) if names else 0
        self._pattern = re.compile("|".join(map(re.escape, self.names)) or r"(?!)")
        self._several = [text for text in self.names if len(text) > 1]
        firsts = "".join(sorted({re.escape(text[0]) for text in self._several}))
        self._firsts = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def first(self, text: str, place: int, ended: bool) -> tuple[str, int]:
        """The first marker of a text from a place on.

        Returns:
          the marker and its place, if no other may have begun before it;
          otherwise an empty text, and the first place where a marker may have begun, or the text's end.
        """
        match = self._pattern.search(text, place)
        end = len(text) if ended else self._may_begin(text, place)
        if match and match.start() < end:
            return match[0], match.start()
        return "", end

    def goes_on(self, rest: str) -> bool:
        """Whether a marker begins with ``rest`` and is longer."""
        return any(len(spelled) > len(rest) and spelled.startswith(rest) for spelled in self.names)

    def _may_begin(self, text: str, place: int) -> int:
        place = max(place, len(text) - self.longest + 1)
        while found := self._firsts.search(text, place):
            place = found.start()
            if self.goes_on(text[place:]):
                return place
            place += 1
        return len(text)


@functools.lru_cache(256)
def _search(spelled: tuple[str, ...], markers: tuple[str, ...]) -> _Search:
    return _Search(spelled, markers)
