"""The figures of a run, from the times of its answers."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jspec._validation import is_number, require
from jspec.bench.answers import Answer

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
      completed, failed: requests that have a whole answer, and that have none.
      total_input_tokens, total_output_tokens: of the requests that were completed.
      good: how many of them kept every limit of ``--goodput``; None without limits.
      chunks: chunks with text that came for them.
      max_output_tokens_per_s: of the seconds of the run, the tokens of the one with most.
      max_concurrent_requests: how many requests were under way at the busiest moment, failed ones included.
      times: milliseconds: for each metric an entry per request (``itl``: per gap between two chunks).
    """

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    good: int | None
    chunks: int
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    times: Mapping[str, Sequence[float]]

    @property
    def request_throughput(self) -> float:
        """Requests completed per second."""
        return self.completed / self.duration

    @property
    def request_goodput(self) -> float | None:
        """Requests per second that kept every limit."""
        return None if self.good is None else self.good / self.duration

    @property
    def output_throughput(self) -> float:
        """New tokens per second."""
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        """Tokens of prompts and new tokens per second."""
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    @property
    def tokens_per_chunk(self) -> float | None:
        """Tokens of a chunk on average: how many tokens lie between two ends of ``itl``."""
        return self.total_output_tokens / self.chunks if self.chunks else None


def figures_of(answers: Sequence[Answer], seconds: float, goodput: Mapping[str, float] | None = None) -> Figures:
    """The figures of a run.

    Args:
      answers: all of them, failed ones included. Those that did not fail have ``output_tokens``.
      seconds: how long the run took.
      goodput: metric -> the most milliseconds that a good request has.
    """
    whole = [answer for answer in answers if not answer.error]
    times: dict[str, list[float]] = {name: [] for name in METRICS}
    good = 0
    for answer in whole:
        one = _milliseconds(answer)
        times["ttft"].append(one["ttft"])
        times["e2el"].append(one["e2el"])
        times["itl"] += [1000 * gap for gap in answer.gaps]
        if "tpot" in one:
            times["tpot"].append(one["tpot"])
        # An answer of one token has no time per token, and keeps any limit of it.
        good += all(one.get(name, 0.0) <= limit for name, limit in (goodput or {}).items())
    return Figures(
        duration=seconds,
        completed=len(whole),
        failed=len(answers) - len(whole),
        total_input_tokens=sum(input_tokens(answer) for answer in whole),
        total_output_tokens=sum(answer.output_tokens or 0 for answer in whole),
        good=good if goodput else None,
        chunks=sum(len(answer.told) for answer in whole),
        max_output_tokens_per_s=max(tokens_by_second(whole), default=0.0),
        max_concurrent_requests=max((count for _, count in concurrency(answers)), default=0),
        times=times,
    )


def _milliseconds(answer: Answer) -> dict[str, float]:
    found = {"ttft": 1000 * answer.ttft, "e2el": 1000 * answer.latency}
    tokens = answer.output_tokens or 0
    if tokens > 1:
        found["tpot"] = 1000 * (answer.ended - answer.first) / (tokens - 1)
    return found


def input_tokens(answer: Answer) -> int:
    """Tokens of the prompt as the server counts them, else as the tokenizer does; 0 if neither is known."""
    return answer.prompt_tokens or answer.sample.prompt_len or 0


def tokens_by_second(answers: Sequence[Answer]) -> list[float]:
    """New tokens of each second of a run. Chunks do not tell how many tokens they have, so those of an answer count as
    equal."""
    if not answers:
        return []
    began = min(answer.sent for answer in answers)
    found: dict[int, float] = collections.defaultdict(float)
    for answer in answers:
        for now in answer.told:
            found[int(now - began)] += (answer.output_tokens or 0) / len(answer.told)
    return [found[second] for second in range(max(found, default=-1) + 1)]


def concurrency(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """(when, how many requests are under way from then on), by time."""
    changes = sorted([(answer.ended, -1) for answer in answers] + [(answer.sent, 1) for answer in answers])
    count, found = 0, []
    for now, change in changes:
        count += change
        found.append((now, count))
    return found


def summary(times: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles (``p99``); None each where there is nothing."""
    names = ("mean", "median", "std", *(f"p{p:g}" for p in percentiles))
    if not times:
        return dict.fromkeys(names)
    values = (np.mean(times), np.median(times), np.std(times), *(np.percentile(times, p) for p in percentiles))
    return dict(zip(names, map(float, values), strict=True))


def goodput_limits(given: Sequence[str]) -> dict[str, float]:
    """The limits that ``ttft:200 tpot:30`` says, in milliseconds.

    Raises:
      ValueError: a metric is unknown or given twice, or a limit is no number above 0.
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition(":")
        expected = f"NAME:MILLISECONDS with a name of {', '.join(GOODPUT_METRICS)}, each once"
        require(name in GOODPUT_METRICS and name not in found, "goodput", text, expected)
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        require(is_number(limit) and limit > 0, "goodput", text, "a number of milliseconds above 0 behind the colon")
        found[name] = limit
    return found


def percentiles_of(text: str) -> list[float]:
    """The percentiles that ``25,99.9`` says.

    Raises:
      ValueError: one is no number in 0..100.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    ok = all(0 <= p <= 100 for p in found)
    require(ok, "metric_percentiles", text, "numbers in 0..100 with commas between, 50,99 for example")
    return found


def metrics_of(text: str) -> list[str]:
    """The metrics that ``ttft,tpot`` names.

    Raises:
      ValueError: one is unknown.
    """
    found = text.split(",")
    ok = all(name in METRICS for name in found)
    require(ok, "percentile_metrics", text, f"names of {', '.join(METRICS)} with commas between")
    return found
