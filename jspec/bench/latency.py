"""``jspec bench latency``: seconds that one batch takes from its prompts to its last token."""

import argparse
import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from jspec._validation import require
from jspec.bench.engine_options import engine_record, params_of
from jspec.bench.files import write_json
from jspec.commands.model_args import chosen_model

if TYPE_CHECKING:
    import jspec

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(args: argparse.Namespace) -> int:
    """Measure; returns the exit code.

    Raises:
      ValueError: an option or a checkpoint cannot be used.
    """
    for name, least in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1)):
        require(getattr(args, name) >= least, name, getattr(args, name), f"an integer of at least {least}")
    require(args.num_iters_warmup >= 0, "num_iters_warmup", args.num_iters_warmup, "an integer of at least 0")
    require(0 <= args.seed < 2**32, "seed", args.seed, "an integer in 0..2^32 - 1")
    if args.max_num_seqs is None:
        args.max_num_seqs = args.batch_size
    model = chosen_model(args)
    if model.ran_as_follower():
        return 0
    llm = model.load()
    print("jspec bench: compiling", file=sys.stderr, flush=True)
    llm.warmup()
    seconds, interrupted = measured(llm, args)
    if not seconds:
        print("jspec bench latency: interrupted before anything was measured", file=sys.stderr)
        return 130
    print(f"Avg latency: {np.mean(seconds)} seconds")
    percentiles = dict(zip(map(str, PERCENTILES), np.percentile(seconds, PERCENTILES).tolist(), strict=True))
    for name, value in percentiles.items():
        print(f"{name}% percentile latency: {value} seconds")
    if args.output_json is not None:
        figures = {"avg_latency": float(np.mean(seconds)), "latencies": seconds, "percentiles": percentiles}
        sizes = {"input_len": args.input_len, "output_len": args.output_len, "batch_size": args.batch_size}
        write_json(args.output_json, figures | sizes | {"interrupted": interrupted} | engine_record(llm, args))
    if interrupted:
        print(f"jspec bench latency: interrupted after {len(seconds)} of {args.num_iters} iterations", file=sys.stderr)
    return 130 if interrupted else 0


def measured(llm: "jspec.LLM", args: argparse.Namespace) -> tuple[list[float], bool]:
    """Seconds of each iteration, and whether Ctrl-C ended the measurement early.

    Each iteration has new prompts of random tokens, so that the prefix cache has no page of them.
    """
    import jspec

    rng, seconds = np.random.default_rng(args.seed), []
    params = params_of(llm, args, max_tokens=args.output_len, ignore_eos=True)
    iterations = range(args.num_iters_warmup + args.num_iters)
    try:
        for number in tqdm(iterations, unit="batch", disable=args.disable_tqdm or not sys.stderr.isatty()):
            prompts = rng.integers(0, llm.target.config.vocab_size, (args.batch_size, args.input_len)).tolist()
            every = [dataclasses.replace(params, seed=args.seed + i) for i in range(args.batch_size)]
            started = time.perf_counter()
            jspec.generate(llm, prompts, every)
            if number >= args.num_iters_warmup:
                seconds.append(time.perf_counter() - started)
    except KeyboardInterrupt:
        return seconds, True
    return seconds, False
