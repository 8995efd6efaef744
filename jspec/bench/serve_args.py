"""Parsed options of ``jspec bench serve`` as the URL, headers and body fields of its requests."""

import argparse
import json
import os
from collections.abc import Mapping
from typing import Any

from jspec._validation import require
from jspec.bench.sampling_options import sampling_of


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
