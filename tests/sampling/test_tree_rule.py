"""Candidates of a draw, the ancestors of a tree's drafts, and the rule that follows the target's samples through a tree."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.sampling import warped_logits
from jspec.sampling.candidates import candidates
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree, drafts_of_path, match_tree

B, V, GREEDY = 5, 40, 4
WARP = Warp(
    jnp.array([1.0, 0.7, 1.4, 0.9, 0.0]),
    jnp.array([0, 3, 0, 0, 2]),
    jnp.array([1.0, 1.0, 0.8, 1.0, 0.5]),
    jnp.array([0.0, 0.0, 0.0, 0.1, 0.3]),
)
NOISE = RoundNoise(jnp.arange(2 * B, dtype=jnp.uint32).reshape(B, 2), jnp.array([4, 9, 2, 7, 30]))
find = jax.jit(candidates, static_argnames="count")
make = jax.jit(make_distribution)
rule = jax.jit(match_tree, static_argnames="depth")
chain_of = jax.jit(drafts_of_path)
keys_at = jax.jit(NOISE.sample_keys)
masked = jax.jit(Tree.mask, static_argnames="width")


def logits_of(n: int, seed: int = 0) -> np.ndarray:
    return (2 * np.random.default_rng(seed).standard_normal((B, n, V))).astype(np.float32)


def places(n: int) -> np.ndarray:
    return np.tile(np.arange(n, dtype=np.int32), (B, 1))


@pytest.fixture(scope="class", params=[1, 5], ids=["one group", "five groups"])
def groups(request):
    """How many groups of tokens a vocabulary has; nothing stays that was traced with others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warped_logits, "GROUP", warped_logits.GROUP if request.param == 1 else 8)
        jax.clear_caches()
        assert warped_logits.num_groups(V) == request.param
        yield
    jax.clear_caches()


@pytest.mark.usefixtures("groups")
class TestCandidates:
    J, count = 300, 5

    def test_the_first_is_the_draw_and_all_differ(self):
        logits, keys = logits_of(self.J), keys_at(places(self.J))
        tokens, likely = map(np.asarray, find(logits, WARP, keys, count=self.count))
        distribution, drawn = make(logits, WARP, keys)
        np.testing.assert_array_equal(tokens[:, :, 0], drawn)
        possible = np.isfinite(np.asarray(distribution.log_probs))
        for row, j in np.ndindex(B, 30):
            real = tokens[row, j, np.isfinite(likely[row, j])]
            assert len(set(real.tolist())) == len(real)
            if row == GREEDY:  # which no filter concerns
                assert len(real) == self.count
            else:
                assert len(real) == min(self.count, possible[row, j].sum())
                assert possible[row, j, real].all()
        assert (likely[:, :, 1:] <= likely[:, :, :-1]).all()
        assert np.isneginf(likely[1, :, 3:]).all(), "top_k=3"

    def test_at_temperature_0_they_are_the_likeliest(self):
        logits = logits_of(self.J)
        tokens, likely = find(logits, WARP, keys_at(places(self.J)), count=self.count)
        log_probs = logits[GREEDY] - np.log(np.exp(logits[GREEDY]).sum(axis=1, keepdims=True))
        best = np.argsort(-log_probs, axis=1)[:, : self.count]
        np.testing.assert_array_equal(tokens[GREEDY], best)
        np.testing.assert_allclose(likely[GREEDY], np.take_along_axis(log_probs, best, axis=1), atol=1e-5)

    def test_the_draw_from_other_logits_comes_soon(self):
        """With its own noise it is among the candidates more often than with other noise, where filters leave more."""
        ours = logits_of(self.J)
        theirs, keys = ours + 0.5 * logits_of(self.J, seed=1), keys_at(places(self.J))
        _, drawn = make(theirs, WARP, keys)
        found = [
            (np.asarray(find(ours, WARP, some, count=self.count)[0]) == np.asarray(drawn)[:, :, None])
            .any(axis=2)
            .mean(axis=1)
            for some in (keys, keys_at(places(self.J) + 1_000))
        ]
        assert (found[0][[0, 2]] > found[1][[0, 2]] + 0.3).all()
        assert found[0].min() > 0.75

    def test_tokens_outside_of_a_draft_vocabulary_are_none(self):
        logits = np.where(np.arange(V) % 10 == 3, logits_of(self.J), -np.float32(np.inf))
        tokens, likely = map(np.asarray, find(logits, WARP, keys_at(places(self.J)), count=self.count))
        real = np.isfinite(likely)
        assert set(tokens[real].tolist()) == {3, 13, 23, 33}
        assert (real[0].sum(axis=1) == 4).all()

    def test_logits_that_make_no_distribution_have_none(self):
        logits = logits_of(self.J)
        logits[:, 0, 7], logits[:, 1, 7], logits[:, 2] = np.nan, np.inf, -np.inf
        _, likely = find(logits, WARP, keys_at(places(self.J)), count=self.count)
        finite = np.isfinite(np.asarray(likely)).any(axis=2)
        assert not finite[:, :3].any()
        assert finite[:, 3:].all()


def random_trees(N: int, depth: int, seed: int, tokens: int = V) -> Tree:
    """Trees of up to N - 1 drafts; those past ``count`` are anything that has a place."""
    rng = np.random.default_rng(seed)
    parents, depths, drafts = (np.zeros((B, N - 1), np.int32) for _ in range(3))
    for row in range(B):
        all_depths, taken = [0], set()
        for i in range(N - 1):
            able = [node for node in range(i + 1) if all_depths[node] < depth]
            parent = int(rng.choice(able if rng.random() < 0.5 else able[-3:]))
            free = [token for token in range(tokens) if (parent, token) not in taken]
            token = int(rng.choice(free))
            taken.add((parent, token))
            all_depths.append(all_depths[parent] + 1)
            parents[row, i], depths[row, i], drafts[row, i] = parent, all_depths[-1], token
    count = rng.integers(N // 2, N, size=B).astype(np.int32)
    count[0] = 0
    return Tree(drafts, parents, depths, count)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("N", "depth"), [(2, 1), (8, 3), (32, 31), (33, 6), (64, 33)])
def test_ancestors(N, depth):
    tree = random_trees(N, depth, seed=N, tokens=64)
    words = np.asarray(masked(tree, np.ones(B, np.int32), N).ancestors)
    assert words.shape == (B, N, -(-N // 32))
    for row in range(B):
        seen: list[set[int]] = [{0}]
        for i in range(N - 1):
            seen.append(seen[int(tree.parents[row, i])] | {i + 1})
        for node, expected in enumerate(seen):
            assert {j for j in range(N) if words[row, node, j // 32] >> (j % 32) & 1} == expected


def test_a_mask_counts_positions_by_depth_and_slots_by_place():
    tree, length = random_trees(8, 3, seed=1), np.array([3, 1, 12, 5, 9], np.int32)
    mask = masked(tree, length, 10)
    np.testing.assert_array_equal(mask.root, length - 1)
    np.testing.assert_array_equal(mask.positions[:, 0], length - 1)
    np.testing.assert_array_equal(mask.positions[:, 1:8], length[:, None] - 1 + tree.depths)
    np.testing.assert_array_equal(mask.ancestors[:, :8], masked(tree, length, 8).ancestors)
    assert mask.positions.shape == (B, 10)


def walked(tree: Tree, row: int, sampled, finite, depth: int) -> tuple[list[int], int, bool]:
    """The query tokens along the path that stands, the token behind it, and whether there is one."""
    path = [0]
    while True:
        node = path[-1]
        children = [i + 1 for i in range(int(tree.count[row])) if tree.parents[row, i] == node]
        agreeing = [child for child in children if finite[node] and tree.tokens[row, child - 1] == sampled[node]]
        if not agreeing:
            return path, int(sampled[node]), bool(finite[node])
        (child,) = agreeing
        path.append(child)
        assert len(path) <= depth + 1


@functools.cache
def planted(N: int, depth: int, seed: int):
    """A tree into which the target's draws are planted here and there, and the logits after its query tokens."""
    tree, rng = random_trees(N, depth, seed, tokens=V), np.random.default_rng(seed)
    logits = logits_of(N, seed)
    logits[2, rng.integers(N)] = np.nan
    query_depths = np.pad(tree.depths, ((0, 0), (1, 0)))
    distribution, sampled = make(logits, WARP, keys_at(query_depths))
    tokens, sampled = np.array(tree.tokens), np.asarray(sampled)
    for row, i in np.ndindex(*tokens.shape):
        parent = int(tree.parents[row, i])
        siblings = tokens[row, np.asarray(tree.parents[row]) == parent]
        if rng.random() < 0.6 and sampled[row, parent] not in siblings:
            tokens[row, i] = sampled[row, parent]
    tree = dataclasses.replace(tree, tokens=tokens)
    return tree, logits, sampled, np.asarray(distribution.finite)


def test_how_deep_drafts_go_and_where_they_end():
    """Drafts that do not count lie behind all others, and are no children."""
    arrays = (np.array([x] * 3, np.int32) for x in ([5, 7, 9, 1], [0, 0, 1, 3], [1, 1, 2, 3]))
    tree: Any = Tree(*arrays, np.array([4, 3, 0]))
    assert jax.jit(lambda tree: tree.deepest)(tree).tolist() == [3, 2, 0]
    goes_on = jax.jit(Tree.goes_on)
    followed = [goes_on(tree, np.full(3, query)).tolist() for query in range(5)]
    assert followed == [[True, True, False], [True, True, False], [False] * 3, [True, False, False], [False] * 3]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("N", "depth"), [(8, 3), (40, 6)])
def test_the_rule_walks_along_the_targets_draws(N, depth, seed):
    tree, logits, sampled, finite = planted(N, depth, seed)
    result, path = jax.device_get(rule(logits, WARP, tree, NOISE, depth=depth))
    chain = jax.device_get(chain_of(tree, path))
    for row in range(B):
        expected, token, ok = walked(tree, row, sampled[row], finite[row], depth)
        assert result.accepted[row] == len(expected) - 1
        assert path[row].tolist() == expected + [0] * (depth + 1 - len(expected))
        assert result.ok[row] == ok
        assert not ok or result.token[row] == token
        drafts = [int(tree.tokens[row, node - 1]) for node in expected[1:]]
        assert chain.tokens[row, : len(drafts)].tolist() == drafts


def test_the_rule_accepts_paths_of_every_length():
    accepted = [
        np.asarray(rule(logits, WARP, tree, NOISE, depth=6)[0].accepted)
        for tree, logits, *_ in (planted(40, 6, seed) for seed in range(12))
    ]
    assert {0, 1, 2, 3} <= set(np.concatenate(accepted).tolist())
