"""``jspec bench throughput``: prompts per second of an engine in this process that gets all of them at once."""

import argparse
import contextlib
import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from jspec._validation import require
from jspec.bench.datasets import Sample
from jspec.bench.engine_options import engine_record, params_of
from jspec.bench.files import write_json
from jspec.bench.request_options import dataset_of
from jspec.commands.model_args import chosen_model
from jspec.outputs import total_stats
from jspec.sampling.request_keys import request_keys

if TYPE_CHECKING:
    import jspec


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit code.

    Raises:
      ValueError: an option, a dataset or a checkpoint cannot be used.
    """
    dataset = dataset_of(args)
    model = chosen_model(args)
    if model.ran_as_follower():
        return 0
    llm = model.load()
    require(llm.tokenizer is not None, "target", args.target, "a checkpoint folder that has a tokenizer")
    samples = dataset.samples(args.num_prompts, llm.tokenizer, args.seed)
    print("jspec bench: compiling", file=sys.stderr, flush=True)
    llm.warmup()
    results, seconds = measured(llm, samples, args)
    if not results:
        print("jspec bench throughput: interrupted before any prompt was completed", file=sys.stderr)
        return 130
    figures = figures_of(results, seconds)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total tokens/s, "
        f"{figures['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {figures['total_input_tokens']}")
    print(f"Total num output tokens:  {figures['total_output_tokens']}")
    print(f"Acceptance length:  {figures['acceptance_length']:.2f}")
    interrupted = len(results) < len(samples)
    if args.output_json is not None:
        what = {"dataset_name": args.dataset_name, "num_prompts": len(samples), "interrupted": interrupted}
        write_json(args.output_json, figures | what | engine_record(llm, args))
    if interrupted:
        ended, wanted = len(results), len(samples)
        print(f"jspec bench throughput: interrupted when {ended} of {wanted} prompts were completed", file=sys.stderr)
    return 130 if interrupted else 0


def measured(llm: "jspec.LLM", samples: list[Sample], args: argparse.Namespace) -> tuple[list["jspec.Result"], float]:
    """The results of all prompts, or those completed before Ctrl-C, and the seconds they took.

    Raises:
      RuntimeError: a completion failed.
    """
    params = params_of(llm, args, ignore_eos=args.ignore_eos)
    every = [
        dataclasses.replace(params, max_tokens=sample.output_len, seed=args.seed + i)
        for i, sample in enumerate(samples)
    ]
    prompts, keys = [sample.prompt for sample in samples], request_keys(every, None)
    results, started = [], time.perf_counter()
    bar = tqdm(total=len(samples), unit="prompt", disable=args.disable_tqdm or not sys.stderr.isatty())
    with (
        bar,
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(llm.completions(prompts, every, keys)) as ended,
    ):
        for _, _, result in ended:
            if result.finish_reason == "error":
                raise RuntimeError(f"a completion failed: {result.stop_reason}")
            results.append(result)
            bar.update()
    return results, time.perf_counter() - started


def figures_of(results: list["jspec.Result"], seconds: float) -> dict[str, Any]:
    """The figures, under vLLM's names where vLLM has them."""
    inputs = sum(len(result.prompt_token_ids) for result in results)
    outputs = sum(len(result.token_ids) for result in results)
    stats = total_stats(result.stats for result in results)
    return {
        "elapsed_time": seconds,
        "num_requests": len(results),
        "total_num_tokens": inputs + outputs,
        "requests_per_second": len(results) / seconds,
        "tokens_per_second": (inputs + outputs) / seconds,
        "output_tokens_per_second": outputs / seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position,
    }
