"""The end of a round whose drafts are a tree: the path that stands becomes text, and its keys and values move into place."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.engine.round_log import RoundLog
from jspec.engine.runner.commit import commit, next_features
from jspec.engine.runner.state import DecodeState, processing_of
from jspec.models.cache_pools import move_path
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree, drafts_of_path, match_tree


def finish_tree(
    state: DecodeState, tree: Tree, logits, features: Any, noise: RoundNoise, depth: int
) -> tuple[DecodeState, RoundLog]:
    """``DecodeStep.finish`` of a tree: follow the target's own draws, store the path's features, commit.

    Query token i was written into slot length - 1 + i. The accepted ones move to the slots behind the root's, in which a
    chain would have them; the others are left, to be written again before any query sees them.

    Args:
      state: the batch after the verify pass.
      tree: the drafts.
      logits: ``[B, width, V]``, after each query token.
      features: what the drafter reads of the pass, ``[B, width, E]``; None if it reads nothing.
      noise: of the round.
      depth: K, the most drafts of a path.
    """
    request = state.request
    N = tree.tokens.shape[1] + 1
    logits = processing_of(state).apply(logits[:, :N], offsets=tree.query_depths)
    result, path = match_tree(logits, request.warp, tree, noise, depth)
    level, root = jnp.arange(1, depth + 1, dtype=jnp.int32)[None], request.length[:, None] - 1
    moves = (level <= result.accepted[:, None]) & (path[:, 1:] != level) & state.live[:, None]
    source, target = (jnp.where(moves, root + x, -1) for x in (path[:, 1:], level))
    cache = move_path(state.cache, request.table, source, target)
    if features is not None:
        features = jax.tree.map(lambda x: jnp.take_along_axis(x, path[..., None], axis=1), features)
    features = next_features(state, features, depth)
    return commit(dataclasses.replace(state, cache=cache, features=features), drafts_of_path(tree, path), result)
