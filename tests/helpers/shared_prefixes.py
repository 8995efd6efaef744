"""Prompts that share beginnings, how much of each the engine should find of those before it, and what cached pages hold."""

import itertools
import math

import jax
import numpy as np
from disturbances import preempting, serve
from engines import V, ragged_prompts, requests_of
from requests_and_engines import P

from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.runner.saved import pools
from jspec.sampling.params import SamplingParams

TEXT = ragged_prompts((15,), seed=5)[0]


def sharing(text: list[int]) -> list[list[int]]:
    """Prompts that have 0 .. 13 tokens in common with ``text``, and up to five of their own.

    The second one differs from ``text`` in its first token alone, and the third one begins in the middle of it.
    """
    rng, prompts = np.random.default_rng(6), [text, [text[0] - 1, *text[1:]], text[P:]]
    for common, own in itertools.product(range(1, 15), (0, 1, 2, 4)):
        other = (text[common - 1] + rng.integers(1, V)) % V
        prompts.append(
            [
                *text[: common - 1],
                text[common - 1] if own == 0 else int(other),
                *rng.integers(V, size=max(own - 1, 0)).tolist(),
            ]
        )
    return prompts


def cached_tokens(prompts: list[list[int]], page: int, chunk: int, ahead: bool, every: int | None = None) -> list[int]:
    """How many tokens of each prompt the engine should find of those before it.

    Pages are shared up to two slots before the end of the shorter prompt. A head that is fed features needs the token
    after a page to agree as well. With ``every``, recurrent states are needed too, of which there are snapshots behind
    multiples of so many tokens, and at the last place of a prompt where chunks and pages end.
    """
    counts, step = [], math.lcm(page, chunk)
    for n, prompt in enumerate(prompts):
        most = 0
        for other in prompts[:n]:
            common = (min(len(prompt), len(other)) - 2) // page * page
            while common > 0 and prompt[: common + ahead] != other[: common + ahead]:
                common -= page
            places = range(0, max(common, 0) + 1, step)
            if every is not None:
                last = (len(other) - 2) // step * step
                places = [place for place in places if place % every == 0 or place == last]
            most = max(most, *places)
        counts.append(most)
    return counts


def check_found(engine: Engine, actives: list[ActiveRequest]):
    """They came one after another, and no page was evicted meanwhile."""
    prompts = [list(active.request.prompt) for active in actives]
    config = engine.config
    found = cached_tokens(prompts, config.page_size, config.chunk, engine.runner.looks_ahead, config.snapshot_every)
    assert [active.num_cached_tokens for active in actives] == found


def sharing_requests(max_tokens: int = 8) -> list[Request]:
    params = [SamplingParams(temperature=t, max_tokens=max_tokens) for t in (1.0, 0.7, 1.4)]
    prompts = sharing(TEXT)
    return requests_of(prompts, [params[i % 3] for i in range(len(prompts))])


class Contents:
    """What every page of the prefix cache has ever held, by its key, and the keys that have stood for different bits."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._seen: dict[bytes, list[bytes]] = {}
        self.changed: set[bytes] = set()
        self.looks = 0

    def look(self):
        state, index = self._engine.runner.batch.state, self._engine.scheduler.pages._index
        arrays = [np.asarray(pool) for pool in jax.tree.leaves(pools((state.cache, state.draft)))]
        for key, page in index._pages.items():
            bits = [pool[:, page].tobytes() for pool in arrays]
            if self._seen.setdefault(key, bits) != bits:
                self.changed.add(key)
            self.looks += 1


def changed_contents(engine: Engine, requests) -> set[bytes]:
    """Pages of the cache that have changed, or that somebody else wrote otherwise, by their keys."""
    contents = Contents(engine)
    for at_a_time in (3, 1):
        engine.scheduler.pages.forget_prefixes()
        order = np.random.default_rng(at_a_time).permutation(len(requests))
        with preempting(engine):
            serve(engine, [requests[i] for i in order], at_a_time, after_step=contents.look)
    engine.scheduler.pages.forget_prefixes()
    assert contents.looks > 100
    return contents.changed
