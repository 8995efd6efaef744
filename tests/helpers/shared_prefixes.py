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


def cached_tokens(prompts: list[list[int]], page: int, chunk: int, ahead: bool) -> list[int]:
    """How many tokens of each prompt the engine should find of those before it.

    Pages are shared up to two slots before the end of the shorter prompt. A head that is fed features needs the token
    after a page to agree as well.
    """
    counts = []
    for n, prompt in enumerate(prompts):
        most = 0
        for other in prompts[:n]:
            common = math.floor((min(len(prompt), len(other)) - 2) / page)
            while common > 0 and prompt[: common * page + ahead] != other[: common * page + ahead]:
                common -= 1
            most = max(most, common * page)
        counts.append(most - most % math.lcm(page, chunk))
    return counts
