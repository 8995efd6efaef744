"""Trees of drafts, grown best first (EAGLE-2: Li et al., 2024), of EAGLE and EAGLE-3 heads and of block drafters.

The likeliest drafts of a level get children: the tokens that come first under the noise that the target's own draw will
have there. In a row whose own tokens decide which may follow (``Context.chain``) a draft has one child, and the tree is a
chain. No distribution of drafts enters the rule, ``match_tree`` (``jspec.sampling.tree``), which gives the target's own text
for any tree."""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from jspec.config import TreeShape
from jspec.config.tree import MAX_NODES
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.block import Block
from jspec.drafting.eagle import Eagle
from jspec.models.heads.sequential import Slots
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


class Parents(NamedTuple):
    """The drafts of a level that get children, W of each row.

    Attributes:
      tokens: int32 ``[B, W]``.
      depth: theirs.
      of: int32 ``[B, W]``, the place of each one's own parent among those of the level before.
      exist: bool ``[B, W]``, the first ones of each row.
    """

    tokens: jax.Array
    depth: int
    of: jax.Array
    exist: jax.Array

    def inherited(self, x) -> jax.Array:
        """What their own parents have, ``[B, W, ...]``, for each of them."""
        return jnp.take_along_axis(x, self.of.reshape(*self.of.shape, *(1,) * (x.ndim - 2)), axis=1)


@dataclasses.dataclass(frozen=True)
class TreeDrafter(abc.ABC):
    """A draft head that proposes trees. A subclass says what the head reads of a level.

    Attributes:
      chain: the same head as it drafts chains of K tokens, for rounds that have no trees.
      shape: of the trees.
    """

    chain: Any
    shape: TreeShape

    kind: ClassVar[Any]  # the class of ``chain``

    @classmethod
    def build(cls, setup: Setup) -> Self:
        shape = setup.speculation.tree
        assert isinstance(shape, TreeShape)
        return cls(cls.kind.build(setup), shape)

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
        return max(self.shape.nodes - 1 - self.shape.depth, self.chain.slots_beyond)

    def init(self, pages: int, page_size: int, dtype, num_rows: int) -> Any:
        return self.chain.init(pages, page_size, dtype, num_rows)

    def prefill(self, state, prompt: Prompt):
        return self.chain.prefill(state, prompt)

    @abc.abstractmethod
    def begin(self, state, context: Context) -> tuple[Any, jax.Array]:
        """The pass that begins a round: what ``read`` goes on from, and logits ``[B, 1, Vd]`` of the root's children."""

    @abc.abstractmethod
    def read(self, carry, context: Context, parents: Parents) -> tuple[Any, jax.Array]:
        """Read drafts that get children: what the next call goes on from, and the logits of the children, ``[B, W, Vd]``, or
        ``[B, 1, Vd]`` if they are the same of all."""

    @abc.abstractmethod
    def end(self, carry) -> Any:
        """The state of the drafter after the round."""

    def have_slots(self, context: Context, depth: int) -> Any:
        """Whether each of W drafts at ``depth`` has a place in the head's cache, bool ``[B, W]``."""
        del context, depth
        return True

    def propose(self, state, context: Context) -> tuple[Any, Tree]:
        """Draft a tree in each row, at most ``context.room`` deep."""
        W, room = self.shape.branch, self.chain.room(context)
        carry, logits = self.begin(state, context)
        nothing = jnp.zeros((len(room), 1), jnp.int32)
        path = nothing[:, :0]  # the first draft of each level: the drafts so far of a row with a chain
        levels = [self._children(context, logits, nothing.astype(jnp.float32), nothing - 1, path, room)]
        for depth in range(1, self.shape.depth):
            level, first = levels[-1], sum(level.tokens.shape[1] for level in levels[:-1])
            path = jnp.concatenate([path, level.tokens[:, :1]], axis=1)
            scores, which = jax.lax.top_k(level.scores, W)
            exist = jnp.isfinite(scores) & self.have_slots(context, depth)
            tokens = jnp.take_along_axis(level.tokens, which, axis=1)
            carry, logits = self.read(carry, context, Parents(tokens, depth, which // W, exist))
            levels.append(
                self._children(context, logits, jnp.where(exist, scores, -jnp.inf), first + which, path, room)
            )
        return self.end(carry), self._likeliest(levels, context)

    def _children(self, context: Context, logits, scores, parents, path, room) -> Level:
        """The children of drafts at a depth, or of the root, with scores and indices ``[B, n]``.

        A draft of a row with a chain gets one child, after the drafts of ``path``, int32 ``[B, depth]``."""
        vocabulary, (B, n), depth = DraftVocabulary.of(self.chain.head), logits.shape[:2], path.shape[1]
        logits = logits if vocabulary is None else vocabulary.widened(logits)
        offsets = jnp.full((B, n), depth, jnp.int32)
        logits = jax.lax.optimization_barrier(context.processing.apply_to_tree(logits, offsets, path, depth))
        tokens, likely = candidates(logits, context.warp, context.noise.sample_keys(offsets), self.shape.branch)
        usable = (room > depth)[:, None]
        if context.chain is not None:
            usable &= ~context.chain[:, None] | (jnp.arange(self.shape.branch)[None] == 0)
        scores = jnp.where(usable[:, None], scores[..., None] + likely, -jnp.inf)
        of_each = (jnp.broadcast_to(x, scores.shape).reshape(B, -1) for x in (tokens, scores, parents[..., None]))
        return Level(*of_each)

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


@dataclasses.dataclass(frozen=True)
class EagleTree(TreeDrafter):
    """Trees of an EAGLE or EAGLE-3 head, which reads the W drafts of a level that get children in one pass. Its own cache
    holds them behind the committed slots, until the next round's window is written there."""

    chain: Eagle

    kind = Eagle

    @property
    def slots_beyond(self) -> int:
        return max(self.shape.nodes, self.shape.draft_slots) - 1 - self.shape.depth

    def begin(self, state, context: Context):
        hidden, cache = self.chain.read_window(state, context)
        words = jnp.zeros((len(hidden), 1, MAX_NODES // WORD), jnp.uint32)
        return (hidden, words, cache), self.chain.head.logits(hidden, self.chain.target)

    def read(self, carry, context: Context, parents: Parents):
        hidden, words, cache = carry
        chain, head, newest = self.chain, self.chain.head, context.length[:, None] - 2
        index = self._index(parents.depth)
        words = parents.inherited(words) | one_bit(index, MAX_NODES)[None]
        positions = jnp.broadcast_to(newest + parents.depth, parents.tokens.shape)
        tree = TreeMask(positions, words, context.length - 1)
        view = PagedView(context.table, newest + 1 + index[None], parents.exist, tree=tree)
        features = head.recycle(parents.inherited(hidden))
        hidden, cache = head(head.embed(parents.tokens, chain.target), features, positions, cache, view)
        return (hidden, words, cache), head.logits(hidden, chain.target)

    def end(self, carry):
        return carry[2]

    def have_slots(self, context: Context, depth: int):
        return context.length[:, None] - 1 + self._index(depth)[None] < context.tokens.shape[1]

    def _index(self, depth: int):
        """Which of the head's slots behind the committed ones the drafts of a level have, int32 ``[W]``."""
        return (depth - 1) * self.shape.branch + jnp.arange(self.shape.branch, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class BlockTree(TreeDrafter):
    """Trees of a DFlash, JetSpec or DSpark head. One pass makes the logits of all depths, which are those of every draft at
    a depth; what a DSpark head adds for the draft before is computed for each parent."""

    chain: Block

    kind = Block

    def begin(self, state, context: Context):
        slots, cache = self.chain.read_slots(state, context)
        sequential = self.chain.head.sequential
        if sequential is None:
            return (slots.logits, None, None, cache), slots.logits[:, :1]
        *arrays, embed = slots
        path, read = sequential.start(Slots(*jax.tree.map(self._of_paths, arrays), embed))  # pyright: ignore[reportCallIssue]
        path, logits = read(path, self._of_paths(context.tokens_at(context.length[:, None] - 1)), 0)
        return (slots.logits, path, read, cache), self._in_rows(logits[:, 0])[:, :1]

    def read(self, carry, context: Context, parents: Parents):
        logits, path, read, cache = carry
        if read is None:
            return carry, logits[:, parents.depth : parents.depth + 1]
        path = jax.tree.map(lambda x: parents.inherited(self._in_rows(x)).reshape(x.shape), path)
        path, of_parents = read(path, parents.tokens.reshape(-1, 1), parents.depth)
        return (logits, path, read, cache), self._in_rows(of_parents[:, 0])

    def end(self, carry):
        return carry[3]

    def _of_paths(self, x):
        """``[B, ...] -> [B W, ...]``."""
        return jnp.repeat(x, self.shape.branch, axis=0)

    def _in_rows(self, x):
        """``[B W, ...] -> [B, W, ...]``."""
        return x.reshape(-1, self.shape.branch, *x.shape[1:])
