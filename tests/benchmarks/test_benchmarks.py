"""The benchmarks run and say what they did, and floors are as they were counted by hand."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import tables
from benchmarks.acceptance import editing, small_drafts
from benchmarks.host import loading, shards
from benchmarks.kernels import bandwidth, verify
from benchmarks.kernels.references import Comparison
from benchmarks.random_modules import abstract_module, random_module
from benchmarks.report import results
from benchmarks.rounds import efficiency, families, hlo, quantization, round
from benchmarks.rounds.floors import draft_passes, floor, target_pass
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import LLAMA_1B, LLAMA_8B, SHAPES, TINY, Pair, head_for
from convert.folders import load_folder, read_draft_config
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.engine.adaptive.cost_table import CostTable
from jspec.models.flatten import flatten

RATE = 4.3e12
SHALLOW = dataclasses.replace(TINY, num_layers=2, windows=())
SMOKE = ["--smoke", "--lines", "1", "9", "2", "--batches", "1"]


@pytest.fixture
def shallow(monkeypatch):
    """Two layers compile sooner than seven."""
    monkeypatch.setitem(SHAPES, "tiny", Pair(SHALLOW, SHALLOW))


@pytest.mark.usefixtures("shallow")
def test_a_smoke_run_of_rounds_writes_its_lines(measured, capsys):
    result = measured(round, *SMOKE)
    printed = capsys.readouterr().out.splitlines()[3:]
    assert list(result.measured) == ["1", "9, batch 1", "2, T = 5", "2, T = 8"]
    assert (
        [details["line"] for details in result.details.values()]
        == [1, 9, 2, 2]
        == [int(line.split()[0]) for line in printed]
    )
    assert result.settings["smoke"]
    assert result.settings["failed"] == result.settings["left_out"] == []
    assert all(result.measured[key] > result.floors[key] > 0 for key in result.measured)
    assert all(details["kernels"] > 0 for details in result.details.values())
    assert result.goals == {}  # they are for another shape
    marked = ["synthetic acceptance 0.7" in line for line in printed]
    assert marked == [False, True, False, False]
    assert 1 < result.details["9, batch 1"]["tokens"] <= 5
    assert result.versions["jax"] == jax.__version__
    assert result.device["kind"] == "cpu"
    assert result.command == " ".join(["python -m benchmarks.rounds.round", *sys.argv[1:-1], "out.json"])


def test_a_smoke_run_of_families_has_a_goal_beside_the_floor(measured):
    result = measured(families, "--smoke")
    assert list(result.measured) == ["1, tiny, batch 2"]
    assert result.goals["1, tiny, batch 2"]["goal"] == pytest.approx(1.5 * result.floors["1, tiny, batch 2"])


def test_editing_tasks_copy_code_with_another_name():
    """A prompt is a piece of code, and the beginning of a copy of it that differs in one name."""
    tokenizer = load_tokenizer(FAMILY / "target")
    assert tokenizer is not None
    tasks = editing.tasks(tokenizer, functions=4)
    assert 4 <= len(tasks) <= 12
    assert tasks == editing.tasks(tokenizer, functions=4)
    for prompt, continuation in tasks:
        text = tokenizer.decode([*prompt, *continuation], skip_special_tokens=False)
        code, copy = text[: len(text) // 2], text.replace("new_", "")
        assert code != text[len(code) + 1 :]
        assert copy[: len(copy) // 2] == copy[len(copy) // 2 + 1 :]
        assert len(continuation) >= editing.MAX_TOKENS


class TestLoading:
    def test_a_smoke_run_leaves_its_result_alone(self, monkeypatch, capsys, tmp_path):
        """Nothing stays on the disk but the result."""
        (tmp_path / "disk").mkdir()
        options = ["--dir", str(tmp_path / "disk"), "--converted", "--json", str(tmp_path / "out.json")]
        monkeypatch.setattr(sys, "argv", ["loading", "--smoke", *options])
        assert loading.main() == 0
        assert not any((tmp_path / "disk").iterdir())
        result = results.read(tmp_path / "out.json")
        keys = (
            "disk, one reader",
            "disk, 8 readers",
            "load, one device",
            "load, a shard of two",
            "load, one device, cached",
        )
        assert list(result.measured) == [f"{kind}, {key}" for kind in ("safetensors", "converted") for key in keys]
        assert result.floors.keys() == {key for key in result.measured if key.endswith(("e device", "of two"))}
        whole, shard = (result.details[f"converted, load, {what}"] for what in ("one device", "a shard of two"))
        assert 0.2 < shard["bytes"] / whole["bytes"] < 0.5  # the vocabulary is one group, which the first shard has
        assert whole["rate"] == pytest.approx(whole["bytes"] / result.measured["converted, load, one device"])
        assert "% of the disk's rate" in capsys.readouterr().out

    def test_a_disk_that_is_too_small_is_refused(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(sys, "argv", ["loading", "--dir", str(tmp_path), "--layers", "1000000"])
        with pytest.raises(SystemExit):
            loading.main()
        assert "--layers 1000000: " in capsys.readouterr().err

    def test_the_checkpoint_is_of_the_shape(self, tmp_path):
        config = loading.config_of(2, smoke=True)
        loading.write_checkpoint(tmp_path, config)
        read, params = load_folder(tmp_path)
        assert read == config
        assert all(np.isfinite(array.astype(np.float32)).all() for array in params.values())

    def test_evicted_files_leave_the_page_cache(self, tmp_path):
        """A file that was just read is there, where the file system says so."""
        (tmp_path / "x").write_bytes(bytes(1 << 20))
        assert loading.put_out([tmp_path / "x"]) in (None, pytest.approx(0, abs=0.5), 1.0)  # 1.0 of one in memory alone
        loading.read_all([tmp_path / "x"], 2)
        with (tmp_path / "x").open("rb") as file:
            try:
                assert loading._is_cached(file.fileno(), 0)
            except NotImplementedError:
                pytest.skip("this file system does not say what is in the page cache")


def test_tables_of_what_a_gpu_holds_are_in_the_guide(capsys):
    assert shards.main() == 0
    docs = Path(__file__).parents[2] / "docs"
    held, needed, _, trained = capsys.readouterr().out.strip().split("\n\n")
    assert held in (docs / "guides" / "distributed.md").read_text()
    assert needed in (docs / "guides" / "distributed.md").read_text()
    assert trained in (docs / "guides" / "training.md").read_text()


def test_no_line_begins_after_the_time_is_over(measured):
    result = measured(round, *SMOKE, "--seconds", "-1")
    assert (result.measured, result.settings["left_out"]) == ({}, [[1, 1], [9, 1], [2, 1]])


@pytest.mark.usefixtures("shallow")
def test_a_failed_line_is_reported_and_costs_no_other(measured, monkeypatch, capsys):
    plain = lambda self, what: time(self, what) if what.K == 0 else 1 / 0  # noqa: E731
    time = round.Bench.time
    monkeypatch.setattr(round.Bench, "time", plain)
    monkeypatch.setattr(round.Table, "narrow_passes", lambda *_: iter([]))
    result = measured(round, *SMOKE, code=1)
    out, err = capsys.readouterr()
    assert "FAILED" in out
    assert "ZeroDivisionError" in err
    assert (list(result.measured), result.settings["failed"]) == (["1"], [[9, 1]])


def test_lines_are_those_of_the_table():
    lines = round.Table(None, 1, goals=True).lines()  # pyright: ignore[reportArgumentType]
    assert {line for line, *_ in lines} == {1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19}
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
def test_floors_of_the_target_are_as_counted_by_hand(llama, batch, width, length, milliseconds):
    assert 1e3 * floor([target_pass(llama, batch, width, length)], RATE) == pytest.approx(milliseconds, abs=0.08)


@pytest.mark.parametrize(
    ("method", "tokens", "kind", "batch", "length", "milliseconds"),
    [
        *(("eagle", None, None, *row) for row in ((1, 640, 5.0), (16, 640, 5.3), (64, 640, 9.0))),
        *(("draft_model", None, None, *row) for row in ((1, 640, 5.8), (16, 640, 6.4), (64, 640, 10.9))),
        *(("eagle3", None, None, 1, 1024, 4.2), ("mtp", 32_768, None, 1, 640, 4.25)),
        *(("eagle", 32_768, None, 1, 640, 4.25), ("eagle", 32_768, "int4", 1, 640, 3.71)),
        *(("eagle", 32_768, "int8", *row) for row in ((1, 640, 3.9), (64, 640, 7.84))),
        *(("draft_model", 32_768, "int8", *row) for row in ((1, 640, 4.55), (64, 640, 9.55))),
    ],
)
def test_floors_of_rounds_are_as_counted_by_hand(llama, method, tokens, kind, batch, length, milliseconds):
    """With 32,768 draft tokens an EAGLE head, as an MTP layer, has 252 million weights, and 134 million in its output
    head."""
    config = LLAMA_1B if method == "draft_model" else head_for(LLAMA_8B, method)
    config = config if tokens is None else config.with_draft_vocabulary(tokens)
    module = abstract_module(config if kind is None else config.with_quantization(kind), 1, drafts=True)
    passes = [target_pass(llama, batch, 5, length), *draft_passes(llama, module, 4, batch, length)]
    assert 1e3 * floor(passes, RATE) == pytest.approx(milliseconds, abs=0.08)


def test_small_drafts_have_the_chosen_weights_and_vocabulary(tmp_path):
    """What is measured of a drafter, and how its folder is made."""
    of_all_tokens = [("bf16", None), ("int8", None), ("fp8", None), ("int4", None)]
    assert small_drafts.variants("eagle3") == of_all_tokens  # it has a draft vocabulary
    assert small_drafts.variants("eagle", ["int4"]) == [("int4", None)]
    assert small_drafts.variants("eagle")[4:] == [("int8", 1024), ("int8", 512), ("int8", 256)]
    (tmp_path / "corpus.txt").write_text("def f(x):\n    return x\n")
    folder = small_drafts.converted("eagle", "int8", 256, tmp_path / "corpus.txt", tmp_path)
    config = read_draft_config(folder)
    assert (config.quantization, config.dimensions["Vd"], config.dimensions["V"]) == ("int8", 256, 2048)


def test_rounds_of_a_text_follow_from_the_acceptance():
    what = Decoding("eagle", 4, 1, 512, 256)
    assert what.rounds == 92  # 256 / (1 + 0.7 + 0.49 + 0.343 + 0.2401)
    assert Decoding(None, 0, 1, 512, 256).rounds == 256
    assert what.capacity % 64 == 0
    assert what.capacity > 512 + 256


def test_random_modules_are_ready_to_serve():
    config = head_for(TINY, "parallel")
    made, promised = (flatten(make(config, 1, "float32")).leaves for make in (random_module, abstract_module))
    assert [leaf.shape for leaf in made] == [leaf.shape for leaf in promised]
    assert random_module(config, 1, "float32").mask_feature is not None


def test_both_ways_to_read_give_the_same_sums():
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


def test_launched_kernels_are_those_of_the_program():
    assert [op.name for op in hlo.launched(HLO, loop=True)] == ["wrapped_transpose", "product"]
    assert {op.name for op in hlo.launched(HLO)} == {"copy.1", "less", "wrapped_transpose", "product"}
    assert {op.name: op.bytes for op in hlo.launched(HLO, loop=True)}["product"] == 48


def test_moves_are_large_copies_and_transposes():
    assert {op.name: op.bytes for op in hlo.moves(HLO, at_least=1)} == {"copy.1": 16, "wrapped_transpose": 32}
    assert [op.name for op in hlo.moves(HLO, at_least=17)] == ["wrapped_transpose"]


class TestEfficiency:
    @pytest.mark.usefixtures("shallow")
    def test_smoke_run_gives_a_table_of_costs(self, monkeypatch, capsys, tmp_path):
        file = tmp_path / "result.json"
        options = ["efficiency", "--smoke", "--json", str(file), "--method", "eagle"]
        monkeypatch.setattr(sys, "argv", [*options, "--batches", "1", "--drafts", "0", "2"])
        assert efficiency.main() == 0
        assert "synthetic acceptance 0.7" in capsys.readouterr().out
        costs = efficiency.costs_of([results.read(file)])
        (tmp_path / "costs.json").write_text(json.dumps(costs.table))
        table = CostTable.read(tmp_path / "costs.json")
        assert (table.device, table.method, list(table.rounds[1])) == ("cpu", "eagle", [0, 2])
        efficiency.plot(costs, tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000

    def test_speed_up_is_tokens_over_time(self):
        costs = efficiency.costs_of([self.run("2026-01-01", {"16": {"4": 6e-3, "0": 4e-3, "1": 5e-3}})])
        assert list(costs.rounds["16"]) == ["0", "1", "4"]
        assert costs.speed_up("16", "4", 3.0) == pytest.approx(2.0)
        assert costs.speed_up("16", "1", 2.0) == pytest.approx(1.6)
        assert costs.speed_up("16", "1", 2.5) is None  # a round with one draft gives two tokens at most
        assert costs.break_even("16", "4") == pytest.approx(1.5)
        row = next(line for line in efficiency.markdown(costs).splitlines() if line.startswith("| 1 |"))
        assert row == "| 1 | 5.000 | 2.500 | 2.00 | 10 | 1.20 | 1.60 | - | - |"

    def test_rounds_of_a_batch_are_of_one_run(self):
        """The last run does not replace a batch size of which it has fewer rounds."""
        early = self.run("2026-01-01", {"1": {"0": 1.0, "1": 1.1}, "4": {"0": 2.0, "1": 2.1}})
        late = self.run("2026-01-02", {"1": {"0": 0.5, "1": 0.6}, "4": {"0": 1.0}})
        costs = efficiency.costs_of([early, late])
        assert costs.rounds == {"1": late.measured["1"], "4": early.measured["4"]}
        assert [one.date for one in costs.measured_in.values()] == ["2026-01-02", "2026-01-01"]

    def test_the_table_in_the_docs_has_every_batch_and_number_of_drafts(self):
        """Users load it by its path."""
        table = CostTable.read(tables.PAGES / "efficiency-eagle3.json")
        assert {batch: list(rounds) for batch, rounds in table.rounds.items()} == {
            batch: list(efficiency.DRAFTS) for batch in efficiency.BATCHES
        }

    @staticmethod
    def run(date: str, rounds: dict) -> results.Result:
        """A run of these rounds, with floors of half their time and ten launches each."""
        settings = {"method": "eagle", "shape": "tiny", "dtype": "bfloat16", "synthetic_acceptance": 0.7}
        floors = {batch: {K: x / 2 for K, x in row.items()} for batch, row in rounds.items()}
        kernels = {batch: dict.fromkeys(row, 10) for batch, row in rounds.items()}
        made = results.begin("efficiency", settings, RATE)
        return dataclasses.replace(made, date=date, measured=rounds, floors=floors, details={"kernels": kernels})


@pytest.mark.parametrize("mismatches", [0, 7])
def test_a_smoke_run_of_verification_reports_mismatches(measured, monkeypatch, mismatches):
    """It fails if a kernel decides otherwise than its reference implementation, and says in the result how often."""
    one = Comparison("draw", 257, "float32", 16, mismatches, 0.0, 0.0, ok=mismatches == 0)
    monkeypatch.setattr(verify, "check", lambda *_: iter([one]))
    monkeypatch.setattr(verify, "seconds_per_call", lambda *_: 1e-3)  # compiles for long where kernels are interpreted
    found = measured(verify, "--smoke", "--ops", "draw", "match", code=1 if mismatches else 0)
    timed = ["match, B = 2", "draw, B = 2, distributions only", "draw, B = 2, noise"]
    assert list(found.measured) == ["check draw, V = 257, float32", *timed]
    assert found.measured["check draw, V = 257, float32"] == mismatches
    assert found.measured["match, B = 2"] == pytest.approx(1e3)
    assert found.floors["match, B = 2"] == pytest.approx(1e6 * 2 * 5 * 300 * 2 / found.device["bandwidth"])


def test_keys_of_verification_are_those_of_the_documents():
    keys = [piece.key for piece in verify.pieces(verify.FULL)]
    assert len(keys) == len(set(keys))
    assert {"match, B = 1", "block, B = 64", "rejection, B = 16, all filters, drafts too"} < set(keys)


def test_int8_diverges_less_than_fp8():
    """int8 moves its distribution less than fp8, and neither by much."""
    found = quantization.divergences(lengths=(33,))
    assert 0 < found["int8"].mean_kl < found["fp8"].mean_kl < 0.03
    assert found["int8"].positions == 33


@pytest.mark.nightly
def test_rounds_of_quantised_models_have_figures(tmp_path):
    result = results.begin("quantization", {"smoke": True}, None, {})
    quantization.measure_rounds(result, True, 1e12, tmp_path / "result.json", ["tiny"], ["fp8_block"])
    assert set(result.measured) == {f"rounds, tiny, {what}, fp8_block" for what in quantization.SMALL}
    assert all(result.measured[key] > result.floors[key] > 0 for key in result.measured)


def test_documents_are_those_that_the_results_give():
    """After other results, ``python -m benchmarks.tables`` writes them."""
    assert tables.differing() == []
