"""Which tests only ``make nightly`` has: see tests/nightly.toml."""

import ast
import re
import tomllib
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TIERS = ("long", "nightly", "gpu", "real")  # markers of tests that ``make test`` leaves out
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


def fault_tests() -> dict[str, str]:
    """``file::test`` of all fault tests -> the tier in which all of it runs, ``make test`` if it has no marker."""
    found = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(file.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for parent in (tree, *classes):
            for node in parent.body:
                if isinstance(node, ast.FunctionDef) and re.fullmatch(r"test_.*_(is|are)_detected", node.name):
                    names = [parent.name, node.name] if isinstance(parent, ast.ClassDef) else [node.name]
                    marks = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
                    tier = next((tier for tier in TIERS if f"pytest.mark.{tier}" in marks), "test")
                    found["::".join([str(file.relative_to(TESTS)), *names])] = f"make {tier}"
    return found
