"""The benchmark of serving: what it takes down of requests, what it counts, and that a line of it runs."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import V, engine

from benchmarks.engine import serving, start
from benchmarks.engine.engines import Engines, Setting, make_engine
from benchmarks.engine.loads import Client, Followed, Load, Texts, longest_gap, observed
from benchmarks.report import results
from benchmarks.report.figures import Figure, printed
from benchmarks.rounds.bench import Bench
from benchmarks.shapes import SHAPES, TINY, Pair
from jspec.sampling.verify import RULES

SHALLOW = Pair(*2 * (dataclasses.replace(TINY, num_layers=1, windows=()),))


def test_a_smoke_run_measures_its_lines(measured, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "tiny", SHALLOW)
    small = lambda *_: Setting(1, 64, page_size=16)  # noqa: E731
    monkeypatch.setattr(serving, "setting_of", small)
    monkeypatch.setattr(serving, "enable_compilation_cache", lambda _: None)  # which is the process's
    found = measured(serving, "--smoke", "--only", "1", "8")
    assert list(found.measured) == ["1", "1, padding", "8"]
    assert found.measured["1"] > 0
    assert 0 < found.measured["1, padding"] < 100
    assert found.details["1"]["more_is_better"]
    assert found.details["1"]["rows_per_call"] == 1
    assert found.details["1"]["tokens_per_round"] == 1
    assert found.goals == {}  # they are for another shape
    assert found.settings["smoke"]
    assert found.settings["failed"] == found.settings["left_out"] == []
    assert found.details["8"]["same_texts"] == 1
    assert found.measured["8"] > 0
    assert "8" in capsys.readouterr().out


def test_figures_have_their_goals_and_lines_their_order():
    engines = Engines(Bench(SHALLOW, "float32", 0.0, 1))
    table = serving.Table(engines, 1, 1, goals=True)
    assert {line for line, *_ in table.lines()} | {9} == set(serving.LINES)
    assert [(line, name) for line, name, _ in serving.chosen(table.lines(), [3, 1])] == [
        (1, "plain"),
        (3, "plain"),
        (3, "eagle"),
    ]
    rate = table.figure(1, "", "queue", "tokens/s", 7999.0, 8000, 8400, 6795)
    assert (rate.goal, rate.stretch, rate.vllm) == (8000, 8400, 6795)
    result = results.Result("serving", "2026-01-01", None, None, {}, {}, "", {})
    rate.add_to(result)
    figure = results.latest([result])["1"]
    assert figure.verdict == "short by 0.01%"
    text = printed(rate, figure.verdict)
    assert text.split() == ["1", "queue", "6,795", "8,000", "8,400", "7,999", "tokens/s", *["short", "by", "0.01%"]]
    long = table.long_setting
    assert (long.rows, long.max_len) == (16, 33_024)
    assert long.num_pages is not None
    assert 516 + 15 * 40 < long.num_pages < 16 * 516


def test_a_late_compilation_fails_its_line_after_its_figures():
    def measure():
        yield Figure(1, "", "what", "ms", 1.0)
        jax.jit(lambda x: x * 31 + 7)(jnp.zeros(3, jnp.int16))

    told = []
    with Engines(Bench(SHALLOW, "float32", 0.0, 1)) as engines:
        figures = serving.without_compiling(engines, measure)
        with pytest.raises(RuntimeError, match="programs were compiled after warm-up"):
            told += figures
    assert [request.key for request in told] == ["1"]
    assert engines.num_late_compilations >= 1


def test_synthetic_acceptance_has_a_name_among_the_rules(monkeypatch):
    name = "rejection, synthetic 4 x 0.7"
    monkeypatch.setitem(RULES, name, own := RULES["rejection"])  # it is gone after this test
    bench = Bench(SHALLOW, "float32", 0.0, 1)
    made = make_engine(bench, Setting(2, 64, "eagle", page_size=16))
    assert RULES[name] is not own
    assert made.runner.num_draft_tokens == 4
    chooses = Setting(2, 64, "eagle", "auto", page_size=16).speculation
    assert chooses.draft_lengths == (0, 1, 2, 3, 4)


def test_a_start_is_that_of_the_second_process(monkeypatch, tmp_path):
    times = iter([9.0, 2.0])
    monkeypatch.setattr(start, "in_a_process", lambda *_: next(times))
    (figure,) = serving.start_figures("tiny", 1, tmp_path, goals=True)
    assert (figure.measured, figure.goal, figure.more) == (2.0, 5.0, {"start_before_seconds": 9.0})


def test_requests_are_served_as_they_arrive():
    loads = [Load([1, 2, 3], 5), Load([4], 9), Load([1, 2], 4, at=0.3)]
    client = Client(engine(None))
    began = time.perf_counter()
    with observed(client.engine) as seen:
        found = client.serve(loads)
    assert [request.tokens for request in found] == [5, 9, 4]
    assert all(request.finished for request in found)
    assert found[2].arrived - found[0].arrived == pytest.approx(0.3)
    assert found[2].told[0][0] > began + 0.3
    assert len(found[1].between) == 9 - found[1].told[0][1]
    assert seen.rate == pytest.approx(18 / seen.seconds)
    assert seen.counted("num_finished") == 3
    assert 0 < seen.waited < seen.seconds
    assert seen.seconds >= 0.3
    assert "read" not in vars(client.engine.runner)


def test_a_client_aborts_unfinished_requests():
    client = Client(engine(None))
    request = client.add(Load([1, 2, 3], 30))
    client.until_first([request])
    client.give_up()
    assert request.finished
    assert request.tokens < 30
    assert not client.engine.unfinished


def test_time_between_tokens_is_shared_by_those_of_a_call():
    request = Followed(1.0, [(3.0, 1), (5.0, 4), (6.0, 1)])
    assert (request.first, request.tokens, request.between) == (2.0, 6, [0.5, 0.5, 0.5, 0.5, 1.0])
    assert longest_gap([request], 5.5, 7.0) == 1.0
    assert longest_gap([request], 4.9, 5.5) == 2.0  # it had begun before


def test_queues_have_the_same_lengths_and_different_texts():
    texts = Texts(V)
    first, again = texts.queue(20), texts.queue(20)
    lengths = [[(len(load.prompt), load.new) for load in queue] for queue in (first, again)]
    assert lengths[0] == lengths[1]
    assert all(128 <= prompt <= 385 and 64 <= new <= 448 for prompt, new in lengths[0])
    assert first[0].prompt != again[0].prompt
    times = [load.at for load in texts.poisson(first * 50, 4.0)]
    assert times == sorted(times)
    assert np.diff(times).mean() == pytest.approx(0.25, rel=0.1)
