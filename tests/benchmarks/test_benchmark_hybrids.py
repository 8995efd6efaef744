"""The benchmark of targets with gated delta nets, at a tiny size."""

from benchmarks.random_modules import abstract_module
from benchmarks.rounds import floors, hybrids
from benchmarks.shapes import QWEN36_27B


def test_a_smoke_run_has_plain_and_mtp_rounds_and_a_prompt(measured):
    result = measured(hybrids, "--smoke", "--bandwidth", "1e11")
    assert [*result.measured] == ["1, tiny-hybrid, batch 2", "2, tiny-hybrid, batch 1", "3, tiny-hybrid, 96 tokens"]
    assert min(result.measured.values()) > 0


def test_the_floor_counts_states_once_read_and_once_written():
    target = abstract_module(QWEN36_27B)
    per_row = 48 * 48 * 128 * 128 * 4
    assert floors.state_bytes(target, 16) == 2 * 16 * per_row
    without = floors.kv_bytes(target, 1024)
    assert without == 2 * 1024 * 16 * 2 * 4 * 256  # 16 layers of four KV heads
    assert floors.target_pass(target, 1, 1, 1024).kv_bytes == without + 2 * per_row
