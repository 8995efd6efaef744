"""Prompt lookup in a few lines of Python."""

import jax.numpy as jnp
import numpy as np

from jspec.drafting.base import Context
from jspec.sampling.distribution import Warp
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise

B, S, K = 8, 32, 6


def lookup(text: list[int], shortest: int, longest: int, many: int = K) -> list[int] | None:
    """So many tokens that continue ``text`` as the last earlier occurrence of its longest suffix was continued, or None."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the match is text[end - n : end], the most recent first
            if text[end - n : end] == text[len(text) - n :]:
                continued = list(text)
                for i in range(many):
                    continued.append(continued[end + i])
                return continued[len(text) :]
    return None


def drafts_of(propose, texts, room: int) -> list[list[int]]:
    """What ``propose(tokens, length, room)`` drafts for each text. Past its end stand random tokens, which do not matter."""
    tokens = np.random.default_rng(9).integers(3, size=(B, S)).astype(np.int32)
    for row, text in zip(tokens, texts, strict=False):
        row[: len(text)] = text
    length = np.array([*map(len, texts), *[1] * (B - len(texts))], np.int32)
    proposal = propose(tokens, length, jnp.full(B, room, jnp.int32))
    assert proposal.distribution is None
    assert np.all(proposal.point_mass)
    return [proposal.tokens[i, : proposal.count[i]].tolist() for i in range(len(texts))]


def lookup_context(tokens, length, room) -> Context:
    """What a drafter that looks drafts up reads: int32 tokens ``[B, S]``, length and room ``[B]``."""
    B = tokens.shape[0]
    one = jnp.ones(B, jnp.float32)
    return Context(
        tokens=tokens,
        length=length,
        previous=length - 1,
        features=None,
        live=room >= 0,
        room=room,
        table=jnp.zeros((B, 1), jnp.int32),
        warp=Warp(one, jnp.zeros(B, jnp.int32), one, 0 * one),
        processing=Processing(None, jnp.full((B, 1), -1), 0 * length, tokens, length),
        noise=RoundNoise(jnp.zeros((B, 2), jnp.uint32), length),
    )
