"""Throughput, latencies and goodput of a run, from the times of its responses."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jspec._validation import is_number, require
from jspec.bench.responses import Response

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclasses.dataclass(frozen=True)
class Figures:
    """The figures of a run.

    Attributes:
      duration: seconds.
      completed, failed: requests with a complete response, and without.
      total_input_tokens, total_output_tokens: of the completed requests.
      request_throughput: of these per second.
      request_goodput: those per second that were within every limit of ``--goodput``; None without limits.
      output_throughput, total_token_throughput: new tokens per second, and with those of prompts.
      tokens_per_chunk: tokens of a chunk on average, so of one interval of ``itl``; None without chunks.
      max_output_tokens_per_s: of the seconds of the run, the tokens of the one with most.
      max_concurrent_requests: how many requests were under way at the busiest moment, failed ones included.
      times: milliseconds: for each metric an entry per request (``itl``: per gap between two chunks).
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    tokens_per_chunk: float | None
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    times: Mapping[str, Sequence[float]]


def figures_of(responses: Sequence[Response], seconds: float, goodput: Mapping[str, float] | None = None) -> Figures:
    """The figures of a run.

    Args:
      responses: all of them, failed ones included. Those that did not fail have ``output_tokens``.
      seconds: how long the run took.
      goodput: metric -> the most milliseconds that a good request has.
    """
    completed = [response for response in responses if not response.error]
    times: dict[str, list[float]] = {name: [] for name in METRICS}
    good = 0
    for response in completed:
        latencies = _milliseconds(response)
        times["ttft"].append(latencies["ttft"])
        times["e2el"].append(latencies["e2el"])
        times["itl"] += [1000 * gap for gap in response.gaps]
        if "tpot" in latencies:
            times["tpot"].append(latencies["tpot"])
        # A response of one token has no time per token, so no limit of it applies.
        good += all(latencies.get(name, 0.0) <= limit for name, limit in (goodput or {}).items())
    inputs = sum(input_tokens(response) for response in completed)
    outputs = sum(response.output_tokens or 0 for response in completed)
    chunks = sum(len(response.chunk_times) for response in completed)
    return Figures(
        duration=seconds,
        completed=len(completed),
        failed=len(responses) - len(completed),
        total_input_tokens=inputs,
        total_output_tokens=outputs,
        request_throughput=len(completed) / seconds,
        request_goodput=good / seconds if goodput else None,
        output_throughput=outputs / seconds,
        total_token_throughput=(inputs + outputs) / seconds,
        tokens_per_chunk=outputs / chunks if chunks else None,
        max_output_tokens_per_s=max(tokens_by_second(completed), default=0.0),
        max_concurrent_requests=max((count for _, count in concurrency(responses)), default=0),
        times=times,
    )


def _milliseconds(response: Response) -> dict[str, float]:
    """The response's latencies by name of the metric."""
    latencies = {"ttft": 1000 * response.ttft, "e2el": 1000 * response.latency}
    tokens = response.output_tokens or 0
    if tokens > 1:
        latencies["tpot"] = 1000 * (response.ended - response.first) / (tokens - 1)
    return latencies


def input_tokens(response: Response) -> int:
    """Tokens of the prompt as the server counts them, else as the tokenizer does; 0 if neither is known."""
    return response.prompt_tokens or response.sample.prompt_len or 0


def tokens_by_second(responses: Sequence[Response]) -> list[float]:
    """New tokens of each second of a run. A chunk's number of tokens is unknown, so those of a response count as equal."""
    if not responses:
        return []
    began = min(response.sent for response in responses)
    tokens: dict[int, float] = collections.defaultdict(float)
    for response in responses:
        for now in response.chunk_times:
            tokens[int(now - began)] += (response.output_tokens or 0) / len(response.chunk_times)
    return [tokens[second] for second in range(max(tokens, default=-1) + 1)]


def concurrency(responses: Sequence[Response]) -> list[tuple[float, int]]:
    """(time, number of requests under way from then on), ascending."""
    changes = sorted([(response.ended, -1) for response in responses] + [(response.sent, 1) for response in responses])
    count, counts = 0, []
    for now, change in changes:
        count += change
        counts.append((now, count))
    return counts


def summary(times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles (``p99``); each None if ``times`` is empty."""
    names = ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))
    if not times:
        return dict.fromkeys(names)
    values = (np.mean(times), np.median(times), np.std(times), *(np.percentile(times, p) for p in percentiles))
    return dict(zip(names, map(float, values), strict=True))


def goodput_limits(given: Sequence[str]) -> dict[str, float]:
    """The limits of an option such as ``ttft:200 tpot:30``, in milliseconds.

    Raises:
      ValueError: a metric is unknown or given twice, or a limit is not a number above 0.
    """
    limits: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition(":")
        expected = f"NAME:MILLISECONDS with a name of {', '.join(GOODPUT_METRICS)}, each once"
        require(name in GOODPUT_METRICS and name not in limits, "goodput", text, expected)
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        require(is_number(limit) and limit > 0, "goodput", text, "a number of milliseconds above 0 behind the colon")
        limits[name] = limit
    return limits


def percentiles_of(text: str) -> list[float]:
    """The percentiles of an option such as ``25,99.9``.

    Raises:
      ValueError: one is not a number in 0..100.
    """
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    ok = all(0 <= p <= 100 for p in percentiles)
    require(ok, "metric_percentiles", text, "numbers in 0..100 with commas between, 50,99 for example")
    return percentiles


def metrics_of(text: str) -> list[str]:
    """The metrics of an option such as ``ttft,tpot``.

    Raises:
      ValueError: one is unknown.
    """
    metrics = text.split(",")
    ok = all(name in METRICS for name in metrics)
    require(ok, "percentile_metrics", text, f"names of {', '.join(METRICS)} with commas between")
    return metrics
