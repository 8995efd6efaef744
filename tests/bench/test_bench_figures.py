"""The figures of a run against ones computed by hand, and counters against texts of ``/metrics``."""

import math

import pytest
from fake_server import page

from jspec.bench.counters import Counters, counter_growth, counters_of
from jspec.bench.datasets import Sample
from jspec.bench.figures import (
    concurrency,
    figures_of,
    goodput_limits,
    metrics_of,
    percentiles_of,
    summary,
    tokens_by_second,
)
from jspec.bench.responses import Response


def response(sent: float, chunk_times: list[float], ended: float, tokens: int, **more) -> Response:
    return Response(Sample("", 8, 3), sent, chunk_times, ended, output_tokens=tokens, **more)


RESPONSES = [
    response(10.0, [10.5, 10.7, 11.2], 11.25, 7, prompt_tokens=4),  # 0.75 s for 6 tokens after the first chunk
    response(10.5, [11.0], 11.0, 1),  # one token: no time per token; the tokenizer counted 3 of the prompt
    response(10.6, [10.7], 10.8, 5, prompt_tokens=9, error="the stream ended"),
    response(11.0, [], 11.4, 1, prompt_tokens=0),  # an end without any text
]


def test_figures_of_four_responses():
    figures = figures_of(RESPONSES, 2.0, {"ttft": 450.0, "tpot": 130.0})
    assert (figures.completed, figures.failed) == (3, 1)
    assert (figures.total_input_tokens, figures.total_output_tokens) == (4 + 3 + 3, 9)
    assert (figures.request_throughput, figures.output_throughput, figures.total_token_throughput) == (1.5, 4.5, 9.5)
    assert figures.request_goodput == 0.5
    assert figures.times["ttft"] == pytest.approx([500, 500, 400])
    assert figures.times["e2el"] == pytest.approx([1250, 500, 400])
    assert figures.times["tpot"] == pytest.approx([750 / 6])
    assert figures.times["itl"] == pytest.approx([200, 500])
    assert figures.tokens_per_chunk == pytest.approx(9 / 4)
    assert figures.max_concurrent_requests == 3
    assert figures_of(RESPONSES, 2.0).request_goodput is None


def test_tokens_by_second_and_concurrency():
    completed = [RESPONSES[0], RESPONSES[1]]
    assert tokens_by_second(completed) == pytest.approx([14 / 3, 7 / 3 + 1])
    assert tokens_by_second([]) == []
    assert concurrency(completed) == [(10.0, 1), (10.5, 2), (11.0, 1), (11.25, 0)]


def test_summary_has_mean_median_std_and_percentiles():
    stats = summary([1.0, 2.0, 3.0, 10.0], [50, 99, 99.9])
    assert list(stats) == ["mean", "median", "std", "p50", "p99", "p99.9"]
    assert stats["mean"] == 4.0
    assert stats["median"] == stats["p50"] == 2.5
    assert stats["std"] == pytest.approx(math.sqrt((9 + 4 + 1 + 36) / 4))
    assert stats["p99"] == pytest.approx(3 + 7 * 0.97)
    assert set(summary([], [99]).values()) == {None}


@pytest.mark.parametrize("wrong", [["ttft"], ["ttft:x"], ["ttft:-1"], ["itl:5"], ["ttft:1", "ttft:2"], ["ttft:nan"]])
def test_bad_goodput_limits_are_refused(wrong):
    with pytest.raises(ValueError, match="goodput="):
        goodput_limits(wrong)


def test_options_are_parsed_and_checked():
    assert goodput_limits(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}
    assert percentiles_of("25,99.9") == [25.0, 99.9]
    assert metrics_of("itl,ttft") == ["itl", "ttft"]
    for wrong in ("", "101", "a"):
        with pytest.raises(ValueError, match="metric_percentiles="):
            percentiles_of(wrong)
    with pytest.raises(ValueError, match="percentile_metrics='ttft,speed'"):
        metrics_of("ttft,speed")


def test_counters_are_summed_over_engines_and_subtracted():
    before = counters_of(page(10, 30, 12, [8, 4, 0]))
    assert before == Counters(10, 30, 12, (8, 4, 0))
    two = counters_of(page(10, 30, 12, [8, 4]) + page(5, 15, 6, [4, 1, 1], engine="1"))
    assert two == Counters(15, 45, 18, (12, 5, 1))
    growth = counter_growth(before, counters_of(page(30, 90, 42, [24, 13, 5])))
    assert growth == Counters(20, 60, 30, (16, 9, 5))
    assert growth.acceptance_rate == 50.0
    assert growth.acceptance_length == 2.5
    assert growth.acceptance_rates_at == [0.8, 0.45, 0.25]


def test_unknown_growth_is_none():
    counters = Counters(10, 30, 12, (8, 4, 0))
    assert counters_of("other 5\n") is None
    assert counter_growth(None, counters) is None
    assert counter_growth(counters, None) is None
    assert counter_growth(counters, counters) is None  # nothing was drafted
    assert counter_growth(counters, Counters(11, 33, 2, (2, 0, 0))) is None  # the server was restarted
    with pytest.raises(ValueError, match="could not convert"):
        counters_of("a{")
