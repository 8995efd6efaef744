"""``contradiction``: options of a request that together leave none of the tokens that may come next."""

from collections.abc import Sequence

import numpy as np

from jspec.engine.request import Request
from jspec.sampling.params import SamplingParams
from jspec.sampling.processors import num_words

FORMS = ("structured_outputs", "thinking_budget")  # of which ``Request.constraint`` is made
_SHOWN, _LONG = 8, 100  # tokens that a message proposes, and characters of a value in it


class NoTokenAllowed(ValueError):
    """Options of a request together allow no token at a place of its completion."""


def restrictions(params: SamplingParams) -> list[str]:
    """The options of a request that take tokens out, and may leave none of them."""
    names = (*FORMS, "allowed_token_ids", "bad_words")
    given = [name for name in names if getattr(params, name)]
    return [*given, "min_tokens"] if given and params.min_tokens else given


def contradiction(request: Request, completion: Sequence[int], vocab_size: int) -> NoTokenAllowed | None:
    """The error of options that together allow no token behind ``completion``; None if some token may come.

    Its message begins with the option that a caller would change, and its value: a form is the last one to be named.

    Args:
      request: the request, whose constraint has seen all of ``completion``.
      completion: the tokens of the completion so far.
      vocab_size: V of the target.
    """
    allowed = _allowed(request, completion, vocab_size)
    if not allowed or np.logical_and.reduce(list(allowed.values())).any():
        return None
    for name in list(allowed):  # those that leave none without this one need not be changed
        others = [flags for other, flags in allowed.items() if other != name]
        if others and not np.logical_and.reduce(others).any():
            del allowed[name]
    names = [name for group in allowed for name in group]
    *_, changed = names
    others = [flags for group, flags in allowed.items() if changed not in group]
    allow = "together allow" if len(names) > 1 else "allows"
    return NoTokenAllowed(
        f"{changed}={_value(request.params, changed)}: expected a value that allows a token at place {len(completion)} of "
        f"the completion, where {' and '.join(names)} {allow} no token; {_fix(changed, others)}"
    )


def _allowed(request: Request, completion: Sequence[int], vocab_size: int) -> dict[tuple[str, ...], np.ndarray]:
    """What each option allows behind ``completion``: names of options -> bool ``[V]``."""
    params, allowed = request.params, {}
    if request.constraint is not None:
        words = np.full((1, num_words(vocab_size)), ~np.uint32(0))
        request.constraint.allow((), words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size]
        allowed[tuple(name for name in FORMS if getattr(params, name)) or FORMS[:1]] = bits.astype(bool)
    if params.allowed_token_ids is not None:
        allowed[("allowed_token_ids",)] = _only(params.allowed_token_ids, vocab_size)
    count = len(completion)
    bad = [word[-1] for word in request.bad_words if tuple(completion[max(count - len(word) + 1, 0) :]) == word[:-1]]
    if bad:
        allowed[("bad_words",)] = ~_only(bad, vocab_size)
    if count < params.min_tokens and request.stop_tokens:
        allowed[("min_tokens",)] = ~_only(request.stop_tokens, vocab_size)
    return allowed


def _only(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    flags = np.zeros(vocab_size, bool)
    flags[list(tokens)] = True
    return flags


def _value(params: SamplingParams, name: str) -> str:
    """The value of an option, which is cut off if it is long."""
    value = getattr(params, name)
    text = repr(list(value[:_LONG]) if isinstance(value, tuple) else value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."


def _fix(changed: str, others: Sequence[np.ndarray]) -> str:
    if not others:
        return f"change {changed}"
    tokens = np.flatnonzero(np.logical_and.reduce(list(others)))
    if changed == "allowed_token_ids":
        return f"add {_tokens(tokens)}, which the others allow there, or leave one of them out"
    return f"the others allow {_tokens(tokens)} there; change {changed}, or leave one of them out"


def _tokens(tokens: np.ndarray) -> str:
    shown = ", ".join(map(str, tokens[:_SHOWN].tolist()))
    return f"token {shown}" if len(tokens) == 1 else f"one of tokens {shown}{', ...' if len(tokens) > _SHOWN else ''}"
