"""Results of benchmarks as files, and the documents that are written from them."""

import dataclasses
import json
import subprocess
import sys
from unittest.mock import MagicMock

import pytest

from benchmarks import all as everything
from benchmarks import tables
from benchmarks.acceptance import drafters
from benchmarks.engine import serving
from benchmarks.host import fleet
from benchmarks.report import performance, results, serving_table

COMMIT = "0123456789" * 4


def result(date="2026-01-01", benchmark="round", card="card", **fields) -> results.Result:
    device = {"kind": card, "bandwidth": 4e12, "rates": {}}
    return results.Result(benchmark, date, None, None, {"jax": "1"}, device, "python", {"smoke": False}, **fields)


@pytest.mark.parametrize(("described", "dirty"), [(COMMIT, False), (COMMIT + "-dirty", True)])
def test_the_environment_names_the_commit(monkeypatch, described, dirty):
    monkeypatch.setenv("JSPEC_COMMIT", described)
    assert results.code() == (COMMIT, dirty)


def test_unknown_commit_is_reported(monkeypatch, capsys):
    monkeypatch.delenv("JSPEC_COMMIT", raising=False)
    monkeypatch.setattr(results, "_output", lambda *_: "")
    assert results.code() == (None, None)
    assert "JSPEC_COMMIT is not set" in capsys.readouterr().err


def test_a_command_has_no_folders_of_the_machine():
    command = results.command_of("hybrids", ["--lines", "mtp", "--json", "/home/somebody/out/h.json"])
    assert command == "python -m benchmarks.rounds.hybrids --lines mtp --json h.json"
    everywhere = [file.read_text() for file in results.RESULTS.glob("*.json")]
    assert not any(folder in text for text in everywhere for folder in ("/root/", "/home/", "/tmp/"))


def test_a_result_is_read_as_it_was_written(tmp_path):
    written = result(measured={"1": 2.0}, goals={"1": {"goal": 1.0}}, source="a page")
    results.write(written, tmp_path / "new" / "one.json")
    assert results.read(tmp_path / "new" / "one.json") == written
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["one.json"]


@pytest.mark.parametrize("content", ["{}", "no JSON", json.dumps(dataclasses.asdict(result()) | {"other": 1})])
def test_other_files_are_refused_by_name(tmp_path, content):
    (tmp_path / "one.json").write_text(content)
    with pytest.raises(ValueError, match=r"one\.json: expected the JSON of"):
        results.read(tmp_path / "one.json")


def test_results_of_one_benchmark_and_card_are_in_order(tmp_path):
    for name, run in {
        "a": result("2026-01-03"),
        "b": result("2026-01-01"),
        "c": result("2026-01-02T10:00:00Z"),
        "d": result("2026-01-02", card="another"),
        "e": result("2026-01-02", benchmark="verify"),
    }.items():
        results.write(run, tmp_path / f"{name}.json")
    runs = results.read_all("round", "card", tmp_path)
    assert [run.day for run in runs] == ["2026-01-01", "2026-01-02", "2026-01-03"]


def test_a_smoke_run_is_no_result(tmp_path):
    results.write(dataclasses.replace(result(), settings={"smoke": True}), tmp_path / "one.json")
    with pytest.raises(ValueError, match="is of a smoke run"):
        results.read_all("round", folder=tmp_path)


def test_a_later_run_replaces_the_figures_that_it_has():
    early = result(measured={"1": 5.0, "2": 6.0}, floors={"1": 3.0}, goals={"1": {"goal": 4.0, "stretch": 3.5}})
    late = result("2026-01-02", measured={"1": 4.5}, floors={"1": 3.1}, goals={"1": {"goal": 4.0}})
    figures = results.latest([early, late])
    assert (figures["1"].measured, figures["1"].floor, figures["1"].result) == (4.5, 3.1, late)
    assert (figures["2"].measured, figures["2"].goal, figures["2"].result) == (6.0, None, early)


@pytest.mark.parametrize(
    ("is_rate", "measured", "verdict"),
    [
        *((False, 5.0, "short by 25%"), (False, 4.0, "met"), (False, 3.5, "beyond"), (False, -1.0, "beyond")),
        *((True, 3.0, "short by 25%"), (True, 4.0, "met"), (True, 4.5, "beyond")),
    ],
)
def test_times_above_their_goal_and_rates_below_it_are_short_of_it(is_rate, measured, verdict):
    goals, details = {"1": {"goal": 4.0, "stretch": 4.5 if is_rate else 3.5}}, {"1": {"more_is_better": is_rate}}
    figure = results.latest([result(measured={"1": measured}, goals=goals, details=details)])["1"]
    assert (figure.verdict, figure.is_short) == (verdict, verdict.startswith("short"))


def test_figures_short_of_their_goal_stand_in_the_readme():
    measurements = performance.measurements()
    text = performance.readme(measurements)
    shown = {key for *_, keys in (*performance.IN_README, *performance.RULES_IN_README) for key in keys}
    short = {
        figure.key
        for figures in (measurements.rounds, measurements.verification)
        for figure in figures.values()
        if figure.is_short
    }
    assert short <= shown
    assert f"{len(short)} of these" in text
    figure = measurements.rounds["10, batch 16"]
    assert f"{figure.measured:.2f}" in text
    assert figure.verdict.removeprefix("short by ") in text


class TestServing:
    def served(self, date, key, measured, **details):
        details = {"line": int(key.split(",")[0]), "what": f"what of {key}", "unit": "tokens/s", **details}
        calls = {"rows_per_call": 62.25, "tokens_per_round": 2.5, "host_ms_per_call": 3.0, "more_is_better": True}
        goals = {key: {"goal": 8000.0, "stretch": 8400.0}}
        return result(date, "serving", measured={key: measured}, goals=goals, details={key: calls | details})

    def figures(self, *more):
        others = [self.served("2026-01-01", key, 8100.0, vllm=9000.0) for key in ("1", "2", "6")]
        return results.latest([*others, *more])

    def test_the_newest_figure_stands_beside_its_goals(self):
        figures = self.figures(self.served("2026-01-02", "1", 7000.0, vllm=6795.0))
        text = serving_table.section(figures)
        assert "| 1 | what of 1 | tokens/s | 6,795 | 8,000 | 8,400 | 7,000 | short by 12% | 2026-01-02 |" in text
        assert "| 2 | what of 2 | tokens/s | 9,000 | 8,000 | 8,400 | 8,100 | met | 2026-01-01 |" in text
        assert text.count("| what of 1 |") == 1
        flat = " ".join(text.split())
        assert "an EAGLE head has 62.2 rows in a call on average, 2.50 tokens of a row in a round, and 3.00 ms" in flat

    def test_unmeasured_lines_are_named(self):
        figures = self.figures(self.served("2026-01-01", "12, line 1", 1.0))
        assert serving_table.unmeasured(figures) == ["2, auto", *map(str, (3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15))]
        assert f"* **7**: {serving_table.MEASURES['7']}" in serving_table.section(figures)
        named = "; ".join(serving_table.MEASURES[key] for key in serving_table.unmeasured(figures))
        assert f"Not measured yet: {named}." in " ".join(serving_table.readme(figures).split())
        everything = {key: figures["1"] for key in serving_table.MEASURES}
        assert "not been measured" not in serving_table.section(everything)
        assert "Not measured" not in serving_table.readme(everything)

    def test_every_line_of_the_benchmark_is_described(self):
        assert {int(key.split(",")[0]) for key in serving_table.MEASURES} == set(serving.LINES)

    def test_figures_short_of_their_goal_are_counted_in_the_readme(self):
        slow = self.served("2026-01-02", "1", 7000.0, vllm=6795.0)
        late = self.served("2026-01-02", "4, 1 prompts, plain", 9.0, unit="ms", more_is_better=False, vllm=8.0)
        text = " ".join(serving_table.readme(self.figures(slow, late)).split())
        assert "1 of 4 are short of them; of all that have a figure of vLLM, 3 of 4 are behind it" in text
        assert "| 64 rows, tokens/s | 6,795 | 8,000 | 7,000 | 12% |" in text


def test_a_document_that_differs_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tables", "--check"])
    monkeypatch.setattr(performance, "document", lambda _: "something else")
    assert tables.main() == 1
    assert capsys.readouterr().out.endswith("docs/results/performance.md\n")


def test_a_fleet_is_what_its_gpus_have_time_for():
    way = fleet.Way(few=0.02, many=0.044, tokens=2.5, prompt=0.1)
    assert way.answer == pytest.approx(fleet.ANSWER * 0.044 / (fleet.ROWS * 2.5))
    assert way.planned * (way.prompt + way.answer) == pytest.approx(fleet.BUSY)
    assert way.replicas * way.planned >= fleet.REQUESTS > (way.replicas - 1) * way.planned
    assert (way.hosts - fleet.SPARE) * fleet.A_HOST >= way.replicas
    # What the rows under way write in the time that prompts leave is what arrives.
    seconds = 0.02 + (way.rows - fleet.FEWER) * 0.024 / (fleet.ROWS - fleet.FEWER)
    written = way.rows * 2.5 / seconds * (1 - way.planned * way.prompt)
    assert written == pytest.approx(way.planned * fleet.ANSWER)


class TestBlocks:
    TEXT = "before\n<!-- a: by hand -->\nold\n<!-- /a -->\nbetween\n<!-- b: x -->\n\n<!-- /b -->\nafter\n"

    def test_only_what_is_between_the_comments_changes(self, tmp_path):
        file = tmp_path / "page.md"
        file.write_text(self.TEXT)
        once = tables.with_blocks(file, {"a": r"new \1", "b": "one\ntwo"})
        assert once == self.TEXT.replace("old", r"new \1").replace("x -->\n\n", "x -->\none\ntwo\n")
        file.write_text(once)
        assert tables.with_blocks(file, {"a": r"new \1", "b": "one\ntwo"}) == once

    @pytest.mark.parametrize("text", ["nothing", TEXT + TEXT, TEXT.replace("<!-- /a -->", "")])
    def test_missing_and_repeated_comments_are_refused(self, tmp_path, text):
        (tmp_path / "page.md").write_text(text)
        with pytest.raises(ValueError, match=r"page\.md: expected one comment <!-- a: "):
            tables.with_blocks(tmp_path / "page.md", {"a": "new"})


def test_a_run_of_one_drafter_takes_the_others_from_runs_before():
    measured = {"method": "eagle", "num_draft_tokens": 4, "lengths": {}, "positions": {}, "expected": {}}
    by_drafter = {name: measured | {"rounds_per_second": 5.0} for name in ("eagle", "draft")}
    early = result(measured={"plain_rounds_per_second": 9.0, "drafters": by_drafter})
    rates = {"plain_rounds_per_second": 8.0, "drafters": {"eagle": {"rounds_per_second": 6.0}}}
    comparison = drafters.comparison_of([early, result("2026-01-02", measured=rates)])
    assert {name: m.rounds_per_second for name, m in comparison.drafters.items()} == {"draft": 5.0, "eagle": 6.0}
    assert (comparison.plain, comparison.last.day) == (8.0, "2026-01-02")


def test_a_run_of_rates_alone_writes_no_lengths(monkeypatch, tmp_path):
    monkeypatch.setattr(drafters, "prompts", lambda count: [[0]] * count)
    monkeypatch.setattr(drafters, "load", lambda *how: how)
    monkeypatch.setattr(drafters.jspec, "load", MagicMock())
    monkeypatch.setattr(
        drafters, "rounds_per_second", lambda llm, _: 3.0 if llm == ("eagle", "rejection", "sample") else 2.0
    )
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["drafters", "--rates", "--only", "eagle", "--prompts", "2", "--json", str(file)])
    drafters.main()
    written = results.read(file)
    assert written.measured == {"plain_rounds_per_second": 2.0, "drafters": {"eagle": {"rounds_per_second": 3.0}}}
    assert written.settings["prompts"] == 2


class TestAll:
    def run(self, monkeypatch, tmp_path, ended):
        """Both benchmarks write a result; that of verify is ended by its time limit, or fails."""

        def fake(command, timeout):
            name = command[2].rpartition(".")[2]
            file = tmp_path / command[command.index("--json") + 1]
            goals = {"1": {"goal": 2.0}}
            results.write(result(benchmark=name, measured={"1": 3.0}, floors={"1": 1.5}, goals=goals), file)
            if name == "verify" and ended:
                raise subprocess.TimeoutExpired(command, timeout)
            return subprocess.CompletedProcess(command, 1 if name == "verify" else 0)

        monkeypatch.setattr(everything.subprocess, "run", fake)
        monkeypatch.setattr(sys, "argv", ["all", "--out", str(tmp_path), "--only", "round", "verify"])
        return everything.main()

    def test_an_ended_benchmark_leaves_the_figures_so_far(self, monkeypatch, tmp_path, capsys):
        assert self.run(monkeypatch, tmp_path, ended=True) == 0
        printed = capsys.readouterr().out
        assert "verify was ended after" in printed
        lines = [line.split() for line in printed.splitlines()[-2:]]
        assert lines == [
            [name, "1", "3.000", "1.500", "2.00", "2.000", "short", "by", "50%"] for name in ("round", "verify")
        ]

    def test_failed_benchmark_is_reported(self, monkeypatch, tmp_path, capsys):
        assert self.run(monkeypatch, tmp_path, ended=False) == 1
        assert "FAILED: verify" in capsys.readouterr().err

    def test_shares_are_of_all_the_time(self):
        assert sum(part.share for part in everything.PARTS.values()) == pytest.approx(1)
