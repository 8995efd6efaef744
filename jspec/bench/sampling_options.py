"""The sampling options, which every benchmark has."""

import argparse
from typing import Any

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


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
