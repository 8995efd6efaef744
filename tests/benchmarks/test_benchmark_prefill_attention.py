"""The benchmark of prefill attention, on a small shape and interpreted."""

import jax
import numpy as np
import pytest

from benchmarks.kernels import prefill_attention
from benchmarks.kernels.prefill_attention import HEADS, PAGE, PASSES, Pass, flop, queries_of


@pytest.mark.nightly
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 does not interpret Mosaic kernels of this kind")
def test_a_smoke_run_compares_and_measures(measured, capsys):
    result = measured(prefill_attention, "--smoke")
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    assert "triton takes so many times as long as mosaic" in printed
    assert len(result.measured) == 3
    assert all(result.measured[key] > result.floors[key] > 0 for key in result.measured)


def test_segments_that_do_not_fill_blocks_are_timed_beside_longer_ones():
    ways = {name: heads.ways for name, heads in HEADS.items()}
    assert ways["qwen3.6-27b"] == [("mosaic", 64), ("triton", 64)]
    assert ways["qwen2.5-7b"] == [("mosaic", 128), ("triton", 32), ("triton", 128)]
    assert ways["llama-3.1-8b"] == [("mosaic", 32), ("triton", 32)]


@pytest.mark.parametrize("what", [*PASSES, Pass(256, behind=100, prompts=2)], ids=str)
def test_the_floor_counts_the_slots_that_queries_see(what):
    M = -(-what.slots // PAGE)
    table, positions, valid = (np.asarray(x) for x in queries_of(what, 64, M)[:3])
    assert valid.all()
    assert table.shape == (what.tokens // 64, M)
    assert positions.max() < what.slots <= M * PAGE
    heads = HEADS["qwen3.6-27b"]
    assert flop(heads, what) == 4 * heads.N * heads.H * (positions.astype(np.int64) + 1).sum()
    assert len({tuple(row) for row in table.tolist()}) == what.prompts
