"""Parameters of tests, some of which only ``make nightly`` has."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def in_tiers(values: Iterable[Any], test: Container[Any]) -> list[Any]:
    """``pytest.param`` of each value: ``make test`` has those in ``test``, ``make nightly`` the others."""
    return [value if value in test else pytest.param(value, marks=pytest.mark.nightly) for value in values]
