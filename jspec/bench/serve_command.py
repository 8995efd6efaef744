"""``jspec bench serve``: its options, and a run from the first look at the server to the report."""

import argparse
import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jspec._validation import require
from jspec.bench.dataset_options import add_dataset_options
from jspec.bench.sampling_options import add_sampling_options, sampling_of

PACKAGES = ("aiohttp", "prometheus_client")  # of the extra ``bench``, without which nothing runs
BACKENDS = ("openai", "openai-chat")


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the options."""
    parser.add_argument("--backend", choices=BACKENDS, default="openai", help="completions, or chats; %(default)s")
    parser.add_argument("--base-url", metavar="URL", help="of the server, in place of --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="%(default)s")
    parser.add_argument("--port", type=int, default=8000, help="%(default)s")
    parser.add_argument("--endpoint", metavar="PATH", help="/v1/completions, or /v1/chat/completions for openai-chat")
    parser.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE", help="further headers of HTTP")
    parser.add_argument("--model", help="name, or checkpoint folder; the first that the server names")
    parser.add_argument("--served-model-name", help="what the server calls the model; as --model")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="checkpoint folder, to count tokens with; as --model")
    parser.add_argument("--ready-check-timeout-sec", type=float, default=0.0, help="wait so long for the server; 0")
    add_dataset_options(parser)
    _add_load(parser)
    add_sampling_options(parser, "the server")
    _add_request(parser)
    _add_report(parser)


def _add_load(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", type=float, default=float("inf"), help="requests per second; all at once")
    group.add_argument("--burstiness", type=float, default=1.0, help="1 is a Poisson process, less comes in bursts")
    group.add_argument("--max-concurrency", type=int, help="requests under way; as many as arrive")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before anything is measured; %(default)s")


def _add_request(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("each request")
    group.add_argument("--ignore-eos", action="store_true", help="answers are as long as they may be")
    group.add_argument("--extra-body", metavar="JSON", help="further fields of the request's body")


def _add_report(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("report")
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits of a good request")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", help="what is reported; %(default)s")
    group.add_argument("--metric-percentiles", default="99", help="%(default)s")
    group.add_argument("--save-result", action="store_true", help="write the result as JSON")
    group.add_argument("--save-detailed", action="store_true", help="the same, with an entry for each request")
    group.add_argument("--result-dir", type=pathlib.Path, metavar="FOLDER", help="where; here")
    group.add_argument("--result-filename", metavar="NAME", help="its name; made of label, rate, model and time")
    group.add_argument("--label", help="what to call the run; the backend")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="further fields of the JSON")
    group.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw the run into a .png, .svg or .pdf")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Measure a server; returns the exit code: 1 if no request succeeded, 130 after Ctrl-C.

    Raises:
      ValueError: an option cannot be used, or there is no such server.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: expected what pip install 'jspec[bench]' installs")
    from jspec.bench import serve

    return serve.run(args)


def base_url(args: argparse.Namespace) -> str:
    """The address of the server, without a path of its own.

    Raises:
      ValueError: it is no address of HTTP, or has the ``/v1`` that belongs to the endpoint.
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
    """The headers of each request. The variable ``OPENAI_API_KEY`` has the key, as in vLLM.

    Raises:
      ValueError: a header has no ``=``.
    """
    key = os.environ.get("OPENAI_API_KEY")
    return ({"Authorization": f"Bearer {key}"} if key else {}) | pairs_of("header", args.header)


def pairs_of(name: str, given: list[str]) -> dict[str, str]:
    """The names and values of an option with ``KEY=VALUE``.

    Raises:
      ValueError: one has no ``=``.
    """
    for text in given:
        require(text.partition("=")[0] != "" and "=" in text, name, text, "KEY=VALUE")
    return {key: value for key, _, value in (text.partition("=") for text in given)}


def fields_of(args: argparse.Namespace) -> Mapping[str, Any]:
    """The fields of each request's body beyond the prompt and its length.

    Raises:
      ValueError: ``--extra-body`` is no object.
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
