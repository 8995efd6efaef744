"""The streamed text of a request: the part that later tokens cannot change, and the stop string that ends it."""

from collections.abc import Sequence

from jspec.text.detokenizer import Detokenizer


class Completion:
    """The text of one request as its tokens come, up to its first stop string.

    Call ``add`` for the tokens of each round, ``take`` for the text that can be streamed, and ``end`` after the last. A stop
    token is not part of the text, so it is not added. Not thread-safe.

    With stop strings every token is decoded when it is added. Without, tokens are decoded together when text is taken, so
    a text that is not streamed costs a few decodes in all.

    Args:
      detokenizer: one that knows the prompt and has no new tokens yet.
      stop: the stop strings, none of them empty.
      min_tokens: a stop string does not count if it is complete within the first ``min_tokens`` new tokens.
      include_stop: whether the stop string is part of the text.

    Attributes:
      stop: the stop string that ended the text; None if none has.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0, include_stop: bool = False
    ):
        self.stop: str | None = None
        self._include_stop = include_stop
        self._detokenizer, self._strings, self._min_tokens = detokenizer, tuple(stop), min_tokens
        self._waiting = list[int]()  # tokens that are not decoded yet
        self._searched = 0  # tokens whose text has been searched for stop strings
        self._length = 0  # characters of settled text
        self._recent = ""  # the end of that text, in which a stop string may have begun
        self._longest = max(map(len, self._strings), default=0)
        self._pieces = list[str]()  # the text that ``take`` has not returned
        self._shown = list[str]()  # the text that it has returned
        self._cut: int | None = None  # where in the settled text the stop string begins
        self._held = ""  # what follows the settled text, known at the end
        self._ended = False

    def add(self, tokens: Sequence[int]) -> int | None:
        """Add new tokens, and search for the first stop string.

        If one token completes several stop strings, then the one that begins first counts, and of those that begin there
        the shortest.

        Returns:
          if there is a stop string, how many tokens to keep, counted from the first of this completion: those up to the
          one that completes the stop string. The rest is dropped. Else None.

        Raises:
          RuntimeError: the text has ended, with a stop string or with ``end``.
        """
        if self._ended:
            raise RuntimeError("this completion has ended and takes no more tokens: make one for each request")
        if not self._strings:
            self._waiting += tokens
            return None
        for token in tokens:
            self._searched += 1
            added = self._detokenizer.add([token])
            if not added:
                continue
            self._pieces.append(added)
            if stop := self._first(added):
                self._stop_at(*stop)
                return self._searched
        return None

    def take(self) -> str:
        """The text since the last ``take`` that no later token can change or cut off.

        An incomplete character and a possible beginning of a stop string are held back until the end. All returned texts,
        joined, are ``text`` at the end.
        """
        self._decode_waiting()
        text = "".join(self._pieces)
        end = len(text)
        if not self._ended:
            end = min((_may_begin(string, text) for string in self._strings), default=end)
        self._pieces = [text[end:]]
        self._shown.append(text[:end])
        return text[:end]

    @property
    def shown(self) -> str:
        """All that ``take`` has returned so far, joined."""
        return "".join(self._shown)

    def end(self):
        """End the text after the last token; an incomplete character becomes part of it.

        Does nothing after a stop string or a first call.
        """
        if self._ended:
            return
        self._decode_waiting()
        self._held = self._detokenizer.held
        self._pieces.append(self._held)
        self._ended = True

    @property
    def text(self) -> str:
        """The text so far, up to the stop string if there is one. Before the end it lacks an incomplete character, and a
        later stop string may cut it."""
        self._decode_waiting()
        return self._detokenizer.text[: self._cut] + self._held

    def _decode_waiting(self):
        if self._waiting:
            self._pieces.append(self._detokenizer.add(self._waiting))
            self._waiting = []

    def _first(self, added: str) -> tuple[int, str] | None:
        """Where the earliest stop string begins that ``added`` completes, and which string it is."""
        text, known = self._recent + added, len(self._recent)
        start = self._length - known
        self._length += len(added)
        self._recent = text[max(len(text) - self._longest + 1, 0) :]
        if self._searched <= self._min_tokens:
            return None
        places = [(text.find(string, max(known - len(string) + 1, 0)), string) for string in self._strings]
        return min(((start + place, string) for place, string in places if place >= 0), default=None)

    def _stop_at(self, start: int, string: str):
        """End the text with ``string``, which begins at ``start``. ``take`` has returned nothing from there on."""
        left, cut = "".join(self._pieces), start + (len(string) if self._include_stop else 0)
        self._pieces = [left[: len(left) - (self._length - cut)]]
        self.stop, self._cut, self._ended = string, cut, True


def _may_begin(string: str, text: str) -> int:
    """The start of the longest proper prefix of ``string`` that ``text`` ends with; the length of ``text`` if there is none.

    For ``aab`` after ``xaaa`` that is 2.
    """
    place = text.find(string[0], max(len(text) - len(string) + 1, 0))
    while place >= 0 and not string.startswith(text[place:]):
        place = text.find(string[0], place + 1)
    return place if place >= 0 else len(text)
