"""``jspec bench``: its three benchmarks, and which one runs."""

import argparse
import importlib

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
    """Measure; returns the exit code.

    Raises:
      ValueError: an option cannot be used, or what is to be measured is not there.
    """
    if args.benchmark == "serve":
        return serve_command.run(args)
    return importlib.import_module(f"jspec.bench.{args.benchmark}").run(args)  # here, because both import JAX
