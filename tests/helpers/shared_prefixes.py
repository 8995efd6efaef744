"""Prompts that share beginnings, and how much of each the engine should find of those before it."""

import itertools
import math

import numpy as np
from engines import V, ragged_prompts
from requests_and_engines import P

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
