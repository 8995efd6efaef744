"""A run of ``jspec bench serve``: send the requests, report the figures."""

import argparse
import asyncio
import datetime
import pathlib
import sys

import aiohttp
from tqdm import tqdm

from jspec._validation import require
from jspec.bench.arrivals import send_times
from jspec.bench.client import CHAT, PATHS, Endpoint
from jspec.bench.counters import counter_growth, read_counters
from jspec.bench.datasets import Sample
from jspec.bench.figures import figures_of
from jspec.bench.files import write_json
from jspec.bench.load import send, session
from jspec.bench.plot import plot
from jspec.bench.report import Measurement, details, file_name, printed, record
from jspec.bench.responses import Response
from jspec.bench.serve_args import ServeBenchmark, checked_options
from jspec.bench.server import models_of
from jspec.commands.model_args import checkpoint_folder
from jspec.text.detokenizer import Tokenizer, encode

COUNTED = ("random", "sharegpt")  # datasets that need a tokenizer


def run(args: argparse.Namespace) -> int:
    """Measure a server; returns the exit code.

    Raises:
      ValueError: an option cannot be used, or the server cannot be reached.
    """
    benchmark = checked_options(args)
    measured = asyncio.run(_measure(benchmark))
    if not measured.outcome.responses:
        print("jspec bench serve: interrupted before any request ended; nothing was measured", file=sys.stderr)
        return 130
    return _report(measured)


async def _measure(benchmark: ServeBenchmark) -> Measurement:
    """Send the requests. A cancellation meanwhile ends the run, and the responses so far are returned."""
    args = benchmark.args
    async with session() as client:
        names = await models_of(client, benchmark.url, benchmark.headers, args.ready_check_timeout_sec)
        model = args.model or (names[0] if names else None)
        if model is None:
            raise ValueError(f"model=None: expected the name of a model, because {benchmark.url}/v1/models has none")
        tokenizer_name, tokenizer = _tokenizer(args, model)
        samples = benchmark.dataset.samples(args.num_prompts, tokenizer, args.seed)
        url = benchmark.url + (args.endpoint or PATHS[args.backend])
        endpoint = Endpoint(
            url, args.served_model_name or model, args.backend == CHAT, benchmark.fields, benchmark.headers
        )
        await _warm_up(client, endpoint, samples[0], args.num_warmups, args.max_concurrency)
        times = send_times(len(samples), args.request_rate, args.burstiness, args.seed)
        before = await read_counters(client, f"{benchmark.url}/metrics", benchmark.headers)
        with tqdm(total=len(samples), unit="request", disable=args.disable_tqdm or not sys.stderr.isatty()) as bar:
            outcome = await send(client, endpoint, samples, times, args.max_concurrency, bar.update)
        speculation = counter_growth(before, await read_counters(client, f"{benchmark.url}/metrics", benchmark.headers))
    for response in outcome.responses:
        _count_tokens(response, tokenizer)
    return Measurement(benchmark, model, tokenizer_name, len(samples), outcome, speculation)


def _tokenizer(args: argparse.Namespace, model: str) -> tuple[str | None, Tokenizer | None]:
    """Folder or name, and object, of the tokenizer: that of ``--tokenizer``, or the model's if the dataset needs one.

    Raises:
      ValueError: the tokenizer cannot be loaded.
    """
    name = args.tokenizer or (model if args.dataset_name in COUNTED else None)
    if name is None:
        return None, None
    from jspec.checkpoints.checkpoint import Checkpoint  # here, because transformers takes seconds

    try:
        tokenizer = Checkpoint.open(checkpoint_folder(name)).tokenizer
    except ValueError as error:
        raise ValueError(f"tokenizer={name!r}: expected --tokenizer with a checkpoint folder ({error})") from None
    require(tokenizer is not None, "tokenizer", name, "a checkpoint folder that has a tokenizer")
    return name, tokenizer


async def _warm_up(
    client: aiohttp.ClientSession, endpoint: Endpoint, sample: Sample, count: int, max_concurrency: int | None
):
    """Send one sample ``count`` times before the measurement.

    Raises:
      ValueError: a request failed.
    """
    outcome = await send(client, endpoint, [sample] * count, [0.0] * count, max_concurrency)
    if outcome.interrupted:
        raise KeyboardInterrupt
    for response in outcome.responses:
        if response.error:
            raise ValueError(f"a request before the measurement failed: {response.error}")


def _count_tokens(response: Response, tokenizer: Tokenizer | None):
    """Count a response's tokens if the server did not. Without a tokenizer, a response of unknown length is a failure."""
    if response.error or response.output_tokens is not None:
        return
    if tokenizer is None:
        response.error = "the server does not report how many tokens a response has: give --tokenizer"
    else:
        response.output_tokens = len(encode(tokenizer, response.text, "a response", add_special_tokens=False))


def _report(measured: Measurement) -> int:
    """Print the report and write its files; returns the exit code."""
    args, outcome = measured.options.args, measured.outcome
    figures = figures_of(outcome.responses, outcome.seconds, measured.options.goodput)
    print(printed(measured, figures))
    now = datetime.datetime.now()
    if args.save_result or args.save_detailed:
        content = record(measured, figures, now)
        content |= details(outcome.responses) if args.save_detailed else {}
        file = (args.result_dir or pathlib.Path()) / (args.result_filename or file_name(measured, now))
        write_json(file, content)
        print(f"jspec bench serve: result in {file}", file=sys.stderr)
    if args.plot is not None:
        plot(args.plot, f"{args.label or args.backend}, {measured.model}", outcome.responses, figures)
    errors = [response.error for response in outcome.responses if response.error]
    if errors:
        print(f"jspec bench serve: {len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
    if outcome.interrupted:
        ended, wanted = len(outcome.responses), measured.num_prompts
        print(f"jspec bench serve: interrupted when {ended} of {wanted} requests had ended", file=sys.stderr)
        return 130
    return 0 if figures.completed else 1
