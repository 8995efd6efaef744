"""What the target's own draws leave of a tree of drafts: the path that stands, whose keys and values move into place."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.engine.runner.state import DecodeState
from jspec.models.cache_pools import move_path
from jspec.sampling.logprobs import as_float32
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree, drafts_of_path, match_tree
from jspec.sampling.verify import Proposal, VerifyResult


class Path(NamedTuple):
    """The path of each row that stands, as a round of chains would have it.

    Attributes:
      drafts: those of the path, int32 ``[B, K]``, past the accepted ones anything; as many count as the tree has.
      result: how many of them stand, and the target's token behind them.
      logits: of the target, ``[B, K + 1, V]``, after the root and each of them.
      features: what the drafter reads of the pass, ``[B, K + 1, E]``; None if it reads nothing.
      deepest: int32 ``[B]``, as ``Tree.deepest``.
      rejects: bool ``[B]``, whether drafts follow the accepted ones.
    """

    drafts: Proposal
    result: VerifyResult
    logits: jax.Array
    features: Any
    deepest: jax.Array
    rejects: jax.Array


def follow(
    state: DecodeState, tree: Tree, processing: Processing, logits, features: Any, noise: RoundNoise, depth: int
) -> tuple[DecodeState, Path]:
    """Follow the target's own draws through a tree.

    Query token i was written into slot length - 1 + i. The accepted ones move to the slots behind the root's, in which a
    chain would have them; the others are left, to be written again before any query sees them.

    Args:
      state: the batch after the verify pass.
      tree: the drafts. In a row that changes its logits, or has a grammar, they are a chain.
      processing: of the rows' logits.
      logits: ``[B, width, V]``, after each query token.
      features: what the drafter reads of the pass, ``[B, width, E]``; None if it reads nothing.
      noise: of the round.
      depth: K, the most drafts of a path.
    """
    request, N = state.request, tree.tokens.shape[1] + 1
    wanted = as_float32(logits) if processing.processors is not None else logits  # as ``DecodeStep._apply_rule`` says
    wanted = processing.apply_to_tree(wanted[:, :N], tree.query_depths, tree.tokens[:, :depth])
    result, path = match_tree(wanted, request.warp, tree, noise, depth)
    level, root = jnp.arange(1, depth + 1, dtype=jnp.int32)[None], request.length[:, None] - 1
    moves = (level <= result.accepted[:, None]) & (path[:, 1:] != level) & state.live[:, None]
    source, target = (jnp.where(moves, root + x, -1) for x in (path[:, 1:], level))
    cache = move_path(state.cache, request.table, source, target)
    logits, features = jax.tree.map(lambda x: jnp.take_along_axis(x, path[..., None], axis=1), (logits, features))
    rejects = tree.goes_on(jnp.take_along_axis(path, result.accepted[:, None], axis=1)[:, 0])
    found = Path(drafts_of_path(tree, path), result, logits, features, tree.deepest, rejects)
    return dataclasses.replace(state, cache=cache), found
