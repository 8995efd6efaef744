"""The checked options of ``jspec bench serve``: URL, headers and body fields of its requests, dataset and report."""

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from jspec._validation import require
from jspec.bench.arrivals import send_times
from jspec.bench.datasets import Dataset
from jspec.bench.figures import goodput_limits, metrics_of, percentiles_of
from jspec.bench.plot import check_plot
from jspec.bench.request_options import dataset_of, sampling_of


@dataclasses.dataclass(frozen=True)
class ServeBenchmark:
    """The checked options of a run.

    Attributes:
      args: the parsed options.
      url: of the server, without a path.
      headers, fields: HTTP headers and body fields of each request.
      dataset: where the prompts come from.
      goodput: metric -> the most milliseconds of a good request.
      metrics, percentiles: what is reported.
      metadata: what the user adds to the JSON.
    """

    args: argparse.Namespace
    url: str
    headers: dict[str, str]
    fields: Mapping[str, Any]
    dataset: Dataset
    goodput: dict[str, float]
    metrics: list[str]
    percentiles: list[float]
    metadata: dict[str, str]


def checked_options(args: argparse.Namespace) -> ServeBenchmark:
    """Check the options of a run.

    Raises:
      ValueError: one of them cannot be used.
    """
    send_times(1, args.request_rate, args.burstiness)
    ok = args.max_concurrency is None or args.max_concurrency >= 1
    require(ok, "max_concurrency", args.max_concurrency, "an integer of at least 1, or none")
    require(args.num_warmups >= 0, "num_warmups", args.num_warmups, "an integer of at least 0")
    if args.plot is not None:
        check_plot(args.plot)
    return ServeBenchmark(
        args,
        url=base_url(args),
        headers=headers_of(args),
        fields=fields_of(args),
        dataset=dataset_of(args),
        goodput=goodput_limits(args.goodput),
        metrics=metrics_of(args.percentile_metrics),
        percentiles=percentiles_of(args.metric_percentiles),
        metadata=pairs_of("metadata", args.metadata),
    )


def base_url(args: argparse.Namespace) -> str:
    """The URL of the server, without a path.

    Raises:
      ValueError: it is not an HTTP URL, or it ends with the ``/v1`` that the endpoint begins with.
    """
    if args.base_url is None:
        require(0 < args.port < 2**16, "port", args.port, "an integer in 1..65535")
        return f"http://[{args.host}]:{args.port}" if ":" in args.host else f"http://{args.host}:{args.port}"
    url = args.base_url.rstrip("/")
    require(url.startswith(("http://", "https://")), "base_url", args.base_url, "http://.. or https://..")
    twice = url.endswith("/v1") and (args.endpoint or "/v1/").startswith("/v1/")
    require(not twice, "base_url", args.base_url, f"{url.removesuffix('/v1')}, because the endpoint begins with /v1")
    return url


def headers_of(args: argparse.Namespace) -> dict[str, str]:
    """The HTTP headers of each request, with the API key of the environment variable ``OPENAI_API_KEY``, as in vLLM.

    Raises:
      ValueError: a header has no ``=``.
    """
    key = os.environ.get("OPENAI_API_KEY")
    return ({"Authorization": f"Bearer {key}"} if key else {}) | pairs_of("header", args.header)


def pairs_of(name: str, given: list[str]) -> dict[str, str]:
    """An option's ``KEY=VALUE`` items as a dictionary.

    Raises:
      ValueError: an item has no ``=``.
    """
    for text in given:
        require(text.partition("=")[0] != "" and "=" in text, name, text, "KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in given)}


def fields_of(args: argparse.Namespace) -> Mapping[str, Any]:
    """The fields of each request's body besides the prompt and its length.

    Raises:
      ValueError: ``--extra-body`` is not a JSON object.
    """
    fields = sampling_of(args)
    if args.ignore_eos:
        fields["ignore_eos"] = True
    if args.extra_body is None:
        return fields
    try:
        extra = json.loads(args.extra_body)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(f'extra_body={args.extra_body!r}: expected a JSON object, {{"seed": 7}} for example')
    return fields | extra
