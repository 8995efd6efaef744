"""A run of ``jspec bench serve``: the server is looked at, asked, and reported on."""

import argparse
import asyncio
import dataclasses
import datetime
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import aiohttp
from tqdm import tqdm

from jspec._validation import require
from jspec.bench.answers import Answer
from jspec.bench.arrivals import send_times
from jspec.bench.client import CHAT, PATHS, Endpoint
from jspec.bench.counters import Counters, grown, read_counters
from jspec.bench.dataset_options import dataset_of
from jspec.bench.datasets import Dataset, Sample
from jspec.bench.figures import figures_of, goodput_limits, metrics_of, percentiles_of
from jspec.bench.files import write_json
from jspec.bench.load import Outcome, send, session
from jspec.bench.plot import check_plot, plot
from jspec.bench.report import Settings, details, file_name, printed, record
from jspec.bench.serve_command import base_url, fields_of, headers_of, pairs_of
from jspec.bench.server import models_of
from jspec.commands.model_args import found
from jspec.text.detokenizer import Tokenizer, encode

COUNTED = ("random", "sharegpt")  # datasets that need a tokenizer


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A run that is over.

    Attributes:
      settings: what it was.
      outcome: what came of it.
      speculation: what the server drafted meanwhile; None if it does not tell.
    """

    settings: Settings
    outcome: Outcome
    speculation: Counters | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run, all of whose options were found to be sound.

    Attributes:
      args: the options that need no check.
      url: of the server.
      headers, fields: of each request.
      dataset: what is asked.
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


def run(args: argparse.Namespace) -> int:
    """Measure a server; returns the exit code.

    Raises:
      ValueError: an option cannot be used, or there is no such server.
    """
    plan = planned(args)
    measured = asyncio.run(_measure(plan))
    if not measured.outcome.answers:
        print("jspec bench serve: interrupted before any request ended; nothing was measured", file=sys.stderr)
        return 130
    return _report(plan, measured)


def planned(args: argparse.Namespace) -> Plan:
    """What the options say.

    Raises:
      ValueError: one of them cannot be used.
    """
    send_times(1, args.request_rate, args.burstiness)
    ok = args.max_concurrency is None or args.max_concurrency >= 1
    require(ok, "max_concurrency", args.max_concurrency, "an integer of at least 1, or none")
    require(args.num_warmups >= 0, "num_warmups", args.num_warmups, "an integer of at least 0")
    if args.plot is not None:
        check_plot(args.plot)
    return Plan(
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


async def _measure(plan: Plan) -> Measurement:
    """Ask the server. A cancellation while requests are under way ends the run, and what was measured is returned."""
    args = plan.args
    async with session() as client:
        names = await models_of(client, plan.url, plan.headers, args.ready_check_timeout_sec)
        model = args.model or (names[0] if names else None)
        if model is None:
            raise ValueError(f"model=None: expected the name of a model, because {plan.url}/v1/models has none")
        tokenizer_name, tokenizer = _tokenizer(args, model)
        samples = plan.dataset.samples(args.num_prompts, tokenizer, args.seed)
        url = plan.url + (args.endpoint or PATHS[args.backend])
        endpoint = Endpoint(url, args.served_model_name or model, args.backend == CHAT, plan.fields, plan.headers)
        await _warm_up(client, endpoint, samples[0], args.num_warmups, args.max_concurrency)
        times = send_times(len(samples), args.request_rate, args.burstiness, args.seed)
        before = await read_counters(client, f"{plan.url}/metrics", plan.headers)
        with tqdm(total=len(samples), unit="request", disable=args.disable_tqdm or not sys.stderr.isatty()) as bar:
            outcome = await send(client, endpoint, samples, times, args.max_concurrency, bar.update)
        speculation = grown(before, await read_counters(client, f"{plan.url}/metrics", plan.headers))
    for answer in outcome.answers:
        _count_tokens(answer, tokenizer)
    settings = Settings(
        backend=args.backend,
        model=model,
        tokenizer=tokenizer_name,
        dataset=args.dataset_name,
        num_prompts=len(samples),
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        fields=plan.fields,
        label=args.label,
        metadata=plan.metadata,
        metrics=plan.metrics,
        percentiles=plan.percentiles,
    )
    return Measurement(settings, outcome, speculation)


def _tokenizer(args: argparse.Namespace, model: str) -> tuple[str | None, Tokenizer | None]:
    """The tokenizer that was asked for, or the model's if the dataset needs one; its folder or name comes first.

    Raises:
      ValueError: there is none.
    """
    name = args.tokenizer or (model if args.dataset_name in COUNTED else None)
    if name is None:
        return None, None
    from jspec.checkpoints.tokenizer import load_tokenizer  # here, because transformers takes seconds

    try:
        tokenizer = load_tokenizer(found(name))
    except ValueError as error:
        raise ValueError(f"tokenizer={name!r}: expected --tokenizer with a checkpoint folder ({error})") from None
    require(tokenizer is not None, "tokenizer", name, "a checkpoint folder that has a tokenizer")
    return name, tokenizer


async def _warm_up(
    client: aiohttp.ClientSession, endpoint: Endpoint, sample: Sample, count: int, max_concurrency: int | None
):
    """Ask the first sample so many times.

    Raises:
      ValueError: there is no answer.
    """
    outcome = await send(client, endpoint, [sample] * count, [0.0] * count, max_concurrency)
    if outcome.interrupted:
        raise KeyboardInterrupt
    for answer in outcome.answers:
        if answer.error:
            raise ValueError(f"a request before the measurement failed: {answer.error}")


def _count_tokens(answer: Answer, tokenizer: Tokenizer | None):
    """Have the tokenizer count what the server did not. Without one, an answer of unknown length is a failure."""
    if answer.error or answer.output_tokens is not None:
        return
    if tokenizer is None:
        answer.error = "the server does not tell how many tokens an answer has: give --tokenizer"
    else:
        answer.output_tokens = len(encode(tokenizer, answer.text, "an answer", add_special_tokens=False))


def _report(plan: Plan, measured: Measurement) -> int:
    """Print the report and write its files; returns the exit code."""
    args, settings, outcome = plan.args, measured.settings, measured.outcome
    figures = figures_of(outcome.answers, outcome.seconds, plan.goodput)
    print(printed(settings, figures, measured.speculation))
    now = datetime.datetime.now()
    if args.save_result or args.save_detailed:
        content = record(settings, figures, measured.speculation, outcome.interrupted, now)
        content |= details(outcome.answers) if args.save_detailed else {}
        file = (args.result_dir or pathlib.Path()) / (args.result_filename or file_name(settings, now))
        write_json(file, content)
        print(f"jspec bench serve: result in {file}", file=sys.stderr)
    if args.plot is not None:
        plot(args.plot, f"{settings.label or settings.backend}, {settings.model}", outcome.answers, figures)
    errors = [answer.error for answer in outcome.answers if answer.error]
    if errors:
        print(f"jspec bench serve: {len(errors)} requests failed, the first with: {errors[0]}", file=sys.stderr)
    if outcome.interrupted:
        ended, wanted = len(outcome.answers), settings.num_prompts
        print(f"jspec bench serve: interrupted when {ended} of {wanted} requests had ended", file=sys.stderr)
        return 130
    return 0 if figures.completed else 1
