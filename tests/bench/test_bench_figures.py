"""The figures of a run against those that were computed by hand, and counters against texts of ``/metrics``."""

import math

import pytest

from jspec.bench.answers import Answer
from jspec.bench.counters import Counters, counters_of, grown
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


def answered(sent: float, told: list[float], ended: float, tokens: int, **more) -> Answer:
    return Answer(Sample("", 8, 3), sent, told, ended, output_tokens=tokens, **more)


ANSWERS = [
    answered(10.0, [10.5, 10.7, 11.2], 11.25, 7, prompt_tokens=4),  # 0.75 s for 6 tokens after the first chunk
    answered(10.5, [11.0], 11.0, 1),  # one token: no time per token; the tokenizer counted 3 of the prompt
    answered(10.6, [10.7], 10.8, 5, prompt_tokens=9, error="the stream ended"),
    answered(11.0, [], 11.4, 1, prompt_tokens=0),  # an end without any text
]


def test_the_figures_of_four_answers():
    found = figures_of(ANSWERS, 2.0, {"ttft": 450.0, "tpot": 130.0})
    assert (found.completed, found.failed, found.good) == (3, 1, 1)
    assert (found.total_input_tokens, found.total_output_tokens) == (4 + 3 + 3, 9)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (1.5, 4.5, 9.5)
    assert found.request_goodput == 0.5
    assert found.times["ttft"] == pytest.approx([500, 500, 400])
    assert found.times["e2el"] == pytest.approx([1250, 500, 400])
    assert found.times["tpot"] == pytest.approx([750 / 6])
    assert found.times["itl"] == pytest.approx([200, 500])
    assert found.tokens_per_chunk == pytest.approx(9 / 4)
    assert found.max_concurrent_requests == 3
    assert figures_of(ANSWERS, 2.0).request_goodput is None


def test_tokens_of_a_second_and_requests_under_way():
    whole = [ANSWERS[0], ANSWERS[1]]
    assert tokens_by_second(whole) == pytest.approx([14 / 3, 7 / 3 + 1])
    assert tokens_by_second([]) == []
    assert concurrency(whole) == [(10.0, 1), (10.5, 2), (11.0, 1), (11.25, 0)]


def test_a_summary():
    found = summary([1.0, 2.0, 3.0, 10.0], [50, 99, 99.9])
    assert list(found) == ["mean", "median", "std", "p50", "p99", "p99.9"]
    assert found["mean"] == 4.0
    assert found["median"] == found["p50"] == 2.5
    assert found["std"] == pytest.approx(math.sqrt((9 + 4 + 1 + 36) / 4))
    assert found["p99"] == pytest.approx(3 + 7 * 0.97)
    assert set(summary([], [99]).values()) == {None}


@pytest.mark.parametrize("wrong", [["ttft"], ["ttft:x"], ["ttft:-1"], ["itl:5"], ["ttft:1", "ttft:2"], ["ttft:nan"]])
def test_limits_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="goodput="):
        goodput_limits(wrong)


def test_options_of_figures():
    assert goodput_limits(["ttft:200", "e2el:1.5"]) == {"ttft": 200.0, "e2el": 1.5}
    assert percentiles_of("25,99.9") == [25.0, 99.9]
    assert metrics_of("itl,ttft") == ["itl", "ttft"]
    for wrong in ("", "101", "a"):
        with pytest.raises(ValueError, match="metric_percentiles="):
            percentiles_of(wrong)
    with pytest.raises(ValueError, match="percentile_metrics='ttft,speed'"):
        metrics_of("ttft,speed")


def page(drafts: int, draft_tokens: int, accepted: int, at: list[int], engine: str = "0") -> str:
    label = f'engine="{engine}",model_name="m"'
    lines = [f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts}.0"]
    lines += [f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {draft_tokens}.0"]
    lines += [f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {accepted}.0"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{{label},position="{i}"}} {n}.0' for i, n in enumerate(at)]
    return "\n".join(["# TYPE other gauge", "other 5", *lines, ""])


def test_counters_of_a_page_and_their_growth():
    before = counters_of(page(10, 30, 12, [8, 4, 0]))
    assert before == Counters(10, 30, 12, (8, 4, 0))
    two = counters_of(page(10, 30, 12, [8, 4]) + page(5, 15, 6, [4, 1, 1], engine="1"))
    assert two == Counters(15, 45, 18, (12, 5, 1))
    found = grown(before, counters_of(page(30, 90, 42, [24, 13, 5])))
    assert found == Counters(20, 60, 30, (16, 9, 5))
    assert found.acceptance_rate == 50.0
    assert found.acceptance_length == 2.5
    assert found.acceptance_rates_at == [0.8, 0.45, 0.25]


def test_growth_that_is_not_known():
    some = Counters(10, 30, 12, (8, 4, 0))
    assert counters_of("other 5\n") is None
    assert grown(None, some) is None
    assert grown(some, None) is None
    assert grown(some, some) is None  # nothing was drafted
    assert grown(some, Counters(11, 33, 2, (2, 0, 0))) is None  # the server was started anew
    with pytest.raises(ValueError, match="could not convert"):
        counters_of("a{")
