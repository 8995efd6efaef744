"""Rounds of draft trees: texts are the target's own, a tree follows from the text alone; and faults that show in either."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tree_bench import SHAPE, S, TreeBench, assert_texts, assert_trees, paths_of

from jspec.config import TreeShape
from jspec.drafting.tree import EagleTree, Level
from jspec.engine.runner import step as a_step
from jspec.engine.runner import tree as ends_of_rounds
from jspec.pallas.attention.move_path import move_path
from jspec.sampling.streams import RoundNoise
from jspec.sampling.tree import Tree

bench = functools.cache(TreeBench)
SHAPES = [(5, 4, 1), (40, 4, 4), (3, 1, 2), (13, 2, 3), (20, 6, 2)]  # nodes, depth, branch


def check(played: TreeBench):
    rounds, text = played.play()
    assert_texts(played, text)
    assert_trees(played, rounds)
    return rounds, text


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        ("eagle", SHAPE),
        pytest.param("eagle3", SHAPE, marks=pytest.mark.nightly),
        *(pytest.param("eagle", TreeShape(*shape), marks=pytest.mark.nightly) for shape in SHAPES),
        pytest.param("eagle3", TreeShape(12, 3, 4), marks=pytest.mark.nightly),
        *(pytest.param(head, SHAPE, marks=pytest.mark.nightly) for head in ("dflash", "dspark", "dspark-rnn")),
        *(pytest.param(head, TreeShape(30, 3, 4), marks=pytest.mark.nightly) for head in ("dflash", "dspark-rnn")),
    ],
    ids=str,
)
def test_texts_and_trees(head, shape):
    """To the last slot of every row; a request may want any number of drafts."""
    played = bench(head, shape)
    rounds, text = check(played)
    accepted = np.array([one.accepted[row] for one in rounds for row in np.flatnonzero(one.live)])
    assert {0, 1} <= set(accepted.tolist())
    assert accepted.max() >= min(shape.depth, 3)
    for most in (0, 1, 3, 20):
        fewer, same = played.play(max_drafts=most)
        assert (same == text).all()
        assert_trees(played, fewer, max_drafts=most)
        assert (len(fewer) == S - 1) == (most == 0)


def ancestors_without(missing: str):
    whole = Tree.ancestors.fget
    assert whole is not None

    def some(self):
        words = whole(self)
        if missing == "root":
            return words.at[:, 1:, 0].set(words[:, 1:, 0] & ~jnp.uint32(1))
        parents = jnp.pad(self.parents, ((0, 0), (1, 0)))
        bit = jnp.where(jnp.arange(parents.shape[1]) > 0, jnp.uint32(1) << parents.astype(jnp.uint32), jnp.uint32(0))
        return words & ~bit[..., None]

    return property(some)


def moved_by(slots: int):
    def moved(cache, table, source, target):
        return move_path(cache, table, jnp.where(source < 0, -1, source + slots), target)

    return moved


def follow_with_features_of_the_next_node(state, tree, processing, logits, features, *rest):
    features = features.at[:, 1:].set(jnp.roll(features[:, 1:], -1, axis=1))
    return ends_of_rounds.follow(state, tree, processing, logits, features, *rest)


def keys_of_places(self, offset):
    """Noise of the place of a draft among all, where it should be that of its depth."""
    return sample_keys(self, jnp.broadcast_to(jnp.arange(offset.shape[1], dtype=jnp.int32)[None], offset.shape))


def keys_of_the_next_position(self, offset):
    return sample_keys(self, offset + 1)


sample_keys, likeliest, mask = RoundNoise.sample_keys, EagleTree._likeliest, Tree.mask


def likeliest_past_the_end(self, levels, context):
    return likeliest(self, levels, dataclasses.replace(context, tokens=jnp.pad(context.tokens, ((0, 0), (0, 2)))))


def mask_of_slots(self, length, width):
    right = mask(self, length, width)
    return right._replace(positions=right.root[:, None] + jnp.arange(width, dtype=jnp.int32)[None])


def random_levels(shape: TreeShape, rng: np.random.Generator, B: int) -> list[Level]:
    """All drafts of trees. A draft is often certain, so that paths are as likely as their beginnings, and often none."""
    W, levels, first = shape.branch, [], 0
    above, parents = np.zeros((B, 1), np.float32), np.full((B, 1), -1)
    for _ in range(shape.depth):
        likely = np.sort(rng.choice([0.0, -0.5, -1.0, -np.inf], size=(B, above.shape[1], W)), axis=2)[:, :, ::-1]
        scores = (above[:, :, None] + likely).reshape(B, -1).astype(np.float32)
        tokens = np.tile(np.arange(W), (B, above.shape[1]))
        levels.append(Level(*map(np.int32, (tokens, 0, np.repeat(parents, W, axis=1))))._replace(scores=scores))
        which = np.argsort(-scores, axis=1, kind="stable")[:, :W]
        above = np.take_along_axis(scores, which, axis=1)
        parents, first = first + which, first + scores.shape[1]
    return levels


@pytest.mark.parametrize("shape", [(8, 3, 2), (20, 4, 3), (33, 3, 4), (4, 1, 3)])
def test_the_likeliest_paths_make_a_tree(shape):
    """As many as there is room for, each behind the one that it follows, although some are as likely as others."""
    shape, B = TreeShape(*shape), 200
    levels = random_levels(shape, np.random.default_rng(0), B)
    slots = 70
    length, most = np.arange(B) % slots + 1, np.array([0, 1, 5, 99])[np.arange(B) % 4]
    tokens = np.zeros((B, slots), np.int32)
    length, most = length.astype(np.int32), most.astype(np.int32)

    @jax.jit
    def tree_of(levels, length, most):
        context: Any = SimpleNamespace(tokens=tokens, length=length, max_drafts=most)
        return EagleTree(chain=None, shape=shape)._likeliest(levels, context)

    tree = jax.device_get(tree_of(levels, length, most))
    scores, parents = (
        np.concatenate([np.asarray(x) for x in part], axis=1) for part in list(zip(*levels, strict=True))[1:]
    )
    depths = np.concatenate([np.full(level.scores.shape[1], i + 1) for i, level in enumerate(levels)])
    sizes = set()
    for row in range(B):
        best = sorted(range(len(depths)), key=lambda draft: (-scores[row, draft], draft))
        best = [draft for draft in best if np.isfinite(scores[row, draft])]
        chosen = sorted(best[: min(shape.nodes - 1, slots - length[row], most[row])])
        paths = paths_of(tree, row)
        assert len(paths) == len(chosen)
        assert [len(path) for path in paths] == depths[chosen].tolist()
        for place, draft in enumerate(chosen):
            parent = parents[row, draft]
            assert tree.parents[row, place] == (0 if parent < 0 else 1 + chosen.index(parent))
        sizes.add(len(paths))
    assert {0, 1, min(5, shape.nodes - 1), shape.nodes - 1} <= sizes


TEXT = "the text is not the target's own"
FAULTS = {  # the program that has it, where it is put, and what it leads to
    "the mask lacks a parent": ("verify", Tree, "ancestors", ancestors_without("parent"), TEXT),
    "the mask lacks the root": ("verify", Tree, "ancestors", ancestors_without("root"), TEXT),
    "positions are slots": ("verify", Tree, "mask", mask_of_slots, TEXT),
    "accepted slots stay": ("verify", ends_of_rounds, "move_path", lambda cache, *_: cache, TEXT),
    "the next slot is moved": ("verify", ends_of_rounds, "move_path", moved_by(1), TEXT),
    "the target draws with noise of a place": ("verify", RoundNoise, "sample_keys", keys_of_places, TEXT),
    "features of the next node": (
        *("verify", a_step, "follow", follow_with_features_of_the_next_node),
        "the tree depends on the rounds before it",
    ),
    "children with noise of another position": (
        *("draft", RoundNoise, "sample_keys", keys_of_the_next_position),
        "the chain's draft is not the likeliest child",
    ),
    "a tree past the last slot": ("draft", EagleTree, "_likeliest", likeliest_past_the_end, TEXT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tree_is_detected(fault, monkeypatch):
    program, owner, name, wrong, said = FAULTS[fault]
    right = bench("eagle", SHAPE)
    right.play()  # which compiles the other programs
    monkeypatch.setattr(owner, name, wrong)
    played = TreeBench("eagle", SHAPE, like=right, anew=program)
    with pytest.raises(AssertionError, match=said):
        check(played)


@pytest.mark.nightly
def test_a_window_that_the_deepest_drafts_leave_is_detected():
    """Which is why ``load`` refuses it: a window counts slots of the tree, in which an ancestor may be nearer than it is in
    the text."""
    with pytest.raises(AssertionError, match=TEXT):
        check(TreeBench("eagle", TreeShape(20, 6, 2), window=2))
