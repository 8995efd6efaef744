"""Rounds with trees of drafts as XLA compiles them for an H200, without one: no cache and no weight is moved, and launches
stay few."""

import dataclasses
import functools

import jax
import pytest
from deviceless import DRAFTERS, compiled_round, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import launched, moves
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import LLAMA_8B
from jspec.config import TreeShape

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LARGE = 1 << 20  # bytes
# Launches of a round of one row over two layers, by the shape of its trees, under jax 0.11.2; lower them when they fall.
BUDGET = {("eagle3", TreeShape(8, 4, 2)): 152, ("dspark", TreeShape(16, 4, 4)): 114}


@functools.cache
def compiled(method: str, tree: TreeShape):
    target = abstract_module(dataclasses.replace(LLAMA_8B, num_layers=2, windows=()))
    module = abstract_module(DRAFTERS[method], drafts=True)
    what = Decoding(method, tree.depth, 1, start=512, new=256, tree=tree)
    return compiled_round(what, target, module, DRAFTERS[method])


@pytest.mark.parametrize(("method", "tree"), BUDGET, ids=str)
class TestTrees:
    def test_moves_no_cache_and_no_weight(self, method, tree):
        assert [op.line for op in moves(compiled(method, tree)[0].as_text(), LARGE)] == []

    def test_writes_to_the_caches_that_it_was_given(self, method, tree):
        step, state = compiled(method, tree)
        caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache, state.draft)))
        assert step.memory_analysis().alias_size_in_bytes >= caches > LARGE

    def test_launches_no_more_than_it_did(self, method, tree):
        assert (
            0
            < len(launched(compiled(method, tree)[0].as_text(), loop=True))
            <= BUDGET[method, tree] + (12 if jax.__version_info__ >= (0, 12) else 0)
        )
