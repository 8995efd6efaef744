"""Drafts that take the place of a drafter's first ones: which of its others may stay behind them."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafting.base import FixedDrafts
from jspec.sampling.verify import Proposal

K = 4
OWN = [1, 2, 3, 4]


def put_into(own: list[int], fixed: list[int], room: int = K) -> tuple[list[int], list[bool]]:
    """The drafts of one row that count, and which of them are point masses."""
    tokens, count = jnp.array([[*own, *[9] * K][:K]]), jnp.array([len(own)])
    proposal = Proposal(tokens, count, None, jnp.zeros((1, K), bool))
    found = FixedDrafts.of(1, K, [fixed]).put_into(proposal, jnp.array([room]))
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
    found = fixed.put_into(proposal, jnp.array([K] * 3))
    assert found.count.tolist() == [4, 4, 1]
    assert np.array_equal(found.tokens, [OWN, OWN, [8, 2, 3, 4]])
