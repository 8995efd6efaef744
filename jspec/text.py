"""Between text and tokens: what is asked of a tokenizer, and stop strings."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that jspec uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


def encode(tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    """The tokens of ``text``.

    Raises:
      ValueError: the tokenizer fails; ``what`` says in the message which text that was.
    """
    try:
        return tokenizer.encode(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # of many kinds; a panic of the Rust code in tokenizers is no Exception
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} cannot be encoded by the checkpoint's tokenizer ({type(error).__name__}: {reason}); fetch the "
            "tokenizer files again, or pass token ids"
        ) from None


class Stop(NamedTuple):
    """The completion ends: keep ``tokens`` new tokens, whose text is cut to ``text`` before the stop string
    ``string``."""

    tokens: int
    text: str
    string: str


class StopStrings:
    """Finds the first stop string in a growing completion.

    Args:
      decode: new tokens -> their text.
      strings: what to stop at.
      min_tokens: a stop string that is complete within the first min_tokens tokens does not count.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], strings: Sequence[str], min_tokens: int):
        self._decode, self._strings, self._min_tokens = decode, strings, min_tokens

    def find(self, tokens: Sequence[int], seen: int) -> Stop | None:
        """The stop in these new tokens, of which the first ``seen`` are known to hold none."""
        if len(tokens) <= self._min_tokens or self._first(tokens) is None:
            return None
        for n in range(max(seen, self._min_tokens) + 1, len(tokens) + 1):
            found = self._first(tokens[:n])
            if found is not None:
                start, string = found
                return Stop(n, self._decode(tokens[:n])[:start], string)
        return None

    def _first(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Where the earliest stop string begins that ends after the first min_tokens tokens, and which it is."""
        text = self._decode(tokens)
        settled = len(self._decode(tokens[: self._min_tokens])) if self._min_tokens else 0
        starts = [(text.find(string, max(settled - len(string) + 1, 0)), string) for string in self._strings]
        return min((found for found in starts if found[0] >= 0), default=None)
