"""Log-probabilities in OpenAI's two formats, of chats and of completions, and in vLLM's, of token ids and of prompts."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jspec.outputs import Logprob
from jspec.text.detokenizer import Detokenizer

LEAST = -9999.0  # stands for the logarithm of 0 in JSON, as in OpenAI's API


Place = dict[int, Logprob]  # token id -> its log-probability, of the chosen token and of the likeliest


def chat_logprobs(
    token_ids: Sequence[int], places: Sequence[Place], top: int, token_bytes: Callable[[int, str], bytes]
) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat.

    Args:
      token_ids: the tokens.
      places: for each of them, the log-probabilities of itself and of the likeliest tokens there.
      top: number of likeliest tokens in the response.
      token_bytes: gives the bytes of a token, whose text is given as well.
    """

    def entry(token: int, known: Logprob) -> dict[str, Any]:
        text = _text(token, known)
        return {"token": text, "logprob": _finite(known.logprob), "bytes": list(token_bytes(token, text))}

    content = []
    for token, place in zip(token_ids, places, strict=True):
        likeliest = [entry(other, known) for other, known in _likeliest(place, top)]
        content.append({**entry(token, place[token]), "top_logprobs": likeliest})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    places: Sequence[Place | None],
    top: int,
    offsets: Sequence[int],
    decode: Callable[[int], str] | None = None,
) -> dict[str, Any]:
    """``choices[].logprobs`` of a completion.

    Args:
      token_ids: the tokens.
      places: for each of them, the same; None for the first token of a prompt, which has no log-probability.
      top: number of likeliest tokens in the response, beside the chosen one.
      offsets: for each of them, how many characters of the choice's text are before it; of ``TextOffsets``.
      decode: gives the text of a token without a place; by default that is ``token_id:7``, for example.
    """
    tokens, chosen, likeliest = [], [], []
    for token, place in zip(token_ids, places, strict=True):
        text = decode(token) if place is None and decode else _text(token, None if place is None else place[token])
        tokens.append(text)
        chosen.append(None if place is None else _finite(place[token].logprob))
        likeliest.append(None if place is None else _by_text(token, place, top))
    return {"text_offset": list(offsets), "token_logprobs": chosen, "tokens": tokens, "top_logprobs": likeliest}


class TextOffsets:
    """How many characters of a text are before each of its tokens, as they come.

    A character that is spread over tokens belongs to the last of them, and the others have its offset. Special tokens that
    the text leaves out have no length.

    Args:
      decode: makes the text of tokens; None if there is no tokenizer, and then a token counts as its ``token_id:7``.
      prompt: the tokens before those of the text.
      start: how many characters are before the first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None, prompt: Sequence[int] = (), start: int = 0):
        self._detokenizer = None if decode is None else Detokenizer(decode, prompt)
        self._length = start

    def add(self, tokens: Sequence[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            added = _text(token, None) if self._detokenizer is None else self._detokenizer.add([token])
            self._length += len(added)
        return offsets


def id_logprobs(token_ids: Sequence[int], places: Sequence[Place]) -> dict[str, Any]:
    """``choices[].logprobs`` of ``/inference/v1/generate``, with token ids in place of texts.

    As in vLLM, ``top_logprobs`` are the token itself, and then the likeliest. ``token_id`` and ``rank`` are fields of vLLM
    0.33; ``token`` is that of earlier ones, which the client of ``renderers`` 0.1.12 requires.
    """

    def entry(token: int, known: Logprob) -> dict[str, Any]:
        return {"token": _text(token, None), "token_id": token, "logprob": _finite(known.logprob), "rank": known.rank}

    content = []
    for token, place in zip(token_ids, places, strict=True):
        content.append({**entry(token, place[token]), "top_logprobs": [entry(*pair) for pair in place.items()]})
    return {"content": content}


def prompt_logprobs(places: Sequence[Place | None]) -> list[dict[str, Any] | None]:
    """vLLM's ``choices[].prompt_logprobs``."""
    return [
        None if place is None else {str(token): _known(known) for token, known in place.items()} for place in places
    ]


def _known(known: Logprob) -> dict[str, Any]:
    return {"logprob": _finite(known.logprob), "rank": known.rank, "decoded_token": known.decoded_token}


def _likeliest(place: Place, top: int) -> Iterator[tuple[int, Logprob]]:
    """The ``top`` likeliest tokens; the chosen one among them only if it is one of them."""
    ranked = sorted(place.items(), key=lambda pair: (pair[1].rank, -pair[1].logprob))
    yield from (pair for pair in ranked[:top] if pair[1].rank <= top)


def _by_text(token: int, place: Place, top: int) -> dict[str, float]:
    """Log-probabilities by text; of tokens with the same text, the likeliest counts."""
    by_text: dict[str, float] = {}
    for other, known in [*_likeliest(place, top), (token, place[token])]:
        text, value = _text(other, known), _finite(known.logprob)
        by_text[text] = max(value, by_text.get(text, LEAST))
    return by_text


def _text(token: int, known: Logprob | None) -> str:
    return f"token_id:{token}" if known is None or known.decoded_token is None else known.decoded_token


def _finite(value: float) -> float:
    """The value, or ``LEAST`` for minus infinity, which JSON lacks, and for the NaN of broken logits."""
    return float(value) if value > LEAST else LEAST
