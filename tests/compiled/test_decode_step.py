"""The decode step as XLA compiles it for an H200, without one: no full cache or weight is moved, and launches stay few.

Layers have the widths of Llama-3.1-8B, so that a full weight or cache cannot be mistaken for anything else; the tensors
of a step are below 1 MiB, its logits above, which is why a copy of those would be detected as well.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from deviceless import DRAFTERS, compiled_for_h200, compiled_round, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import launched, moves
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import LLAMA_8B

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LARGE = 1 << 20  # bytes
K, LAYERS = 2, 2
# Launches of a round over two layers, by drafter and rows, under jax 0.11.2, whose untuned products are not those of a
# card. Lower them when they fall; raise one only for a gain in time.
BUDGET = {
    (None, 1): 44,
    (None, 16): 38,
    ("draft_model", 1): 91,
    ("draft_model", 16): 73,
    ("eagle3", 1): 94,
    ("eagle3", 16): 75,
    ("dspark", 1): 89,
    ("dspark", 16): 73,
}
LAYER_BUDGET = {1: 12, 16: 11}  # launches of one more layer, by rows
# At one row, jax 0.12 stacks the drafts' scale, cutoff and lse (float32 [1, K] each) in three launches of their own,
# which jax 0.11 fuses with a reduction beside them. They move a few bytes; on a card they have not been timed.
STACKS = 3 if jax.__version_info__ >= (0, 12) else 0
CHOOSING = 20  # launches that choose which drafts are verified, and put tokens and logits in place


def budget(method: str | None, batch: int) -> int:
    more = STACKS + (STACKS > 0 and method in ("dspark", "eagle3"))  # which have one launch more there
    return BUDGET[method, batch] + (more if method and batch == 1 else 0)


@functools.cache
def compiled(method: str | None, batch: int, layers: int, budget: int | None = None):
    """(the compiled rounds of a batch, bytes of the caches in their state). ``budget`` is as for ``Decoding``."""
    target = abstract_module(dataclasses.replace(LLAMA_8B, num_layers=layers, windows=()))
    draft = DRAFTERS[method]
    module = None if draft is None else abstract_module(draft, drafts=True)
    what = Decoding(method, K if method else 0, batch, start=512, new=256, budget=budget)
    step, state = compiled_round(what, target, module, draft)
    caches = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache, state.draft)))
    return step, caches


def kernels(method: str | None, batch: int, layers: int) -> int:
    return len(launched(compiled(method, batch, layers)[0].as_text(), loop=True))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("method", DRAFTERS)
class TestStep:
    def test_moves_no_cache_and_no_weight(self, method, batch):
        assert [op.line for op in moves(compiled(method, batch, LAYERS)[0].as_text(), LARGE)] == []

    def test_writes_to_the_caches_that_it_was_given(self, method, batch):
        step, caches = compiled(method, batch, LAYERS)
        assert step.memory_analysis().alias_size_in_bytes >= caches > LARGE

    def test_launches_no_more_than_it_did(self, method, batch):
        assert 0 < kernels(method, batch, LAYERS) <= budget(method, batch)


@pytest.mark.parametrize("method", ["eagle3", "dspark"])
class TestBudget:
    """Rounds of 16 rows in which the target reads 32 of 48 tokens."""

    def test_moves_no_cache_and_no_weight(self, method):
        assert [op.line for op in moves(compiled(method, 16, LAYERS, 32)[0].as_text(), LARGE)] == []

    def test_a_layer_launches_as_much_as_without(self, method):
        """Attention reads the tokens of the ragged view where they lie."""

        def of_layer(budget):
            few, more = (
                len(launched(compiled(method, 16, layers, budget)[0].as_text(), loop=True))
                for layers in (LAYERS, LAYERS + 1)
            )
            return more - few

        assert 0 < of_layer(32) <= LAYER_BUDGET[16]

    def test_selecting_drafts_launches_little(self, method):
        step, _ = compiled(method, 16, LAYERS, 32)
        more = len(launched(step.as_text(), loop=True)) - kernels(method, 16, LAYERS)
        assert 0 < more <= CHOOSING


@pytest.mark.parametrize("batch", [1, 16])
def test_a_layer_launches_no_more_than_it_did(batch):
    assert 0 < kernels(None, batch, LAYERS + 1) - kernels(None, batch, LAYERS) <= LAYER_BUDGET[batch]


class TestChecker:
    """Programs with an evident fault."""

    shape = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)

    def test_detects_a_transpose(self):
        step = compiled_for_h200(lambda weight: weight.T, self.shape)
        assert [op.bytes for op in moves(step.as_text(), LARGE)] == [2 * self.shape.size]

    def test_detects_a_transpose_inside_a_loop(self):
        def transposed(_, weight):
            return jnp.swapaxes(weight, 0, 1).reshape(weight.shape) + 1

        step = compiled_for_h200(
            lambda weight: jax.lax.fori_loop(0, 3, transposed, weight), self.shape, donate_argnums=0
        )
        assert {op.bytes for op in moves(step.as_text(), LARGE)} == {2 * self.shape.size}

    def test_detects_a_copy_of_an_array_that_was_not_donated(self):
        def write(cache):
            return cache.at[3, 5].set(1)

        bytes_moved = lambda step: [op.bytes for op in moves(step.as_text(), LARGE)]  # noqa: E731
        assert bytes_moved(compiled_for_h200(write, self.shape)) == [2 * self.shape.size]
        assert bytes_moved(compiled_for_h200(write, self.shape, donate_argnums=0)) == []
