"""Options of ``jspec bench latency`` and ``jspec bench throughput``, which load a model into this process."""

import argparse
import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

from jspec.bench.request_options import SAMPLING, add_dataset_options, add_sampling_options, sampling_of
from jspec.commands.group_args import add_group_options
from jspec.commands.model_args import add_model_options, add_speculation_options

if TYPE_CHECKING:
    import jspec


def add_latency_options(parser: argparse.ArgumentParser):
    """Declare the options of ``latency``."""
    _add_engine_options(parser, max_num_seqs=None)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of a prompt; %(default)s")
    parser.add_argument("--output-len", type=int, default=128, help="new tokens of each; %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts; %(default)s")
    parser.add_argument("--num-iters", type=int, default=30, help="measured iterations; %(default)s")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="iterations before; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and samples; %(default)s")


def add_throughput_options(parser: argparse.ArgumentParser):
    """Declare the options of ``throughput``."""
    _add_engine_options(parser)
    add_dataset_options(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="completions always have the maximum length")


def _add_engine_options(parser: argparse.ArgumentParser, max_num_seqs: int | None = 64):
    """Declare the options of model, speculation, sampling and output."""
    add_model_options(parser, max_num_seqs)
    add_speculation_options(parser)
    add_group_options(parser)
    add_sampling_options(parser, "the checkpoint")
    parser.add_argument("--output-json", type=pathlib.Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def params_of(llm: "jspec.LLM", args: argparse.Namespace, **fields) -> "jspec.SamplingParams":
    """The sampling parameters: those of the options, else the checkpoint's defaults."""
    return dataclasses.replace(llm.default_sampling_params, **sampling_of(args), **fields)


def engine_record(llm: "jspec.LLM", args: argparse.Namespace) -> dict[str, Any]:
    """The JSON entries of versions, device, model, speculation and sampling."""
    import jax

    import jspec

    return {
        "jspec": jspec.__version__,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "model_id": args.target,
        "draft": args.draft,
        "method": llm.method,
        "speculation": dataclasses.asdict(llm.speculation) if llm.method is not None else None,
        "sampling": {name: getattr(params_of(llm, args), name) for name in SAMPLING},
    }
