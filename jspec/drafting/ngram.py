"""Prompt lookup (Saxena, 2023): propose what followed the last occurrence of the text's own ending. On device, no
model."""

import dataclasses

import jax.numpy as jnp

from jspec.drafting.base import Context, Setup, Stateless
from jspec.sampling.verify import Proposal


@dataclasses.dataclass(frozen=True)
class NGram(Stateless):
    """Longest match first, the most recent wins.

    The longest suffix of ngram_min..ngram_max tokens that occurs earlier (overlap with itself allowed) is continued by
    the tokens after that occurrence. A continuation that runs into the end of the text goes on into its own drafts, as
    LZ77 copies do, so a text of period p is continued with period p.
    """

    num_draft_tokens: int
    ngram_min: int
    ngram_max: int

    @classmethod
    def build(cls, setup: Setup):
        how = setup.speculation
        return cls(how.most_draft_tokens, how.ngram_min, how.ngram_max)

    def propose(self, state, context: Context):
        B, S = context.tokens.shape
        K = self.num_draft_tokens
        newest = context.length[:, None] - 1  # [B, 1]
        ends = jnp.arange(S, dtype=jnp.int32)[None]  # the candidate occurrence's last token
        matched = jnp.zeros((B, S), jnp.int32)
        unbroken = jnp.broadcast_to(ends < newest, (B, S))
        for back in range(self.ngram_max):
            suffix = jnp.take_along_axis(context.tokens, jnp.maximum(newest - back, 0), axis=1)
            shifted = jnp.pad(context.tokens, ((0, 0), (back, 0)), constant_values=-1)[:, :S]  # token at ends - back
            unbroken &= shifted == suffix
            matched += unbroken
        longest = jnp.max(matched, axis=1, keepdims=True)
        end = jnp.max(jnp.where(matched == longest, ends, -1), axis=1, keepdims=True)
        period = jnp.maximum(newest - end, 1)
        source = end + 1 + jnp.arange(K, dtype=jnp.int32)[None] % period
        drafts = jnp.take_along_axis(context.tokens, jnp.clip(source, 0, S - 1), axis=1)
        count = jnp.where(longest[:, 0] >= self.ngram_min, context.room, 0)
        return state, Proposal(drafts, count, distribution=None, point_mass=jnp.ones(B, bool))
