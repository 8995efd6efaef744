"""Attributes each span of a streamed text to an accepted draft or to the target."""

import collections
import functools
from collections.abc import Iterable, Sequence

from jspec.outputs import TARGET, Delta
from jspec.text.detokenizer import Detokenizer, Tokenizer

Span = tuple[str, str]  # the text of a token, and its source, as in ``Result.sources``


class TokenSpans:
    """Splits the text of a streamed completion into the spans of its tokens.

    The tokens are decoded a second time, one by one, which gives the length of each span. The text itself is that of the
    deltas, which is held back where a stop string may begin. A character of several tokens belongs to the last of them.

    Args:
      tokenizer: the target's; without one, the spans are those of the list of token ids.
      prompt: the tokens before the completion.
      skip_special_tokens: whether special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], skip_special_tokens: bool = True):
        self._detokenizer = None
        if tokenizer is not None:
            decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
            self._detokenizer = Detokenizer(decode, prompt)
        self._lengths = collections.deque[tuple[int, str]]()  # (characters, source) of tokens whose text is still due
        self._source = TARGET  # of the newest token
        self._begun = False

    def of(self, delta: Delta) -> list[Span]:
        """The spans of the next delta's text."""
        tokens = zip(delta.token_ids, delta.sources, strict=True)
        if self._detokenizer is None or delta.text is None:
            return self._of_ids(tokens, delta.finished)
        for token, self._source in tokens:
            if added := self._detokenizer.add([token]):
                self._lengths.append((len(added), self._source))
        spans, start = list[Span](), 0
        while start < len(delta.text):
            room = len(delta.text) - start
            length, source = self._lengths.popleft() if self._lengths else (room, self._source)
            if length > room:
                self._lengths.appendleft((length - room, source))
            spans.append((delta.text[start : start + length], source))
            start += length
        return spans

    def _of_ids(self, tokens: Iterable[tuple[int, str]], finished: bool) -> list[Span]:
        spans = list[Span]()
        for token, source in tokens:
            spans.append((f"{', ' if self._begun else '['}{token}", source))
            self._begun = True
        return [*spans, ("]" if self._begun else "[]", TARGET)] if finished else spans
