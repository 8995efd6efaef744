"""``benchmarks.acceptance.schemas``: what counts as invalid, and a small run."""

import json
import sys

import pytest

from benchmarks.acceptance import schemas

SCHEMA = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}


@pytest.mark.parametrize("text", ['{"size": 1', '{"size": "1"}', "{}", "[]", ""])
def test_what_does_not_fit_is_a_fault(text):
    assert schemas.fault_of(text, SCHEMA)


def test_what_fits_is_none():
    assert schemas.fault_of('{"size": 1}', SCHEMA) is None


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What a run measures, until so many completions have ended."""

    def run(count: int) -> dict[str, float]:
        file = tmp_path / "result.json"
        monkeypatch.setattr(schemas, "ROWS", 4)
        monkeypatch.setattr(sys, "argv", ["schemas", "--count", str(count), "--json", str(file)])
        schemas.main()
        return json.loads(file.read_text())["measured"]

    return run


@pytest.mark.nightly
def test_a_small_run_counts_what_has_ended(measured):
    found = measured(4)
    assert found["ended"] >= 4
    assert found["invalid"] == 0
    assert 1 <= found["schemas"] <= found["ended"]
    assert found["tokens a round"] > 1


@pytest.mark.nightly
def test_a_completion_that_does_not_fit_is_counted(measured, monkeypatch):
    monkeypatch.setattr(schemas, "fault_of", lambda text, schema: "it is said not to fit")
    found = measured(1)
    assert found["invalid"] == found["ended"] >= 1
