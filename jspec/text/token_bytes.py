"""The bytes that a single token stands for, also where they are only a part of a character."""

import functools
import json
import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "▁"  # of SentencePiece


class TokenBytes:
    """The bytes of tokens by their pieces in the vocabulary.

    Tokens of byte-level vocabularies (GPT-2, Llama 3, Qwen) may hold a part of a character, as may the byte tokens of
    SentencePiece (``<0xE2>``). Decoded by itself, such a token gives U+FFFD.

    Args:
      tokenizer: of transformers, or None.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)
        self._added = set(getattr(tokenizer, "added_tokens_decoder", ()))

    def __call__(self, token: int, text: str) -> bytes:
        """The bytes of a token.

        Args:
          token: its id.
          text: the token decoded by itself, whose bytes these are if it holds complete characters.
        """
        piece = self._piece(token)
        if piece is not None and "ByteLevel" in self._kinds:
            return bytes(_byte_of()[letter] for letter in piece) if set(piece) <= _byte_of().keys() else piece.encode()
        if piece is not None and "ByteFallback" in self._kinds:
            if byte := _BYTE_TOKEN.fullmatch(piece):
                return bytes.fromhex(byte[1])
            return piece.replace(_BLANK, " ").encode()
        return text.encode("utf-8", "replace")

    def _piece(self, token: int) -> str | None:
        if not self._kinds or token in self._added:  # added tokens are plain text
            return None
        return self._tokenizer.convert_ids_to_tokens(token)


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """The types of the decoders of a fast tokenizer, ``ByteLevel`` for example."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    return {part["type"] for part in (state, *state.get("decoders", ())) if "type" in part}


@functools.cache
def _byte_of() -> dict[str, int]:
    """GPT-2's letter of each byte: itself where it can be printed, else one of the letters from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
