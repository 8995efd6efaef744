"""The tokenizer's interface, encoding within a limit of tokens, and the incremental decoding of a completion."""

from collections.abc import Callable, Sequence
from typing import Protocol

from jspec._validation import require_characters

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for bytes that are no complete character in decoded text
CONTEXT = 6  # how many tokens before the new ones are decoded with them; vLLM's number
MAX_SETTLED = 16  # how many settled tokens are kept as context, before they are cut to CONTEXT
COUNTED_CONTEXTS = 4  # texts of up to so many contexts are encoded, so that an error can say how long they are
FIRST_PART = 8  # characters per usable token in the part of a long text that is encoded first
CUT_TOKENS = 64  # most tokens that cutting a text within a word adds to the part
MAX_HELD = 16  # how many tokens may be held back; a character has at most four bytes, so more never become one


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that jspec uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...


def encode(tokenizer: Tokenizer, text: str, what: str, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of ``text``, with the tokenizer's special tokens unless ``add_special_tokens`` is False.

    Raises:
      ValueError: the tokenizer fails, perhaps because of a letter that is no character; ``what`` names the text in the
        message.
    """
    try:
        return tokenizer.encode(text) if add_special_tokens else tokenizer.encode(text, add_special_tokens=False)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # of many kinds; a panic of the Rust code in tokenizers is no Exception
        require_characters(what, text)
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{what} cannot be encoded by the checkpoint's tokenizer ({type(error).__name__}: {reason}); fetch the "
            "tokenizer files again, or pass token ids"
        ) from None


class TooLong(ValueError):
    """A text is several times longer than the model's context."""


def encode_within(
    tokenizer: Tokenizer, text: str, what: str, most: int, *, last: bool = False, add_special_tokens: bool = True
) -> list[int] | None:
    """The tokens of a text with at most ``most`` of them, at a cost that is bounded for longer texts.

    A long text is encoded in parts, each four times as long as the one before, until a part has too many tokens or is
    complete.

    Args:
      tokenizer, text, what, add_special_tokens: as for ``encode``.
      most: how many tokens the caller can use.
      last: return the last tokens of a text that has more, at least ``most``, in place of None. They begin with other
        tokens than the whole text's at that place where a run without a space is longer than the part.

    Returns:
      the tokens; None if there are more than ``most``.

    Raises:
      ValueError: as for ``encode``.
    """
    enough, size = most + CUT_TOKENS, FIRST_PART * (most + CUT_TOKENS)
    while size < len(text):
        part = text[-size:] if last else text[:size]
        tokens = encode(tokenizer, part, what, add_special_tokens=add_special_tokens)
        if len(tokens) > enough:
            return tokens if last else None
        size *= 4
    tokens = encode(tokenizer, text, what, add_special_tokens=add_special_tokens)
    return tokens if last or len(tokens) <= most else None


def kept_tokens(truncate_prompt_tokens: int, max_len: int) -> int:
    """The most tokens of a prompt after ``SamplingParams.truncate_prompt_tokens``, in a context of ``max_len``."""
    return max_len if truncate_prompt_tokens == -1 else min(truncate_prompt_tokens, max_len)


class Detokenizer:
    """Incremental decoding: the text of a completion as its tokens come.

    The prompt's text followed by ``text`` is what the tokens of both decode to as a whole. New tokens cannot be decoded
    by themselves, for three reasons. Decoders of the Llama-2 kind drop the first space of what they are given. Decoders
    of the BERT kind put a space before every word but the first. And a character of several bytes may be spread over
    several tokens. So new tokens are decoded together with a few tokens before them, whose text is then taken off.

    Text that ends in U+FFFD is held back until later tokens complete the character, or show that it never will be one.
    Each token costs a decode of a few tokens, however long the completion is, as in vLLM and
    ``tokenizers.DecodeStream``.

    Args:
      decode: makes text from tokens. Special tokens may have a text or none.
      prompt: the tokens before the completion. If they end within a character, that character belongs to the
        completion's text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode, self._pieces = decode, list[str]()
        # ``_window`` is the last few tokens. The text of the first ``_settled`` of them is ``_before``, which is part of
        # ``text`` or of the prompt; the text of the others is held back.
        self._window, self._before = self._context(prompt)
        self._settled = len(self._window)

    @property
    def text(self) -> str:
        """The text so far that later tokens cannot change, only extend."""
        return "".join(self._pieces)

    @property
    def held(self) -> str:
        """The rest of the text if no more tokens come: empty, or U+FFFD for an incomplete character."""
        return self._added(self._window, self._decode(self._window)) if len(self._window) > self._settled else ""

    def add(self, tokens: Sequence[int]) -> str:
        """Add new tokens; returns the text that they settle, which may be empty."""
        added = self._add_at_once(tokens) if len(tokens) > 1 else None
        if added is None:
            added = "".join([self._add_one(token) for token in tokens])
        if added:
            self._pieces.append(added)
        return added

    def _add_at_once(self, tokens: Sequence[int]) -> str | None:
        """The text that the tokens settle, with one decode; None, without any change, if some may have to be held back."""
        window = [*self._window, *tokens]
        text = self._decode(window)
        if REPLACEMENT in text or not (added := self._added(window, text)):
            return None
        self._settle(window, text)
        return added

    def _add_one(self, token: int) -> str:
        self._window.append(token)
        text, crowded = self._decode(self._window), len(self._window) - self._settled > MAX_HELD
        if text.endswith(REPLACEMENT) and not crowded:
            return ""
        added = self._added(self._window, text)
        if added:
            self._settle(self._window, text)
        elif crowded:  # so many tokens without text, special tokens for example, do not affect the text of later ones
            del self._window[self._settled :]
        return added

    def _added(self, window: list[int], text: str) -> str:
        """The part of ``text``, the decoded ``window``, that comes after ``_before``."""
        if text.startswith(self._before):
            return text[len(self._before) :]
        same = next(
            (i for i, pair in enumerate(zip(self._before, text, strict=False)) if len(set(pair)) > 1), len(text)
        )
        if self._before[same:].strip(REPLACEMENT) == "":  # the prompt ended within a character, now complete
            return text[same:]
        # Decoders of the Llama-2 kind turn a run of byte tokens into U+FFFD throughout if one byte is bad. That run may
        # hold good characters whose text is settled already, and settled text stays.
        return self._decode(window[self._settled :])

    def _settle(self, window: list[int], text: str):
        if len(window) > MAX_SETTLED:
            window, text = self._context(window)
        if len(window) > MAX_SETTLED and text.startswith(REPLACEMENT):  # bytes that are no characters, all of them
            window = window[-CONTEXT:]
            text = self._decode(window)
        self._window, self._before, self._settled = window, text, len(window)

    def _context(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """The last few tokens, after which later tokens decode as they do after all of them, and their text.

        They begin at the start of a character and have a text that is not empty.
        """
        size = CONTEXT
        while True:
            window = list(tokens[-size:])
            text = self._decode(window) if window else ""
            if len(window) == len(tokens) or (text and not text.startswith(REPLACEMENT)):
                return window, text
            size *= 4
