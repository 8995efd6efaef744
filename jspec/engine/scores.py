"""``scores``: the log-probabilities of given completions.

Where a token has the same bits in any pass, the target reads prompt and completion at once. Elsewhere the prompt is
prefilled and rounds write the completion down, as they do when they sample it: under a constraint that lets nothing else
come, with its tokens as drafts. So its numbers come about in the order in which those of sampling did.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jspec._validation import require
from jspec.engine.engine import Engine
from jspec.engine.frontend import chosen_logprobs, prompt_lines
from jspec.engine.request import ActiveRequest, Request
from jspec.sampling.params import SamplingParams
from jspec.text.prompts import Prompt

_RAW = "raw_logprobs"
_READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
_REPLAYED = SamplingParams(temperature=0, logprobs=0, logprobs_mode=_RAW, ignore_eos=True, detokenize=False)
_NO_KEY = np.zeros(2, np.uint32)  # where one token may come, no noise decides


class GivenText:
    """Lets a given text come and nothing else; an ``engine.request.Constraint``.

    Args:
      tokens: the text, which the request's limit ends.
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens, self._count = list(tokens), 0

    def jump_forward(self, most: int) -> list[int]:
        """The next tokens, at most ``most``."""
        return self._tokens[self._count : self._count + most]

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        """Leave the flag of the next token at each position up to the first draft that is another one."""
        following = self._tokens[self._count : self._count + len(drafts) + 1]
        for place, token in enumerate(following):
            flags[place] = 0
            flags[place, token // 32] = np.uint32(1) << np.uint32(token % 32)
            if [*drafts[place : place + 1]] != [token]:
                return

    def add(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the completion."""
        self._count += len(tokens)


def scores(
    engine: Engine,
    prompts: Sequence[Prompt],
    completions: Sequence[Any],
    params: Iterable[SamplingParams],
    recurrent: bool,
) -> list[np.ndarray]:
    """The log-probability of each token of completions, each behind its prompt.

    Args:
      engine: serves all pairs together, beside requests of other callers.
      prompts, completions: as many of both; text or token ids.
      params: the settings of each pair; those without a ``logprobs_mode`` have the engine's.
      recurrent: whether the target has recurrent states.

    Returns:
      float32 ``[n]`` for each completion of n tokens.

    Raises:
      ValueError: a pair cannot be scored. Only a token that its settings take out is noticed after others have run.
    """
    reads = _reads(engine, recurrent)
    texts = [
        engine.frontend.tokens(f"completion {i}", completion, add_special_tokens=False)
        for i, completion in enumerate(completions)
    ]
    pairs = zip(prompts, texts, params, strict=True)
    every = [_request(engine, i, *pair, reads=reads) for i, pair in enumerate(pairs)]
    found: list[np.ndarray] = [np.zeros(0, np.float32) for _ in texts]
    ended = engine.run([request for request, text in zip(every, texts, strict=True) if text])
    try:
        for active in ended:
            i = active.request.index
            found[i] = _numbers(active, texts[i])
    finally:
        ended.close()  # also while a traceback keeps this frame alive
    return found


def _reads(engine: Engine, recurrent: bool) -> bool:
    """Whether a completion may be read as part of a prompt, whose log-probabilities are the target's own.

    Where shapes are pinned, prefill and rounds are programs of different shapes; and recurrent states are added to in chunks
    by the one and token by token by the other.
    """
    config = engine.config
    return (config.one_order and not recurrent) or not config.reproducible


def _request(engine: Engine, i: int, prompt: Prompt, text: list[int], params: SamplingParams, reads: bool) -> Request:
    """The request for the scores of text behind prompt i."""
    raw = (params.logprobs_mode or engine.config.logprobs_mode) == _RAW
    settings = _settings(i, len(text), params, raw)
    request, most = engine.frontend.request(i, prompt, settings, _NO_KEY), engine.config.max_len
    room = most - len(request.prompt)
    if len(text) > room:
        raise ValueError(
            f"completion {i} has {len(text)} tokens behind a prompt of {len(request.prompt)}: expected at most {room}, as "
            f"max_len={most} counts both; load with a larger max_len"
        )
    if reads and raw and len(text) < room:  # a prompt needs room for one token more
        return dataclasses.replace(request, prompt=[*request.prompt, *text], params=_READ)
    return dataclasses.replace(request, constraint=GivenText(text), replays=True)


def _settings(i: int, count: int, params: SamplingParams, raw: bool) -> SamplingParams:
    """Those under which rounds write a text of so many tokens down, whatever ended it when it was sampled."""
    most, cut = max(count, 1), params.truncate_prompt_tokens
    if raw:
        return dataclasses.replace(_REPLAYED, max_tokens=most, truncate_prompt_tokens=cut)
    for name in ("structured_outputs", "thinking_budget"):
        value = getattr(params, name)
        require(value is None, f"completion {i}: {name}", value, "None: scores are of texts without such constraints")
    # Before ``min_tokens`` stop tokens are taken out. Else they are tokens like others.
    least = min(params.min_tokens, most)
    stops: dict[str, Any] = {} if least else {"ignore_eos": True, "stop_token_ids": ()}
    return dataclasses.replace(
        params,
        n=1,
        max_tokens=most,
        min_tokens=least,
        stop=(),
        logprobs=0,
        prompt_logprobs=None,
        detokenize=False,
        **stops,
    )


def _numbers(active: ActiveRequest, text: list[int]) -> np.ndarray:
    """The scores that a request has found, float32 ``[n]``."""
    i, count = active.request.index, len(active.tokens)
    if active.request.replays and count < len(text):
        raise ValueError(
            f"completion {i} has token {text[count]} at place {count}: expected one that may come there by its settings, "
            "and finite logits of the target"
        )
    lines = active.logprobs if active.request.replays else (prompt_lines(active) or [])[-len(text) :]
    assert len(lines) == len(text)
    return chosen_logprobs(lines)
