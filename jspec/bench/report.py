"""The report of a run as text and as JSON, under vLLM's labels and names."""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from jspec.bench.counters import Counters
from jspec.bench.figures import METRICS, Figures, input_tokens, summary
from jspec.bench.load import Outcome
from jspec.bench.responses import Response
from jspec.bench.serve_args import ServeBenchmark

WIDTH = 50  # characters of a line


# In the order of the report: a label, and the name of the figure, which it has in JSON, too.
COUNTS = (("Successful requests:", "completed"), ("Failed requests:", "failed"))
FIGURES = (
    ("Benchmark duration (s):", "duration"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Request goodput (req/s):", "request_goodput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
    ("Peak concurrent requests:", "max_concurrent_requests"),
    ("Total token throughput (tok/s):", "total_token_throughput"),
)
# The same of the server's counters; their names in JSON are vLLM's.
SPECULATION = (
    ("Acceptance rate (%):", "acceptance_rate", "spec_decode_acceptance_rate"),
    ("Acceptance length:", "acceptance_length", "spec_decode_acceptance_length"),
    ("Drafts:", "drafts", "spec_decode_num_drafts"),
    ("Draft tokens:", "draft_tokens", "spec_decode_draft_tokens"),
    ("Accepted tokens:", "accepted_tokens", "spec_decode_accepted_tokens"),
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A finished run.

    Attributes:
      options: what was run.
      model, tokenizer: their names; None for no tokenizer.
      num_prompts: how many requests were to be sent.
      outcome: the responses and the duration.
      speculation: growth of the server's speculation counters; None if the server has none.
    """

    options: ServeBenchmark
    model: str
    tokenizer: str | None
    num_prompts: int
    outcome: Outcome
    speculation: Counters | None


def printed(measured: Measurement, figures: Figures) -> str:
    """The report as text."""
    options, lines = measured.options, [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_totals(measured, figures)]
    for name in options.metrics:
        lines.append(f"{METRICS[name]:-^{WIDTH}}")
        for part, value in summary(figures.times[name], options.percentiles).items():
            what = "Std" if part == "std" else part.capitalize()
            lines.append(_line(f"{what} {name.upper()} (ms):", value))
        if name == "itl":
            lines.append(_line("Tokens per chunk:", figures.tokens_per_chunk))
    if measured.speculation is not None:
        lines += [f"{'Speculative Decoding':-^{WIDTH}}", *_speculation(measured.speculation)]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(measured: Measurement, figures: Figures) -> Iterator[str]:
    args, fields = measured.options.args, measured.options.fields
    for label, name in COUNTS:
        yield _line(label, getattr(figures, name))
    if args.max_concurrency is not None:
        yield _line("Maximum request concurrency:", args.max_concurrency)
    if args.request_rate < float("inf"):
        yield _line("Request rate configured (RPS):", args.request_rate)
    for label, name in FIGURES:
        if name != "request_goodput" or figures.request_goodput is not None:
            yield _line(label, getattr(figures, name))
    sampling = ", ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    yield _line("Fields of each request:", sampling or "the server's defaults")


def _speculation(counters: Counters) -> Iterator[str]:
    for label, name, _ in SPECULATION:
        yield _line(label, getattr(counters, name))
    if counters.accepted_at:
        yield "Per-position acceptance (%):"
    for place, rate in enumerate(counters.acceptance_rates_at):
        yield _line(f"  Position {place}:", 100 * rate)


def _line(label: str, value: Any) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}".rstrip()


def record(measured: Measurement, figures: Figures, now: datetime.datetime) -> dict[str, Any]:
    """The report as JSON, with vLLM's names. Times are in milliseconds where a name ends with ``_ms``, else in seconds."""
    options, args = measured.options, measured.options.args
    entries = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": measured.model,
        "tokenizer_id": measured.tokenizer,
        "dataset_name": args.dataset_name,
        "num_prompts": measured.num_prompts,
        **options.metadata,
        "request_rate": args.request_rate if args.request_rate < float("inf") else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "request_fields": dict(options.fields),
        "interrupted": measured.outcome.interrupted,
        **{name: getattr(figures, name) for _, name in (*COUNTS, *FIGURES)},
        "tokens_per_chunk": figures.tokens_per_chunk,
    }
    for name in options.metrics:
        parts = summary(figures.times[name], options.percentiles)
        entries |= {f"{part}_{name}_ms": value for part, value in parts.items()}
    counters = measured.speculation
    if counters is not None:
        entries |= {key: getattr(counters, name) for _, name, key in SPECULATION}
        entries["spec_decode_per_position_acceptance_rates"] = counters.acceptance_rates_at
    return entries


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


def file_name(measured: Measurement, now: datetime.datetime) -> str:
    """The default name of the file with the result."""
    args, model = measured.options.args, pathlib.PurePath(measured.model).name
    concurrency = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    what = (args.label or args.backend).replace("/", "_")
    return f"{what}-{args.request_rate}qps{concurrency}-{model}-{now.strftime('%Y%m%d-%H%M%S')}.json"
