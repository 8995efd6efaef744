"""``jspec bench``: its three benchmarks, and which one runs."""

import argparse
import importlib

from jspec._validation import require_packages
from jspec.bench import serve_command
from jspec.bench.engine_options import add_latency_options, add_throughput_options


def add_arguments(parser: argparse.ArgumentParser):
    """Declare the benchmarks and their options. Names are vLLM's where they mean the same."""
    benchmarks = parser.add_subparsers(dest="benchmark", required=True)
    serve_command.add_arguments(
        benchmarks.add_parser(
            "serve",
            help="measure a server that speaks OpenAI's protocol",
            description="Measure a server, jspec's or another. It needs pip install 'jspec[bench]'.",
        )
    )
    add_latency_options(
        benchmarks.add_parser("latency", help="measure how long one batch takes in an engine in this process")
    )
    add_throughput_options(
        benchmarks.add_parser("throughput", help="measure how many prompts an engine in this process completes")
    )


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit code: 1 if no request succeeded, 130 after Ctrl-C.

    Raises:
      ValueError: an option cannot be used, what is to be measured is not there, or a package of the extra is not installed.
    """
    if args.benchmark == "serve":
        require_packages("bench", "aiohttp", "prometheus_client")
    return importlib.import_module(f"jspec.bench.{args.benchmark}").run(args)  # which imports these, or JAX
