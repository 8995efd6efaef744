"""Shapes of trees, and the settings that have no place beside one: each is refused by its name, with what would do."""

import dataclasses
import re

import pytest
from engines import HYBRID, LATENTS, TARGET
from heads import HEADS

import jspec
from jspec.config import Shards, Speculation, TreeShape
from jspec.config.tree import MAX_BRANCH, MAX_NODES
from jspec.loading.compatibility import check_tree


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"nodes": 1}, "tree.nodes=1: expected an integer in 2..64"),
        ({"nodes": 65}, "tree.nodes=65: expected an integer in 2..64"),
        ({"nodes": 8.0}, "tree.nodes=8.0: expected an integer"),
        ({"nodes": True}, "tree.nodes=True: expected an integer"),
        ({"branch": 0}, "tree.branch=0: expected an integer in 1..16"),
        ({"branch": 17}, "tree.branch=17: expected an integer in 1..16"),
        ({"branch": "4"}, "tree.branch='4': expected an integer in 1..16"),
        ({"depth": 0}, "tree.depth=0: expected an integer in 1..17 with nodes=32 and branch=4"),
        ({"depth": 18}, "tree.depth=18: expected an integer in 1..17 with nodes=32 and branch=4"),
        ({"nodes": 5, "depth": 5}, "tree.depth=5: expected an integer in 1..4 with nodes=5 and branch=4"),
        ({"depth": None}, "tree.depth=None: expected an integer in 1..17"),
        ({"depth": 2, "branch": 2}, "tree.nodes=32: expected at most 7, as many as depth=2 and branch=2 make"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(fields, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        TreeShape(**fields)


def test_every_shape_that_can_be_has_room_for_its_bits():
    for branch in range(1, MAX_BRANCH + 1):
        for depth in range(1, MAX_NODES):
            most = min(branch + (depth - 1) * branch**2 + 1, MAX_NODES)
            if depth > min(most - 1, 1 + MAX_NODES // branch):
                with pytest.raises(ValueError, match=r"^tree\.depth="):
                    TreeShape(most, depth, branch)
                continue
            shape = TreeShape(most, depth, branch)
            assert shape.draft_slots == (depth - 1) * branch <= MAX_NODES
            assert shape.most_drafts >= shape.nodes - 1 >= depth


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_draft_tokens": 5}, "num_draft_tokens=5 has no place with a tree: K is the depth of the tree"),
        ({"num_draft_tokens": "auto"}, "num_draft_tokens='auto' has no place with a tree"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 has no place with a tree"),
        ({"verify": "rejection"}, "verify='rejection' has no place with a tree"),
        ({"verify": "block"}, "verify='block' has no place with a tree"),
        ({"draft_sampling": "sample"}, "draft_sampling='sample' has no place with a tree"),
        ({"draft_sampling": "argmax"}, "draft_sampling='argmax' has no place with a tree"),
        ({"argmax_below": 0.5}, "argmax_below=0.5 has no place with a tree"),
        ({"draft_temperature": 1.0}, "draft_temperature=1.0 has no place with a tree"),
        ({"verify_budget": 2}, "verify_budget=2 has no place with a tree: nodes is how many tokens the target reads"),
        ({"verify_budget": "auto"}, "verify_budget='auto' has no place with a tree"),
        ({"lookup": True}, "lookup=True has no place with a tree: what is looked up is a chain"),
        ({"synthetic_acceptance": 0.5}, "synthetic_acceptance=0.5 has no place with a tree"),
    ],
)
def test_settings_that_have_no_place_with_a_tree(fields, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}.*; leave it out, or leave tree out$"):
        Speculation(tree=TreeShape(8, 3, 2), **fields)


@pytest.mark.parametrize("tree", [True, 8, (8, 3, 2), {"nodes": 8}])
def test_what_is_no_shape_is_refused(tree):
    with pytest.raises(ValueError, match=r"^tree=.*: expected None or a jspec.TreeShape\(nodes=.., depth=.., branch="):
        Speculation(tree=tree)
    with pytest.raises(ValueError, match=r"^max_draft_tokens=3 has no place"):
        Speculation(tree=TreeShape(8, 3, 2), max_draft_tokens=3)


def test_the_shape_decides_the_last_bits():
    """As it decides in which slots drafts lie."""
    chain = Speculation(verify="match", draft_sampling="coupled")
    assert chain.same_text_for_every_K(None, pins_shapes=False)
    assert not Speculation(tree=TreeShape(8, 3, 2)).same_text_for_every_K(8, pins_shapes=False)


def test_a_tree_decides_how_many_drafts_there_are_and_how_they_are_verified():
    settings = Speculation(tree=jspec.TreeShape(8, 3, 2))
    assert (settings.verify, settings.draft_sampling, settings.most_draft_tokens) == ("match", "coupled", 3)
    assert settings.width(rows=1) == settings.width(rows=64) == 8
    assert dataclasses.replace(settings) == settings == settings.fixed(3)
    assert settings == Speculation(3, "match", "coupled", tree=TreeShape(8, 3, 2))
    assert Speculation().verify == "rejection"


WINDOW = dataclasses.replace(TARGET, windows=(12, None, 3))


@pytest.mark.parametrize(
    ("target", "draft", "shards", "said"),
    [
        (LATENTS, HEADS["eagle"], None, "the target caches latents, whose attention has no trees"),
        (HYBRID, HEADS["eagle"], None, "the target has gated delta nets, whose states would have to branch"),
        (TARGET, HEADS["eagle"], Shards(2), "the target is on several GPUs, whose rounds have no trees"),
        (WINDOW, HEADS["eagle"], None, "a window of the target is not longer than 3"),
        (TARGET, None, None, "draft is None"),
        (TARGET, "ngram", None, "'ngram'.*expected one of eagle, eagle3"),
        (TARGET, HEADS["dflash2"], None, "DFlash2, Domino or LiLiCorr"),
        (TARGET, HEADS["domino"], None, "DFlash2, Domino or LiLiCorr"),
        (TARGET, HEADS["lilicorr"], None, "DFlash2, Domino or LiLiCorr"),
        (TARGET, dataclasses.replace(HEADS["dflash"], block_size=3), None, "weights for 2 drafts, fewer than depth=3"),
        (TARGET, HEADS["xpress"], None, "'xpress'.*expected one of eagle, eagle3"),
        (TARGET, HEADS["medusa"], None, "'medusa'.*expected one of eagle, eagle3"),
        (TARGET, HEADS["mtp"], None, "'mtp'.*expected one of eagle, eagle3"),
        (TARGET, HEADS["p-eagle"], None, "'parallel'.*expected one of eagle, eagle3"),
        (TARGET, dataclasses.replace(TARGET), None, "'draft_model'.*expected one of eagle, eagle3"),
    ],
)
def test_models_that_have_no_trees_yet_are_refused(target, draft, shards, said):
    target = target if target is WINDOW else dataclasses.replace(target, windows=())
    with pytest.raises(
        ValueError, match=rf"^tree=TreeShape\(nodes=8, depth=3, branch=2\): .*{said}.*; leave tree out$"
    ):
        check_tree(target, draft, TreeShape(8, 3, 2), (shards, None))
    check_tree(target, draft, None, (shards, None))


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        (LATENTS, HEADS["eagle"], "the target caches latents"),
        (TARGET, "ngram", "draft is 'ngram', expected one of eagle, eagle3"),
        (TARGET, HEADS["dflash"], "draft has weights for 4 drafts, fewer than depth=6"),
        (
            dataclasses.replace(TARGET, windows=(12, None, 6)),
            HEADS["eagle"],
            "a window of the target is not longer than 6",
        ),
    ],
)
def test_models_without_trees_are_refused_under_auto(target, draft, said):
    with pytest.raises(ValueError, match=rf"^tree='auto': {said}.*; leave tree out$"):
        check_tree(target, draft, "auto", (None, None))


def test_a_window_longer_than_the_tree_is_deep_will_do():
    for draft in (HEADS["eagle"], HEADS["eagle3"], HEADS["eagle-small"]):
        check_tree(WINDOW, draft, TreeShape(6, 2, 2), (None, None))
