"""Trees of drafts of EAGLE and EAGLE-3 heads, grown best first (EAGLE-2: Li et al., 2024).

All drafts of a level are read in one pass of the head. Their children are the tokens that the target's own seeded draw is
closest to, under the noise that this draw will have. Nothing about a tree has a law to keep: the rule ``match_tree``
(``jspec.sampling.tree``) gives the target's own text for any."""

import dataclasses
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jspec.config import TreeShape
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.eagle import Eagle
from jspec.models.kv_cache import PagedView
from jspec.pallas.attention.spec import TreeMask
from jspec.sampling.candidates import candidates
from jspec.sampling.draft_vocabulary import DraftVocabulary
from jspec.sampling.tree import WORD, Tree, one_bit


class Level(NamedTuple):
    """The drafts of one depth, n of each row.

    Attributes:
      tokens: int32 ``[B, n]``.
      scores: float32 ``[B, n]``, the log of how likely the path up to each is to be accepted; -inf where there is none.
      parents: int32 ``[B, n]``, the index of each draft's parent among all drafts of the round, -1 for the root.
    """

    tokens: jax.Array
    scores: jax.Array
    parents: jax.Array


@dataclasses.dataclass(frozen=True)
class EagleTree:
    """A draft head that proposes trees.

    Attributes:
      chain: the same head as it drafts chains of K tokens, for rounds that have no trees.
      shape: of the trees.
    """

    chain: Eagle
    shape: TreeShape

    @classmethod
    def build(cls, setup: Setup) -> Self:
        shape = setup.speculation.tree
        assert shape is not None
        return cls(Eagle.build(setup), shape)

    @property
    def num_draft_tokens(self) -> int:
        return self.shape.depth

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        return self.chain.aux_layers

    @property
    def longest_text(self) -> int:
        return self.chain.longest_text

    @property
    def slots_beyond(self) -> int:
        return max(self.shape.nodes, self.shape.draft_slots) - 1 - self.shape.depth

    def init(self, pages: int, page_size: int, dtype, num_rows: int) -> Any:
        return self.chain.init(pages, page_size, dtype, num_rows)

    def prefill(self, state, prompt: Prompt):
        return self.chain.prefill(state, prompt)

    def propose(self, state, context: Context) -> tuple[Any, Tree]:
        """Draft a tree in each row, at most ``context.room`` deep."""
        chain, head, W = self.chain, self.chain.head, self.shape.branch
        newest, room = context.length - 2, chain.room(context)
        hidden, cache = chain.read_window(state, context)
        nothing = jnp.zeros_like(newest)[:, None]
        levels = [self._children(context, hidden, nothing.astype(jnp.float32), nothing - 1, 0, room)]
        words = jnp.zeros((len(newest), 1, -(-self.shape.draft_slots // WORD)), jnp.uint32)
        for depth in range(1, self.shape.depth):
            level, first = levels[-1], sum(level.tokens.shape[1] for level in levels[:-1])
            scores, which = jax.lax.top_k(level.scores, W)
            parent = which // W  # among the drafts of the level before that were read
            of_parents = lambda x: jnp.take_along_axis(x, parent[..., None], axis=1)  # noqa: B023, E731
            own = jnp.arange(W, dtype=jnp.int32) + (depth - 1) * W
            slots = newest[:, None] + 1 + own[None]
            has_slot = jnp.isfinite(scores) & (slots < context.tokens.shape[1])
            words = of_parents(words) | one_bit(own, self.shape.draft_slots)[None]
            positions = jnp.broadcast_to(newest[:, None] + depth, slots.shape)
            view = PagedView(context.table, slots, has_slot, tree=TreeMask(positions, words, newest + 1))
            embedded = head.embed(jnp.take_along_axis(level.tokens, which, axis=1), chain.target)
            hidden, cache = head(embedded, head.recycle(of_parents(hidden)), positions, cache, view)
            scores = jnp.where(has_slot, scores, -jnp.inf)
            levels.append(self._children(context, hidden, scores, first + which, depth, room))
        return cache, self._likeliest(levels, context)

    def _children(self, context: Context, hidden, scores, parents, depth: int, room) -> Level:
        """The children of drafts at ``depth``, or of the root, whose hidden states are ``[B, n, D]``."""
        chain, (B, n, _) = self.chain, hidden.shape
        logits, vocabulary = chain.head.logits(hidden, chain.target), DraftVocabulary.of(chain.head)
        logits = logits if vocabulary is None else vocabulary.widened(logits)
        offsets = jnp.full((B, n), depth, jnp.int32)
        logits = jax.lax.optimization_barrier(context.processing.apply(logits, offsets=offsets))
        tokens, likely = candidates(logits, context.warp, context.noise.sample_keys(offsets), self.shape.branch)
        scores = jnp.where((room > depth)[:, None, None], scores[..., None] + likely, -jnp.inf)
        parents = jnp.broadcast_to(parents[..., None], tokens.shape)
        return Level(*(x.reshape(B, -1) for x in (tokens, scores, parents)))

    def _likeliest(self, levels: list[Level], context: Context) -> Tree:
        """The drafts with the best scores: as many as there are query tokens and slots, and as each request wants. A parent
        is among them if its child is, because its score is no worse and it comes first."""
        tokens, scores, parents = (jnp.concatenate(parts, axis=1) for parts in zip(*levels, strict=True))
        most, M = self.shape.nodes - 1, tokens.shape[1]
        depths = jnp.concatenate([jnp.full(part.tokens.shape[1], i + 1, jnp.int32) for i, part in enumerate(levels)])
        slots = context.tokens.shape[1] - context.length
        wanted = jnp.minimum(jnp.minimum(slots, context.max_drafts), most)
        best, chosen = jax.lax.top_k(scores, most)
        keep = jnp.isfinite(best) & (jnp.arange(most, dtype=jnp.int32)[None] < wanted[:, None])
        order = jnp.sort(jnp.where(keep, chosen, M), axis=1)
        counts, at = order < M, jnp.minimum(order, M - 1)
        tokens, parents = (jnp.take_along_axis(x, at, axis=1) for x in (tokens, parents))
        # The query token of draft m is 1 and how many chosen drafts come before it.
        place = 1 + jnp.sum(order[:, None] < parents[..., None], axis=2, dtype=jnp.int32)
        parents = jnp.where(counts & (parents >= 0), place, 0)
        return Tree(tokens, parents, jnp.where(counts, depths[at], 1), jnp.sum(counts, axis=1, dtype=jnp.int32))
