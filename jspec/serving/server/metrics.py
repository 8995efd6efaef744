"""``/metrics``: the engine's metrics in Prometheus' format, under vLLM's names where vLLM has them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jspec.engine.metrics import Histogram, Metrics
from jspec.serving.generation.service import Service

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reads the engine's metrics at every scrape, instead of counting by itself.

    Args:
      service: its engine is read.
    """

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """The current value of every metric."""
        metrics = self._service.llm.engine.metrics()
        labels = (self._service.names[0], "0")
        kinds = (GaugeMetricFamily, _gauges(metrics, self._service)), (CounterMetricFamily, _counters(metrics))
        for kind, rows in kinds:
            for name, text, value in rows:
                family = kind(name, text, labels=LABELS)
                family.add_metric(labels, value)
                yield family
        reasons, positions = metrics.num_finished_by_reason, enumerate(metrics.num_accepted_tokens_per_position)
        yield _by("vllm:request_success", "Requests that have ended, by reason", "finished_reason", labels, reasons)
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Drafts accepted at each position"
        yield _by(name, text, "position", labels, {str(i): count for i, count in positions})
        versions = metrics.drafts_by_version
        for what, text, place in (("draft", "Drafts that were verified", 0), ("accepted", "Drafts accepted", 1)):
            name, values = f"jspec:version_{what}_tokens", {version: both[place] for version, both in versions.items()}
            yield _by(name, f"{text}, of the newest weights", "weights_version", labels, values)
        for name, text, histogram in _histograms(metrics):
            family = HistogramMetricFamily(name, text, labels=LABELS)
            family.add_metric(labels, _buckets(histogram), histogram.total)
            yield family


def _gauges(m: Metrics, service: Service) -> list[tuple[str, str, float]]:
    pause = service.loop_monitor.longest_pause
    return [
        ("vllm:num_requests_running", "Requests in prefill or decoding", m.num_running),
        ("vllm:num_requests_waiting", "Requests in the queue", m.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of pages that requests hold, 1 is all", m.pages_used / m.pages_total),
        ("jspec:num_http_requests", "HTTP requests under way", service.in_flight),
        ("jspec:num_pending_body_bytes", "Bytes of bodies that arrive or are parsed", service.bodies.pending_bytes),
        ("jspec:event_loop_longest_pause_seconds", "For how long the event loop was busy, of the last minute", pause),
        ("jspec:num_pages_cached", "Pages that only the prefix cache holds", m.pages_cached),
        ("jspec:num_pages_swapped", "Pages in host memory", m.pages_swapped),
        ("jspec:rows_per_call", "Rows that decode in a call, on average since the start", m.rows_per_call),
    ]


def _counters(m: Metrics) -> list[tuple[str, str, float]]:
    queried = m.num_cached_tokens + m.num_prefill_tokens
    return [
        ("vllm:num_preemptions", "Requests that lost their row", m.num_preemptions),
        ("vllm:prefix_cache_queries", "Tokens of prompts looked for in the prefix cache", queried),
        ("vllm:prefix_cache_hits", "Tokens of prompts found there", m.num_cached_tokens),
        ("vllm:prompt_tokens", "Tokens of prompts", m.num_prompt_tokens),
        ("vllm:generation_tokens", "New tokens", m.num_generation_tokens),
        ("vllm:spec_decode_num_drafts", "Rounds with drafts", m.num_drafting_rounds),
        ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified", m.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted", m.num_accepted_tokens),
        ("jspec:num_rounds", "Rounds, each once for every request in it", m.num_rounds),
        ("jspec:num_calls", "Calls of decode programs", m.num_calls),
        ("jspec:num_padding_tokens", "Tokens of padding in prefill batches", m.num_padding_tokens),
        ("jspec:num_compilations", "Programs that were compiled", m.num_compilations),
    ]


def _histograms(m: Metrics) -> list[tuple[str, str, Histogram]]:
    return [
        ("vllm:time_to_first_token_seconds", "From arrival to the first token", m.first_token_seconds),
        ("vllm:inter_token_latency_seconds", "Between two tokens of a request", m.between_tokens_seconds),
        ("vllm:e2e_request_latency_seconds", "From arrival to the end", m.last_token_seconds),
        ("vllm:request_queue_time_seconds", "From arrival to a row", m.queue_seconds),
    ]


def _by(name: str, text: str, label: str, labels: tuple[str, str], values: dict[str, int]) -> CounterMetricFamily:
    """A counter for each value of one more label."""
    counter = CounterMetricFamily(name, text, labels=(*LABELS, label))
    for key, value in values.items():
        counter.add_metric((*labels, key), value)
    return counter


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """(bound, number of durations up to it) for all bounds and infinity."""
    names, total, buckets = [*map(str, histogram.bounds), "+Inf"], 0, []
    for name, count in zip(names, histogram.counts, strict=True):
        total += count
        buckets.append((name, total))
    return buckets
