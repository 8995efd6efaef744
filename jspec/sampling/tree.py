"""Trees of drafts, and the rule by which the target verifies one: ``match`` along a path.

The token that the target draws at a position is a function of the text before it and of the request's key: its own draw,
with the noise of that position. A path of a tree is followed while a child is that token. So the text is the target's own
text, whatever the tree is and however it was drafted (docs/guides/drafting.md#trees)."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.pallas.attention.spec import TreeMask
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal, VerifyResult

WORD = 32  # bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tree:
    """The drafts of a round as a tree. Query token 0 is its root, the newest committed token, and query token i + 1 is draft
    i; parents come before their children.

    Attributes:
      tokens: int32 ``[B, N - 1]``. Drafts with the same parent differ.
      parents: int32 ``[B, N - 1]``, the query token that is each draft's parent.
      depths: int32 ``[B, N - 1]``, 1 for the children of the root.
      count: int32 ``[B]``, how many drafts count, the first ones.

    Example::

        tree = Tree(jnp.array([[5, 7, 9]]), jnp.array([[0, 0, 1]]), jnp.array([[1, 1, 2]]), jnp.array([3]))
        assert tree.ancestors.tolist() == [[[1], [0b11], [0b101], [0b1011]]]  # 5 and 7 follow the root, 9 follows 5
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    count: jax.Array

    @property
    def counts(self) -> jax.Array:
        """bool ``[B, N - 1]``, which drafts count."""
        return jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None] < self.count[:, None]

    @property
    def deepest(self) -> jax.Array:
        """int32 ``[B]``, the depth of the deepest draft that counts; 0 without drafts."""
        return jnp.max(jnp.where(self.counts, self.depths, 0), axis=1)

    def goes_on(self, last) -> jax.Array:
        """bool ``[B]``, whether drafts that count follow query tokens ``last``, int32 ``[B]``."""
        return jnp.any(self.counts & (self.parents == last[:, None]), axis=1)

    def beginning_with(self, tokens, count, fixed) -> "Tree":
        """The tree with other ``tokens`` and ``count``. Those that are ``fixed``, bool ``[B, N - 1]``, the first ones of
        their rows, follow each other."""
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        parents, depths = jnp.where(fixed, index, self.parents), jnp.where(fixed, index + 1, self.depths)
        return Tree(tokens, parents, depths, count)

    @property
    def query_depths(self) -> jax.Array:
        """int32 ``[B, N]``, those of the root and the drafts."""
        return jnp.pad(self.depths, ((0, 0), (1, 0)))

    @property
    def ancestors(self) -> jax.Array:
        """uint32 ``[B, N, W]``, as ``TreeMask`` has them: of each query token, itself and those that it follows."""
        N = self.tokens.shape[1] + 1
        parents = jnp.pad(self.parents, ((0, 0), (1, 0)))
        own = one_bit(jnp.arange(N, dtype=jnp.int32), N)[None]
        words = jnp.broadcast_to(own, (len(self.tokens), *own.shape[1:]))
        for _ in range(N.bit_length()):  # twice as many generations each time
            words = words | jnp.take_along_axis(words, parents[..., None], axis=1)
            parents = jnp.take_along_axis(parents, parents, axis=1)
        return words

    def mask(self, length, width: int) -> TreeMask:
        """Where the query tokens, and padding up to ``width`` of them, stand in texts of ``length`` committed tokens, int32
        ``[B]``, and what they see."""
        root, more = length - 1, width - self.tokens.shape[1] - 1
        depths = jnp.pad(self.query_depths, ((0, 0), (0, more)))
        return TreeMask(root[:, None] + depths, jnp.pad(self.ancestors, ((0, 0), (0, more), (0, 0))), root)


def match_tree(logits, warp: Warp, tree: Tree, noise: RoundNoise, depth: int) -> tuple[VerifyResult, jax.Array]:
    """Follow the target's own seeded samples through a tree, as far as it has them.

    Args:
      logits: ``[B, N, V]`` of the target, after each query token.
      warp: the requests' settings.
      tree: the drafts.
      noise: the round's noise.
      depth: K, the most drafts of a path.

    Returns:
      how many drafts stand and the target's token behind them; and the path, int32 ``[B, K + 1]``: the query tokens at
      depths 0, 1, .., and 0 past the accepted ones.

    Example::

        tree = Tree(jnp.array([[5, 7, 9]]), jnp.array([[0, 0, 1]]), jnp.array([[1, 1, 2]]), jnp.array([3]))
        greedy = Warp(jnp.array([0.0]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))
        logits = jax.nn.one_hot(jnp.array([[5, 9, 0, 3]]), 16)  # the target says 5, then 9, then 3
        noise = RoundNoise(jnp.array([[0, 7]], jnp.uint32), jnp.array([10]))
        verdict, path = match_tree(logits, greedy, tree, noise, depth=2)
        assert verdict.accepted.tolist() == [2] and path.tolist() == [[0, 1, 3]] and verdict.token.tolist() == [3]
    """
    depths, N = tree.query_depths, logits.shape[1]
    distribution, sampled = make_distribution(logits, warp, noise.sample_keys(depths))
    of_parents = lambda x: jnp.take_along_axis(x, tree.parents, axis=1)  # noqa: E731
    agrees = (tree.tokens == of_parents(sampled)) & of_parents(distribution.finite) & tree.counts
    # A draft stands if it and all that it follows are what the target draws there. At most one of each depth does.
    agreed = _packed(jnp.pad(agrees, ((0, 0), (1, 0)), constant_values=True))
    stands = jnp.all(tree.ancestors & ~agreed[:, None] == 0, axis=2)
    index, level = jnp.arange(N, dtype=jnp.int32)[None, None], jnp.arange(depth + 1, dtype=jnp.int32)[None, :, None]
    path = jnp.max(jnp.where(stands[:, None] & (depths[:, None] == level), index, 0), axis=2)
    accepted = jnp.max(jnp.where(stands, depths, 0), axis=1)
    last = jnp.take_along_axis(path, accepted[:, None], axis=1)
    token, ok = (jnp.take_along_axis(x, last, axis=1)[:, 0] for x in (sampled, distribution.finite))
    return VerifyResult(accepted, token, ok), path


def drafts_of_path(tree: Tree, path) -> Proposal:
    """The drafts along a path, int32 ``[B, K + 1]``, as a chain of point masses of which as many count as the tree has."""
    tokens = jnp.take_along_axis(tree.tokens, jnp.maximum(path[:, 1:] - 1, 0), axis=1)
    return Proposal(tokens, tree.count, None, jnp.ones(tokens.shape, bool))


def one_bit(index, N: int) -> jax.Array:
    """Words with one bit set: int32 ``[n] -> uint32 [n, ceil(N / 32)]``."""
    word = jnp.arange(-(-N // WORD), dtype=jnp.int32)[None]
    bit = jnp.uint32(1) << (index % WORD).astype(jnp.uint32)
    return jnp.where(index[:, None] // WORD == word, bit[:, None], jnp.uint32(0))


def _packed(flags):
    """bool ``[B, N] -> uint32 [B, ceil(N / 32)]``; bits past N are set."""
    B, N = flags.shape
    flags = jnp.pad(flags, ((0, 0), (0, -N % WORD)), constant_values=True).reshape(B, -1, WORD)
    return jnp.sum(jnp.where(flags, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), 0), axis=2, dtype=jnp.uint32)
