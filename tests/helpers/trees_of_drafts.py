"""Random trees of query tokens, rows whose query tokens they are, and attention along each of their paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from paged_problems import Case, oracle, rows_of_queries

from jspec.pallas.attention.spec import PagedQueries, TreeMask


def random_parents(seed: int, B: int, T: int) -> np.ndarray:
    """The parent of each of T tokens, which comes before it, int ``[B, T]``; that of the root is 0."""
    parents = jax.random.randint(jax.random.key(seed), (B, T), 0, jnp.maximum(jnp.arange(T), 1)[None])
    return np.asarray(parents)


def seen_in_pass(parents: np.ndarray) -> np.ndarray:
    """Which tokens each token sees, bool ``[B, T, T]``: its ancestors and itself."""
    B, T = parents.shape
    seen = np.broadcast_to(np.eye(T, dtype=bool), (B, T, T)).copy()
    for t in range(1, T):
        seen[:, t] |= seen[np.arange(B), parents[:, t]]
    return seen


def tree_mask(first: np.ndarray, parents: np.ndarray) -> TreeMask:
    """The trees whose roots have the slots ``first``, int ``[B]``."""
    seen, T = seen_in_pass(parents), parents.shape[1]
    words = np.zeros((*parents.shape, -(-T // 32)), np.uint32)
    for j in range(T):
        words[:, :, j // 32] |= seen[:, :, j].astype(np.uint32) << np.uint32(j % 32)
    positions = first[:, None] + seen.sum(axis=2) - 1
    return TreeMask(jnp.asarray(positions, jnp.int32), jnp.asarray(words), jnp.asarray(first, jnp.int32))


@functools.cache
def tree_problem(case: Case, chain: bool = False):
    """Rows of ``paged_problems`` whose query tokens are a random tree, or one branch: the arguments of attention, and the
    oracle's attention of each query token over the text and its own path alone."""
    T, S = case.T, case.pages * case.P
    first = np.array([S - case.P // 2 - 1 - T, S // 2, S - T + (T > 1), S - 3 - T, 0, 1])
    args, text, (positions, valid) = rows_of_queries(case, first)
    parents = np.maximum(np.arange(T) - 1, 0) + np.zeros_like(positions) if chain else random_parents(T, len(first), T)
    queries: PagedQueries = args[-1]._replace(tree=tree_mask(first, parents))
    return (*args[:-1], queries), _along_paths(case, args[0], text, first, valid, seen_in_pass(parents))


def _along_paths(case: Case, q, text, first, valid, seen):
    """The oracle's attention with every path laid out as a text of its own: float64 ``[2, B, T, N, H]``."""
    q, (k, v) = np.asarray(q, np.float64), np.asarray(text, np.float64)
    out = np.zeros((2, *q.shape))
    for b, t in np.argwhere(valid):
        path = np.concatenate([np.arange(first[b]), first[b] + np.flatnonzero(seen[b, t])])
        last, here = np.array([[len(path) - 1]]), np.ones((1, 1), bool)
        args = q[b, t][None, None], k[:, b : b + 1, path], v[:, b : b + 1, path], last, here
        out[:, b, t] = oracle(case, *args)[:, 0, 0]
    return out


TREES = [
    Case(T=8, R=4, H=64, P=16, pages=9),
    Case(T=40, R=2, H=16, P=16, pages=8, dtype="bfloat16"),
    Case(T=16, R=2, H=64, P=24, pages=6, window=20, sink=1.0),
    Case(T=64, R=1, H=32, P=64, pages=4, softcap=2.0, scale=0.3),
]
