"""Texts that the engine serves as its users get them, while everything happens that may happen around a request.

Where ``steps.py`` runs a decode step over full batches, here requests arrive in crowds of all sizes, find prompts in the
prefix cache, are preempted, and have neighbours that are aborted.
"""

import contextlib
from collections.abc import Sequence

import numpy as np
from disturbances import calls_of_any_length, preempting, serve

from jspec.config import EngineConfig
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request
from lossless.distributions import Grammar, Warp
from lossless.rounds import deal
from lossless.steps import Ask, K, N, Program, Tally, tally

SLOTS = 13


class Automaton:
    """The constraint of one request whose grammar is a ``Grammar``."""

    def __init__(self, grammar: Grammar):
        self._grammar, self._completion = grammar, ()

    def jump_forward(self, most: int) -> Sequence[int]:
        return self._grammar.jump_forward_after(self._completion, most)

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        text = self._completion
        for place, draft in enumerate([*drafts, None]):
            following = self._grammar.following[self._grammar.state(text)]
            flags[place] = sum(1 << v for v, state in enumerate(following) if state >= 0)
            if draft is None or following[draft] < 0:
                return
            text += (draft,)

    def add(self, tokens: Sequence[int]) -> int | None:
        self._completion += tuple(tokens)
        self._grammar.state(self._completion)


CROWDS = (2, 17, 60, 100, 100)  # requests that are unfinished at a time
ASKS = (  # up to four tokens of the longest prompts are found in the cache, two if the third page differs
    Ask((1,), Warp()),
    Ask((2, 0, 1, 3, 1, 0, 2), Warp(1.3, top_k=3)),  # to the last slot of the cache
    Ask((2, 0, 1, 3, 2, 1), Warp(0.6, top_p=0.9, min_p=0.05), stop_tokens=(2,), min_tokens=2),
    Ask((2, 0, 3, 3, 1, 0, 2), Warp(0.8)),
    Ask((0, 2, 1, 3), Warp(0.0), share=1),
)


def config(reproducible: bool) -> EngineConfig:
    """One decode program for 64 rows, or four for 1 to 64; pages and segments of two tokens."""
    return EngineConfig(
        max_batch=64,
        max_len=SLOTS,
        page_size=2,
        prefill_chunk=2,
        prefill_tokens=128,
        rounds=4,
        reproducible=reproducible,
        read_ahead=4,  # few, because those that decode are to be preempted, and not those that wait for them
    )


def engine(program: Program, tables, reproducible: bool) -> Engine:
    """An engine of table models; ``program.slots`` is ``SLOTS``."""
    target, draft = program.models(tables)

    def make(target, model, drafts: int = K):
        return program.drafter(target, model, drafts)

    drafts = draft if program.method == "draft_model" else None
    return Engine(target, drafts, Decoding(make, program.verify), config(reproducible))


def play(serving: Engine, samples: int, seed: int, asks: Sequence[Ask] = ASKS) -> list[Tally]:
    """Serve at least ``samples`` texts, as many of every ask as its share says, under all disturbances."""
    which, _ = deal(asks, 8 * len(asks))
    rng, kinds, actives = np.random.default_rng(seed), [], []

    def request(i: int, ask: Ask, **fields) -> Request:
        key_data = rng.integers(2**32, size=2, dtype=np.uint32)
        if ask.options.grammar is not None:
            own = getattr(ask.options.grammar, "constraint", None)  # the engine's, of which the grammar is the oracle
            fields["constraint"] = own() if own else Automaton(ask.options.grammar)
        return Request(i, ask.prompt, ask.params, key_data, ask.stop_tokens, bad_words=ask.options.bad_words, **fields)

    def neighbour(i: int) -> Request:
        return request(i, asks[i % len(asks)], priority=-1)

    with contextlib.ExitStack() as stack:
        stack.enter_context(preempting(serving, share=0.1))
        stack.enter_context(calls_of_any_length(serving, seed))
        while len(actives) < samples:
            crowd = int(rng.choice(CROWDS))
            some = rng.choice(which, size=6 * crowd)
            kinds += some.tolist()
            requests = [request(i, asks[kind]) for i, kind in enumerate(some)]
            actives += serve(serving, requests, crowd, neighbour, seed=seed + len(actives))
    return tally(asks, np.array(kinds), *_columns(actives))


def _columns(actives: Sequence[ActiveRequest]) -> tuple[np.ndarray, ...]:
    """Tokens, length, and of every round count, drafted and accepted, as ``steps.tally`` takes them."""
    tokens, length = np.zeros((len(actives), SLOTS), int), np.zeros(len(actives), int)
    count, drafted, accepted = np.zeros((len(actives), N), int), *np.full((2, len(actives), N), -1)
    for i, active in enumerate(actives):
        text = [*active.request.prompt, *active.tokens]
        tokens[i, : len(text)], length[i] = text, len(text)
        rounds = len(active.accepted)
        drafted[i, :rounds], accepted[i, :rounds] = active.drafted, active.accepted
        emitted = np.minimum(np.cumsum(np.array(active.accepted) + 1), len(active.tokens))
        count[i, :rounds] = np.diff(emitted, prepend=0)
    return tokens, length, count, drafted, accepted
