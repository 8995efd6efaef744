"""Benchmarks as commands."""

import sys

import pytest

from benchmarks.report import results


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function: a benchmark's module and options -> the result that its command writes."""

    def run(module, *options: str, code: int = 0) -> results.Result:
        file = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", [module.__name__.rpartition(".")[2], *options, "--json", str(file)])
        assert module.main() == code
        return results.read(file)

    return run
