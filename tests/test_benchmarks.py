"""The benchmark of the round: it runs, says what it did, and counts floors as they were counted by hand."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from benchmarks import bandwidth, efficiency, hlo, round
from benchmarks.floors import draft_passes, floor, target_pass
from benchmarks.programs import Decoding
from benchmarks.shapes import LLAMA_1B, LLAMA_8B, SHAPES, TINY, Pair, abstract_module, head_for, random_module
from jspec.engine.costs import CostTable
from jspec.models.split import split

RATE = 4.3e12
SHALLOW = dataclasses.replace(TINY, num_layers=2, windows=())
SMOKE = ["round", "--smoke", "--rows", "1", "9", "2", "--batches", "1"]


@pytest.fixture
def shallow(monkeypatch):
    """Two layers compile sooner than seven."""
    monkeypatch.setitem(SHAPES, "tiny", Pair(SHALLOW, SHALLOW))


@pytest.mark.usefixtures("shallow")
def test_smoke_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [*SMOKE, "--json", str(tmp_path / "out.json")])
    assert round.main() == 0
    printed = capsys.readouterr().out.splitlines()[3:]
    found = json.loads((tmp_path / "out.json").read_text())
    assert [line["row"] for line in found["lines"]] == [1, 9, 2, 2] == [int(line.split()[0]) for line in printed]
    assert found["smoke"]
    assert found["failed"] == []
    assert all(line["measured"] > line["floor"] > 0 and line["kernels"] > 0 for line in found["lines"])
    assert all(line["goal"] is None for line in found["lines"])  # they are for another shape
    marked = ["synthetic acceptance 0.7" in line for line in printed]
    assert marked == [False, True, False, False]
    assert 1 < found["lines"][1]["tokens"] <= 5


@pytest.mark.usefixtures("shallow")
def test_a_line_that_fails_is_told_and_costs_no_other(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [*SMOKE, "--json", str(tmp_path / "out.json")])
    plain = lambda self, what: time(self, what) if what.K == 0 else 1 / 0  # noqa: E731
    time = round.Bench.time
    monkeypatch.setattr(round.Bench, "time", plain)
    monkeypatch.setattr(round.Table, "narrow_passes", lambda *_: iter([]))
    assert round.main() == 1
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "ZeroDivisionError" in err
    found = json.loads((tmp_path / "out.json").read_text())
    assert ([line["row"] for line in found["lines"]], found["failed"]) == ([1], [[9, 1]])


def test_lines_are_those_of_the_table():
    lines = round.Table(None, 1, goals=True).lines()  # pyright: ignore[reportArgumentType]
    assert {row for row, *_ in lines} == {1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15}
    picked = round.chosen(lines, [9, 3], [16, 64])
    assert [line[:2] for line in picked] == [(9, 16), (9, 64), (3, 16), (3, 64)]


@pytest.fixture(scope="module")
def llama():
    return abstract_module(LLAMA_8B)


@pytest.mark.parametrize(
    ("batch", "width", "length", "milliseconds"),
    [
        (1, 1, 1024, 3.5),
        (16, 1, 640, 3.8),
        (64, 1, 640, 4.7),
        (16, 5, 1024, 4.0),
        (16, 5, 512, 3.7),
        (64, 5, 1024, 8.1),
    ],
)
def test_floors_of_the_target(llama, batch, width, length, milliseconds):
    assert 1e3 * floor([target_pass(llama, batch, width, length)], RATE) == pytest.approx(milliseconds, abs=0.08)


@pytest.mark.parametrize(
    ("method", "batch", "length", "milliseconds"),
    [
        *(("eagle", 1, 640, 5.0), ("eagle", 16, 640, 5.3), ("eagle", 64, 640, 9.0), ("eagle3", 1, 1024, 4.2)),
        *(("draft_model", 1, 640, 5.8), ("draft_model", 16, 640, 6.4), ("draft_model", 64, 640, 10.9)),
    ],
)
def test_floors_of_rounds(llama, method, batch, length, milliseconds):
    module = abstract_module(LLAMA_1B if method == "draft_model" else head_for(LLAMA_8B, method), 1)
    passes = [target_pass(llama, batch, 5, length), *draft_passes(llama, module, 4, batch, length)]
    assert 1e3 * floor(passes, RATE) == pytest.approx(milliseconds, abs=0.08)


def test_rounds_of_a_text():
    what = Decoding("eagle", 4, 1, 512, 256)
    assert what.rounds == 92  # 256 / (1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert Decoding(None, 0, 1, 512, 256).rounds == 256
    assert what.capacity % 64 == 0
    assert what.capacity > 512 + 256


def test_random_modules_are_ready_to_serve():
    config = head_for(TINY, "parallel")
    made, promised = (split(make(config, 1, "float32")).leaves for make in (random_module, abstract_module))
    assert [leaf.shape for leaf in made] == [leaf.shape for leaf in promised]
    assert random_module(config, 1, "float32").mask_hidden is None


def test_sums_of_both_ways_to_read():
    x = np.random.default_rng(0).normal(size=(2, bandwidth.ROW)).astype(np.float32)
    expected = np.maximum(x, 0.5).sum(axis=1)
    np.testing.assert_allclose(bandwidth.sum_by_xla(x, np.float32(0.5)), expected, rtol=1e-4)
    np.testing.assert_allclose(bandwidth.sum_by_pallas(x, np.float32(0.5), interpret=True), expected, rtol=1e-4)
    assert bandwidth.read_rate({"read, XLA": 1.0, "read, Pallas": 3.0, "copy": 9.0}) == 3.0


HLO = """
%fused_computation (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %t = f32[8]{0} transpose(%p), dimensions={0}
}

%body (s: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %s = (s32[], f32[4,2]{1,0}) parameter(0)
  %x = f32[4,2]{1,0} get-tuple-element(%s), index=1
  %wrapped_transpose = f32[4,2]{0,1} fusion(%x), kind=kLoop, calls=%fused_computation
  %product = (f32[4,2]{1,0}, s8[16]{0}) custom-call(%x), custom_call_target="__cublas$gemm"
  ROOT %out = (s32[], f32[4,2]{1,0}) tuple(%s, %x)
}

%condition (s: (s32[], f32[4,2])) -> pred[] {
  %s.1 = (s32[], f32[4,2]{1,0}) parameter(0)
  ROOT %less = pred[] fusion(%s.1), kind=kLoop, calls=%fused_computation
}

ENTRY %main (a: f32[4,2]) -> f32[4,2] {
  %a = f32[4,2]{1,0} parameter(0)
  %copy.1 = bf16[4,2]{1,0} copy(%a)
  %loop = (s32[], f32[4,2]{1,0}) while(%a), condition=%condition, body=%body
  ROOT %result = f32[4,2]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_kernels_of_a_program():
    assert [op.name for op in hlo.launched(HLO, loop=True)] == ["wrapped_transpose", "product"]
    assert {op.name for op in hlo.launched(HLO)} == {"copy.1", "less", "wrapped_transpose", "product"}
    assert {op.name: op.bytes for op in hlo.launched(HLO, loop=True)}["product"] == 48


def test_moves_of_a_program():
    assert {op.name: op.bytes for op in hlo.moves(HLO, at_least=1)} == {"copy.1": 16, "wrapped_transpose": 32}
    assert [op.name for op in hlo.moves(HLO, at_least=17)] == ["wrapped_transpose"]


class TestEfficiency:
    @pytest.mark.usefixtures("shallow")
    def test_smoke_run_writes_a_table_of_costs(self, monkeypatch, capsys, tmp_path):
        options = ["efficiency", "--smoke", "--out", str(tmp_path), "--method", "eagle"]
        for drafts in (["0"], ["2"]):  # the second run adds to the first
            monkeypatch.setattr(sys, "argv", [*options, "--batches", "1", "--drafts", *drafts])
            assert efficiency.main() == 0
        assert "synthetic acceptance 0.7" in capsys.readouterr().out
        costs = CostTable.read(tmp_path / "efficiency-eagle.json")
        assert (costs.device, costs.method, list(costs.rounds[1])) == ("cpu", "eagle", [0, 2])
        assert "synthetic acceptance 0.7" in (tmp_path / "efficiency-eagle.md").read_text()
        assert (tmp_path / "efficiency-eagle.png").stat().st_size > 1000

    def test_speed_up_is_tokens_over_time(self):
        costs = efficiency.Costs("card", "eagle", "tiny", "bfloat16", 0.7, RATE)
        for K, seconds in ((4, 6e-3), (0, 4e-3), (1, 5e-3)):
            costs.put(16, K, seconds, seconds / 2, 10)
        assert list(costs.rounds["16"]) == ["0", "1", "4"]
        assert costs.speed_up("16", "4", 3.0) == pytest.approx(2.0)
        assert costs.speed_up("16", "1", 2.0) == pytest.approx(1.6)
        assert costs.speed_up("16", "1", 2.5) is None  # a round with one draft gives two tokens at most
        row = next(line for line in efficiency.markdown(costs).splitlines() if line.startswith("| 1 |"))
        assert row == "| 1 | 5.000 | 2.500 | 2.00 | 10 | 1.20 | 1.60 | - | - |"

    def test_the_table_in_the_docs(self):
        file = efficiency.DOCS / "efficiency-eagle3.json"
        table = CostTable.read(file)
        assert {batch: list(rounds) for batch, rounds in table.rounds.items()} == {
            batch: list(efficiency.DRAFTS) for batch in efficiency.BATCHES
        }
        costs = efficiency.Costs(**json.loads(file.read_text()))
        assert file.with_suffix(".md").read_text() == efficiency.markdown(costs)

    def test_other_figures_are_not_mixed_in(self, tmp_path):
        file = tmp_path / "costs.json"
        stored = efficiency.Costs("card", "eagle", "tiny", "bfloat16", 0.7, RATE, rounds={"1": {"0": 1.0}})
        file.write_text(json.dumps(dataclasses.asdict(stored)))
        assert efficiency.of_same(file, dataclasses.replace(stored, rounds={}, bandwidth=1.0)) == stored
        other = dataclasses.replace(stored, rounds={}, device="another card")
        assert efficiency.of_same(file, other) is other
