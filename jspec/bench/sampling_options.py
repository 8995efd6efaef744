"""The options that say how tokens are drawn; every benchmark has them."""

import argparse
from typing import Any

SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def add_sampling_options(parser: argparse.ArgumentParser, otherwise: str):
    """Declare how tokens are drawn; ``otherwise`` is who decides what is not given."""
    group = parser.add_argument_group("sampling", f"What is not given is left to {otherwise}.")
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    group.add_argument("--min-p", type=float)


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that are given, by name."""
    return {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
