"""Options of requests: the dataset of their prompts, and sampling."""

import argparse
import pathlib
from typing import TYPE_CHECKING, Any

from jspec._validation import require

if TYPE_CHECKING:
    from jspec.bench.datasets import Dataset

NAMES = ("random", "sharegpt", "custom", "spec_bench")  # of datasets
SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def add_dataset_options(parser: argparse.ArgumentParser):
    """Declare the options of the dataset."""
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=NAMES, default="random", help="%(default)s by default")
    group.add_argument("--dataset-path", type=pathlib.Path, metavar="FILE", help="of every dataset but random")
    group.add_argument("--num-prompts", type=int, default=1000, help="%(default)s")
    group.add_argument("--seed", type=int, default=0, help="of lengths, random tokens, order and arrivals; %(default)s")
    group.add_argument("--disable-shuffle", action="store_true", help="keep the order of the file")
    group.add_argument("--no-oversample", action="store_true", help="send no prompt twice, so fewer than --num-prompts")
    group.add_argument("--random-input-len", type=int, default=1024, metavar="N", help="tokens; %(default)s")
    group.add_argument("--random-output-len", type=int, default=128, metavar="N", help="tokens; %(default)s")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths are 1 - R to 1 + R times as long"
    )
    group.add_argument("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share")
    group.add_argument("--sharegpt-output-len", type=int, metavar="N", help="in place of the lengths in the file")
    group.add_argument(
        "--custom-output-len", type=int, default=256, metavar="N", help="-1 takes output_tokens of a line; %(default)s"
    )
    group.add_argument("--spec-bench-output-len", type=int, default=256, metavar="N", help="%(default)s")
    group.add_argument("--spec-bench-category", metavar="NAME", help="only questions of this category")


def dataset_of(args: argparse.Namespace) -> "Dataset":
    """The dataset that the options name.

    Raises:
      ValueError: a length is out of range, or a file is missing.
    """
    from jspec.bench.datasets import Choice, Custom, RandomText, ShareGPT, SpecBench  # here, because it needs numpy

    require(args.num_prompts >= 1, "num_prompts", args.num_prompts, "an integer of at least 1")
    require(args.seed >= 0, "seed", args.seed, "an integer of at least 0")
    if args.dataset_name == "random":
        require(args.dataset_path is None, "dataset_path", str(args.dataset_path), "none beside --dataset-name random")
        lengths = args.random_input_len, args.random_output_len, args.random_range_ratio, args.random_prefix_len
        return RandomText(*lengths)
    if args.dataset_path is None:
        raise ValueError(f"dataset_name={args.dataset_name!r}: expected --dataset-path beside it, the file to read")
    choice = Choice(args.dataset_path, not args.disable_shuffle, not args.no_oversample)
    if args.dataset_name == "sharegpt":
        _require_length("sharegpt_output_len", 1 if args.sharegpt_output_len is None else args.sharegpt_output_len)
        return ShareGPT(choice, args.sharegpt_output_len)
    if args.dataset_name == "custom":
        if args.custom_output_len != -1:
            _require_length("custom_output_len", args.custom_output_len)
        return Custom(choice, args.custom_output_len)
    _require_length("spec_bench_output_len", args.spec_bench_output_len)
    return SpecBench(choice, args.spec_bench_output_len, args.spec_bench_category)


def _require_length(name: str, value: int):
    require(value >= 1, name, value, "an integer of at least 1")


def add_sampling_options(parser: argparse.ArgumentParser, otherwise: str):
    """Declare the sampling options; ``otherwise`` names where the defaults come from, for the help text."""
    group = parser.add_argument_group("sampling", f"Defaults are those of {otherwise}.")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--min-p", type=float)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that are given, by name."""
    return {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
