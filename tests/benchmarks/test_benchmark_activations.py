"""The benchmark of rounded activations: what it times rounds, and its tables have what was measured."""

import jax
import pytest
from flax import nnx

from benchmarks.random_modules import abstract_module
from benchmarks.report import activations_table, results
from benchmarks.rounds.programs import Decoding, rounding
from benchmarks.shapes import TINY
from jspec.models.layers import Linear


@pytest.mark.parametrize("rounded", [False, True])
def test_a_timed_target_rounds_if_it_should(rounded):
    what = Decoding(None, 0, 2, 16, 8, quantization="int8", activations=rounded)
    target = rounding(abstract_module(TINY.with_quantization("int8")), what)
    maps = [part.quantize_inputs for _, part in nnx.iter_graph(target) if isinstance(part, Linear)]
    assert ("int8" in maps) == rounded
    assert ("rounded activations" in str(what)) == rounded
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(nnx.state(target)))


def test_the_tables_have_what_was_measured():
    def figure(key, measured, **details):
        return results.Figure(key, measured, None, None, None, details, None)  # pyright: ignore

    kl = {"mean_kl": 0.00257, "max_kl": 0.036, "top1": 0.97, "positions": 3328}
    keys = ["activations, kl, {} from {}".format(*pair) for pair in activations_table.PAIRS]
    found = {key: figure(key, 0.00257, **kl) for key in keys}
    wanted = "| int8 weights and int8 activations | int8 weights | 2.6e-3 | 3.6e-2 | 97.0% |"
    assert wanted in activations_table.quality(found)
    assert "| drafter, temperature |" not in activations_table.quality(found)
    for i, kind in enumerate(activations_table.KINDS):
        key = f"activations, acceptance, draft, T = 0, {kind}"
        found[key] = figure(key, 3 + i / 10)
    assert "| draft, T = 0 | 3.00 | 3.10 | 3.20 | 3.30 | 3.40 |" in activations_table.quality(found)
    del found[keys[0]]
    assert not activations_table.quality(found)
