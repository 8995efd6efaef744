"""Finds the markers that are single tokens in the text of a completion."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jspec.text.detokenizer import REPLACEMENT, Detokenizer

FIRST, LAST = "\ud800", "\udfff"  # surrogates, which no decoded text contains, stand for markers that are one token
SURROGATES = re.compile(f"[{FIRST}-{LAST}]")
# The character of each marker that is one token; and by its id, the text of a token and what stands for it: that or nothing.
Table = tuple[Mapping[str, str], Mapping[int, tuple[str, str]]]


@dataclasses.dataclass(frozen=True)
class MarkerTokens:
    """The tokens of a tokenizer that are markers, and how its tokens are decoded.

    Make one per tokenizer with ``of``, and one per completion from that with ``after``.

    Attributes:
      decode: makes text from tokens, with the text of special tokens.
      texts: the text of each added token, by its id. Tokenizers never split these texts, so text that only looks like
        one of them consists of other tokens.
      special: those of them that are special, whose text does not belong to content.
      prompt: the tokens before the completion, or the last dozens of them.
      tables: what ``table`` has made, kept for later completions.
    """

    decode: Callable[[Sequence[int]], str]
    texts: Mapping[int, str]
    special: frozenset[int]
    prompt: Sequence[int] = ()
    tables: dict[tuple, Table] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, tokenizer: Any, prompt: Sequence[int] = ()) -> "MarkerTokens":
        """Those of a tokenizer of transformers."""
        added = {int(i): token for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        texts = {i: str(getattr(token, "content", token)) for i, token in added.items()}
        special = {i for i, token in added.items() if getattr(token, "special", False)}
        special |= {i for i in getattr(tokenizer, "all_special_ids", ()) if i in texts}
        decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        return cls(decode, texts, frozenset(special), prompt)

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """The id of each added token, by its text."""
        return {text: id for id, text in self.texts.items()}

    def after(self, prompt: Sequence[int]) -> "MarkerTokens":
        """The same, for a completion of these tokens."""
        return dataclasses.replace(self, prompt=prompt)

    def table(self, markers: Iterable[str], kept: Iterable[str]) -> Table:
        """What stands for tokens in the lexer's text, where these are markers and these special tokens stay as text."""
        key = (tuple(markers), tuple(kept))
        if key not in self.tables:
            self.tables[key] = self._table(*key)
        return self.tables[key]

    def _table(self, markers: tuple[str, ...], kept: tuple[str, ...]) -> Table:
        added = set(self.texts.values())
        single = [marker for marker in dict.fromkeys(markers) if marker in added]
        characters = {marker: chr(ord(FIRST) + i) for i, marker in enumerate(single)}
        stands = dict[int, tuple[str, str]]()
        for token, text in self.texts.items():
            if text in characters:
                stands[token] = (text, characters[text])
            # ``｜DSML｜`` is one token, and a part of markers that are several
            elif text and token in self.special and text not in kept and not any(text in m for m in markers):
                stands[token] = (text, "")
        return characters, stands


class Lexer:
    """The text of a completion, in which each marker that is one token is one surrogate character.

    Searches for such a marker then find neither text that looks like it nor a part of it. Special tokens that are no
    markers are left out.

    Args:
      markers: those of the formats in use.
      kept: texts of special tokens that stay as text, though they are no markers: of formats that are not in use.
      tokens: what is known of the tokenizer. Without it no marker is a surrogate, and special tokens stay.
    """

    def __init__(self, markers: Iterable[str], kept: Iterable[str] = (), tokens: MarkerTokens | None = None):
        self._single, self._stands = ({}, {}) if tokens is None else tokens.table(markers, kept)
        self._texts = {character: marker for marker, character in self._single.items()}
        self._detokenizer = None if tokens is None else Detokenizer(tokens.decode, tokens.prompt)
        self._found = collections.deque[tuple[int, str, str]]()  # where such a token's text begins, and the above
        self._waiting, self._start = "", 0  # text that has not been given out yet, and where it begins
        self._tokens = list[int]()  # that have not been decoded yet
        self._known = 0  # characters of those before

    def spell(self, marker: str) -> str:
        """What to search for in the lexer's text, to find a marker or several in a row."""
        for text, character in self._single.items():
            marker = marker.replace(text, character)
        return marker

    def restore(self, text: str) -> str:
        """The model's text for a piece of the lexer's."""
        if text.isascii():
            return text
        return SURROGATES.sub(lambda found: self._texts.get(found[0], REPLACEMENT), text)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> str:
        """The next piece of the lexer's text. Tokens come with their text or before it, and wait for it."""
        if self._detokenizer is None:
            return _without_surrogates(text)
        self._tokens += token_ids
        if not self._stands.keys().isdisjoint(token_ids):
            self._decode(self._detokenizer)
        self._waiting += text
        return self._upto(self._start + len(self._waiting))

    def finish(self) -> tuple[str, str]:
        """The rest, after the last ``feed``, and the part of a marker that the text ends with."""
        rest = self._upto(self._start + len(self._waiting))
        part, self._waiting = _without_surrogates(self._waiting), ""
        return rest, part

    def _decode(self, detokenizer: Detokenizer):
        """Find the places of markers among the tokens that have not been decoded.

        Those without a marker behind them are not: decoding was the larger part of the time that a parser took."""
        waiting, tokens, self._tokens = list[int](), self._tokens, []
        for token in tokens:
            if token not in self._stands:
                waiting.append(token)
                continue
            self._known += len(detokenizer.add(waiting))
            waiting = []
            text, character = self._stands[token]
            added = detokenizer.add([token])
            place = added.rfind(text)
            if place >= 0:
                self._found.append((self._known + place, text, character))
            self._known += len(added)
        self._known += len(detokenizer.add(waiting))

    def _upto(self, end: int) -> str:
        """Takes the waiting text up to a place; a marker of which a part is missing waits on."""
        end, pieces, done = min(end, self._start + len(self._waiting)), list[str](), self._start
        while self._found and self._found[0][0] < end:
            place, text, character = self._found[0]
            if place + len(text) > end:
                end = place
                break
            self._found.popleft()
            if place < done:
                continue
            pieces += [_without_surrogates(self._waiting[done - self._start : place - self._start]), character]
            done = place + len(text)
        end = max(end, done)
        pieces.append(_without_surrogates(self._waiting[done - self._start : end - self._start]))
        self._waiting, self._start = self._waiting[end - self._start :], end
        return "".join(pieces)


def _without_surrogates(text: str) -> str:
    return text if text.isascii() else SURROGATES.sub(REPLACEMENT, text)
