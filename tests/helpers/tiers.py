"""Which tests only ``make nightly`` has: see tests/nightly.toml."""

import re
import tomllib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
COLLECTED: list[str] = []  # ``folder/file::Class::test[parameters]`` of this run, in all tiers; conftest.py appends


def in_tiers(values: Iterable[Any], test: Container[Any]) -> list[Any]:
    """``pytest.param`` of each value: ``make test`` has those in ``test``, ``make nightly`` the others."""
    return [value if value in test else pytest.param(value, marks=pytest.mark.nightly) for value in values]


def table() -> dict[str, list[str] | int]:
    """tests/nightly.toml: ``folder/file::test`` -> regular expressions of the parameters that ``make test`` keeps, or n for
    every n-th of them."""
    folders = tomllib.loads((TESTS / "nightly.toml").read_text())
    return {str(Path(folder, test)): kept for folder, tests in folders.items() for test, kept in tests.items()}


def entry_of(node: str, entries: dict[str, list[str] | int]) -> str | None:
    """The entry that names a test, or its class or file."""
    name = node.partition("[")[0]
    return next((entry for entry in (name, name.rpartition("::")[0]) if entry in entries), None)


def is_nightly(node: str, index: int, entries: dict[str, list[str] | int]) -> bool:
    """Whether a test is left to ``make nightly``.

    Args:
      node: ``folder/file::Class::test[parameters]``.
      index: its number among the parameters of the test.
      entries: as of ``table``. An entry may also name a class or a file.
    """
    entry = entry_of(node, entries)
    if entry is None:
        return False
    kept = entries[entry]
    if isinstance(kept, int):
        return index % kept != 0
    return not any(re.search(pattern, node.rpartition("::")[2]) for pattern in kept)
