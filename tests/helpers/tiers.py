"""Which tests only ``make nightly`` has: see tests/nightly.toml."""

import re
import tomllib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def in_tiers(values: Iterable[Any], test: Container[Any]) -> list[Any]:
    """``pytest.param`` of each value: ``make test`` has those in ``test``, ``make nightly`` the others."""
    return [value if value in test else pytest.param(value, marks=pytest.mark.nightly) for value in values]


def table() -> dict[str, list[str] | int]:
    """tests/nightly.toml: ``folder/file::test`` -> regular expressions of the parameters that ``make test`` keeps, or n for
    every n-th of them."""
    folders = tomllib.loads((TESTS / "nightly.toml").read_text())
    return {f"{folder}/{test}": kept for folder, tests in folders.items() for test, kept in tests.items()}


def is_nightly(node: str, index: int, entries: dict[str, list[str] | int]) -> bool:
    """Whether a test is left to ``make nightly``.

    Args:
      node: ``folder/file::Class::test[parameters]``.
      index: its number among the parameters of the test.
      entries: as of ``table``. An entry may also name a class.
    """
    name = node.partition("[")[0]
    kept = entries.get(name, entries.get(name.rpartition("::")[0]))
    if isinstance(kept, int):
        return index % kept != 0
    return kept is not None and not any(re.search(pattern, node.rpartition("::")[2]) for pattern in kept)
