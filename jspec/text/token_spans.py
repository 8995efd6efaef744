"""Whose text is whose: a growing completion in pieces, by where its tokens come from."""

import collections
import functools
from collections.abc import Iterable, Sequence

from jspec.outputs import TARGET, Delta
from jspec.text.detokenizer import Detokenizer, Tokenizer

Piece = tuple[str, str]  # some text, and where its token comes from, as ``Result.sources`` says


class TokenPieces:
    """Cuts the text of a growing completion into that of its tokens.

    The tokens are decoded once more, one at a time, which tells how much text each of them settles. The text itself is that
    of the deltas, which is held back before what may be a stop string. A character that is spread over several tokens goes
    with the last of them.

    Args:
      tokenizer: the target's; without one, the pieces are those of the list of token ids.
      prompt: the tokens before the completion.
      skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], skip_special_tokens: bool = True):
        self._detokenizer = None
        if tokenizer is not None:
            decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
            self._detokenizer = Detokenizer(decode, prompt)
        self._lengths = collections.deque[tuple[int, str]]()  # of text that was not given out yet, token by token
        self._source = TARGET  # of the newest token
        self._begun = False

    def of(self, delta: Delta) -> list[Piece]:
        """The text of the next delta in pieces."""
        tokens = zip(delta.token_ids, delta.sources, strict=True)
        if self._detokenizer is None or delta.text is None:
            return self._of_ids(tokens, delta.finished)
        for token, self._source in tokens:
            if added := self._detokenizer.add([token]):
                self._lengths.append((len(added), self._source))
        pieces, start = list[Piece](), 0
        while start < len(delta.text):
            room = len(delta.text) - start
            length, source = self._lengths.popleft() if self._lengths else (room, self._source)
            if length > room:
                self._lengths.appendleft((length - room, source))
            pieces.append((delta.text[start : start + length], source))
            start += length
        return pieces

    def _of_ids(self, tokens: Iterable[tuple[int, str]], finished: bool) -> list[Piece]:
        pieces = list[Piece]()
        for token, source in tokens:
            pieces.append((f"{', ' if self._begun else '['}{token}", source))
            self._begun = True
        return [*pieces, ("]" if self._begun else "[]", TARGET)] if finished else pieces
