"""The report of a run as text and as JSON, under vLLM's labels and names."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.bench.counters import Counters
from jspec.bench.figures import METRICS, Figures, input_tokens, summary
from jspec.bench.responses import Response

WIDTH = 50  # characters of a line


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """The settings of a run, for its report.

    Attributes:
      backend, model, tokenizer, dataset: values of the options.
      num_prompts: how many requests were to be sent.
      request_rate, burstiness, max_concurrency: how they were sent.
      fields: of each request, beyond prompt and length: the sampling options, for example.
      label: the user's name of the run.
      metadata: what the user adds to the JSON.
      metrics: which of ``METRICS`` are reported, in this order.
      percentiles: of each of them.
    """

    backend: str
    model: str
    tokenizer: str | None
    dataset: str
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    fields: Mapping[str, Any]
    label: str | None
    metadata: Mapping[str, str]
    metrics: Sequence[str]
    percentiles: Sequence[float]


def printed(settings: RunSettings, figures: Figures, speculation: Counters | None) -> str:
    """The report as text."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_totals(settings, figures)]
    for name in settings.metrics:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        for part, value in summary(figures.times[name], settings.percentiles).items():
            what = "Std" if part == "std" else part.capitalize()
            lines.append(_line(f"{what} {name.upper()} (ms):", value))
        if name == "itl":
            lines.append(_line("Tokens per chunk:", figures.tokens_per_chunk))
    if speculation is not None:
        lines += [f"{'Speculative Decoding':-^{WIDTH}}", *_speculation(speculation)]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(settings: RunSettings, figures: Figures) -> Iterator[str]:
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
    if settings.max_concurrency is not None:
        yield _line("Maximum request concurrency:", settings.max_concurrency)
    if settings.request_rate < float("inf"):
        yield _line("Request rate configured (RPS):", settings.request_rate)
    yield _line("Benchmark duration (s):", figures.duration)
    yield _line("Total input tokens:", figures.total_input_tokens)
    yield _line("Total generated tokens:", figures.total_output_tokens)
    yield _line("Request throughput (req/s):", figures.request_throughput)
    if figures.request_goodput is not None:
        yield _line("Request goodput (req/s):", figures.request_goodput)
    yield _line("Output token throughput (tok/s):", figures.output_throughput)
    yield _line("Peak output token throughput (tok/s):", figures.max_output_tokens_per_s)
    yield _line("Peak concurrent requests:", figures.max_concurrent_requests)
    yield _line("Total token throughput (tok/s):", figures.total_token_throughput)
    sampling = ", ".join(f"{name}={json.dumps(value)}" for name, value in settings.fields.items())
    yield _line("Fields of each request:", sampling or "the server's defaults")


def _speculation(counters: Counters) -> Iterator[str]:
    yield _line("Acceptance rate (%):", counters.acceptance_rate)
    yield _line("Acceptance length:", counters.acceptance_length)
    yield _line("Drafts:", int(counters.drafts))
    yield _line("Draft tokens:", int(counters.draft_tokens))
    yield _line("Accepted tokens:", int(counters.accepted_tokens))
    if counters.accepted_at:
        yield "Per-position acceptance (%):"
    for place, rate in enumerate(counters.acceptance_rates_at):
        yield _line(f"  Position {place}:", 100 * rate)


def _line(label: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def record(
    settings: RunSettings, figures: Figures, speculation: Counters | None, interrupted: bool, now: datetime.datetime
) -> dict[str, Any]:
    """The report as JSON, with vLLM's names. Times are in milliseconds where a name ends with ``_ms``, else in seconds."""
    entries = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": settings.backend,
        "backend": settings.backend,
        "label": settings.label,
        "model_id": settings.model,
        "tokenizer_id": settings.tokenizer,
        "dataset_name": settings.dataset,
        "num_prompts": settings.num_prompts,
        **settings.metadata,
        "request_rate": settings.request_rate if settings.request_rate < float("inf") else "inf",
        "burstiness": settings.burstiness,
        "max_concurrency": settings.max_concurrency,
        "request_fields": dict(settings.fields),
        "interrupted": interrupted,
        "duration": figures.duration,
        "completed": figures.completed,
        "failed": figures.failed,
        "total_input_tokens": figures.total_input_tokens,
        "total_output_tokens": figures.total_output_tokens,
        "request_throughput": figures.request_throughput,
        "request_goodput": figures.request_goodput,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        "max_output_tokens_per_s": figures.max_output_tokens_per_s,
        "max_concurrent_requests": figures.max_concurrent_requests,
        "tokens_per_chunk": figures.tokens_per_chunk,
    }
    for name in settings.metrics:
        parts = summary(figures.times[name], settings.percentiles)
        entries |= {f"{part}_{name}_ms": value for part, value in parts.items()}
    return entries | ({} if speculation is None else _speculation_record(speculation))


def _speculation_record(counters: Counters) -> dict[str, Any]:
    return {
        "spec_decode_acceptance_rate": counters.acceptance_rate,
        "spec_decode_acceptance_length": counters.acceptance_length,
        "spec_decode_num_drafts": int(counters.drafts),
        "spec_decode_draft_tokens": int(counters.draft_tokens),
        "spec_decode_accepted_tokens": int(counters.accepted_tokens),
        "spec_decode_per_position_acceptance_rates": counters.acceptance_rates_at,
    }


def details(responses: Sequence[Response]) -> dict[str, Any]:
    """One entry for each request, in the order of the dataset, times in seconds; zeros and an error for a failed one."""
    succeeded = [not response.error for response in responses]
    pairs = list(zip(responses, succeeded, strict=True))
    return {
        "input_lens": [input_tokens(response) for response in responses],
        "output_lens": [(response.output_tokens or 0) if ok else 0 for response, ok in pairs],
        "ttfts": [response.ttft if ok else 0.0 for response, ok in pairs],
        "itls": [response.gaps if ok else [] for response, ok in pairs],
        "latencies": [response.latency if ok else 0.0 for response, ok in pairs],
        "start_times": [response.sent for response in responses],
        "generated_texts": [response.text for response in responses],
        "errors": [response.error for response in responses],
    }


def file_name(settings: RunSettings, now: datetime.datetime) -> str:
    """The default name of the file with the result."""
    concurrency = "" if settings.max_concurrency is None else f"-concurrency{settings.max_concurrency}"
    model = pathlib.PurePath(settings.model).name
    what = (settings.label or settings.backend).replace("/", "_")
    return f"{what}-{settings.request_rate}qps{concurrency}-{model}-{now.strftime('%Y%m%d-%H%M%S')}.json"
