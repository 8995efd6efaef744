"""Drafts that take the place of a drafter's first ones: which of its others may stay behind them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafting.base import FixedDrafts
from jspec.sampling.tree import Tree
from jspec.sampling.verify import Proposal

K = 4
OWN = [1, 2, 3, 4]
put = jax.jit(FixedDrafts.put_into)


def put_into(own: list[int], fixed: list[int], room: int = K) -> tuple[list[int], list[bool]]:
    """The drafts of one row that count, and which of them are point masses."""
    tokens, count = jnp.array([[*own, *[9] * K][:K]]), jnp.array([len(own)])
    proposal = Proposal(tokens, count, None, jnp.zeros((1, K), bool))
    found = put(FixedDrafts.of(1, K, [fixed]), proposal, jnp.array([room]))
    many = int(found.count[0])
    return found.tokens[0, :many].tolist(), found.point_mass[0, :many].tolist()


@pytest.mark.parametrize(
    ("own", "fixed", "room", "tokens", "known"),
    [
        (OWN, [], K, OWN, 0),
        (OWN, [1, 2], K, OWN, 2),  # drawn by the drafter, too
        (OWN, [1, 7], K, [1, 7], 2),
        (OWN, [7], K, [7], 1),
        (OWN, [7, 7, 7, 7], K, [7, 7, 7, 7], 4),
        ([1], [1, 2, 3], K, [1, 2, 3], 3),  # more than the drafter has drawn
        ([], [5], K, [5], 1),
        ([1, 2], [1], K, [1, 2], 1),
        ([1, 2], [1, 2, 3, 4], 2, [1, 2], 2),  # as many as there is room for
        ([], [5], 0, [], 0),
    ],
)
def test_first_drafts_are_replaced_and_others_stay_behind_the_same_ones(own, fixed, room, tokens, known):
    assert put_into(own, fixed, room) == (tokens, [i < known for i in range(len(tokens))])


def test_rows_differ():
    fixed = FixedDrafts.of(3, K, [[1, 2], [], [8]])
    assert fixed.count.tolist() == [2, 0, 1]
    proposal = Proposal(jnp.tile(jnp.array([OWN]), (3, 1)), jnp.array([K] * 3), None, jnp.zeros((3, K), bool))
    found = put(fixed, proposal, jnp.array([K] * 3))
    assert found.count.tolist() == [4, 4, 1]
    assert np.array_equal(found.tokens, [OWN, OWN, [8, 2, 3, 4]])


def test_chains_among_trees():
    """Rows without such drafts keep their trees; the others have the chains that a proposal of chains would have."""
    fixed, room = FixedDrafts.of(4, 2, [[], [1, 2], [8], [8, 9]]), np.array([2] * 4)
    branches, chain = ([0, 0, 1, 2], [1, 1, 2, 2]), ([0, 1, 2, 3], [1, 2, 3, 4])  # parents and depths
    nothing = ([0] * 4, [1] * 4)
    parents, depths = (np.array(rows, np.int32) for rows in zip(branches, chain, chain, nothing, strict=True))
    tree: Any = Tree(*(np.array([OWN] * 4), parents, depths, np.array([4, 2, 2, 0])))
    found = jax.device_get(put(fixed, tree, room))
    assert found.count.tolist() == [4, 2, 1, 2]
    assert np.array_equal(found.tokens, [OWN, OWN, [8, *OWN[1:]], [8, 9, *OWN[2:]]])
    assert found.parents[0].tolist() == branches[0]
    assert found.depths[0].tolist() == branches[1]
    for row in (1, 2, 3):
        many = int(found.count[row])
        assert found.parents[row, :many].tolist() == [*range(many)]
        assert found.depths[row, :many].tolist() == [*range(1, many + 1)]
