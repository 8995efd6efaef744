"""Prompt lookup (Saxena, 2023): propose the tokens that followed an earlier occurrence of the text's newest tokens.

The lookup runs on the device and needs no model.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.drafting.base import Context, Setup, Stateless
from jspec.sampling.verify import Proposal


@dataclasses.dataclass(frozen=True)
class NGram(Stateless):
    """Continues a text as its longest repeated suffix was continued before.

    The longest suffix of ngram_min..ngram_max tokens that occurs earlier in the text is continued by the tokens after that
    occurrence. If it occurs several times, the most recent occurrence counts. Both may overlap. A continuation that
    reaches the end of the text goes on with its own drafts, as copies in LZ77 do: ``1 2 3 4 1 2`` is continued by
    ``3 4 1 2 3 4 ..``.
    """

    num_draft_tokens: int
    ngram_min: int
    ngram_max: int

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.speculation.most_draft_tokens, *setup.speculation.ngram_lengths)

    def propose(self, state, context: Context):
        return state, copied(*self.continuation(context), context)

    def continuation(self, context: Context) -> tuple[jax.Array, jax.Array]:
        """The tokens that continue each text, int32 ``[B, K]``, and how many of them count, int32 ``[B]``.

        All count that there is room for, or none.
        """
        B, S = context.tokens.shape
        K = self.num_draft_tokens
        newest = context.length[:, None] - 1  # [B, 1]
        # Entry [b, s] of the arrays [B, S] is about an occurrence of row b's suffix whose last token stands at s.
        ends = jnp.arange(S, dtype=jnp.int32)[None]
        matched = jnp.zeros((B, S), jnp.int32)  # how many tokens agree
        unbroken = jnp.broadcast_to(ends < newest, (B, S))  # all tokens compared so far agree
        for back in range(self.ngram_max):
            suffix = jnp.take_along_axis(context.tokens, jnp.maximum(newest - back, 0), axis=1)
            # The token at ends - back.
            shifted = jnp.pad(context.tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :S]
            unbroken &= shifted == suffix
            matched += unbroken
        longest = jnp.max(matched, axis=1, keepdims=True)
        end = jnp.max(jnp.where(matched == longest, ends, -1), axis=1, keepdims=True)
        period = jnp.maximum(newest - end, 1)
        source = end + 1 + jnp.arange(K, dtype=jnp.int32)[None] % period
        drafts = jnp.take_along_axis(context.tokens, jnp.clip(source, 0, S - 1), axis=1)
        count = jnp.where(longest[:, 0] >= self.ngram_min, context.room, 0)
        return drafts, count


def copied(drafts, count, context: Context) -> Proposal:
    """The proposal of ``count`` copied drafts, int32 ``[B, K]`` and ``[B]``."""
    return Proposal(drafts, count, distribution=None, point_mass=jnp.ones(drafts.shape, bool))
