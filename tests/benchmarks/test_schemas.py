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


@pytest.mark.nightly
def test_a_small_run_counts_what_has_ended(monkeypatch, tmp_path):
    file = tmp_path / "result.json"
    monkeypatch.setattr(schemas, "ROWS", 4)
    monkeypatch.setattr(sys, "argv", ["schemas", "--count", "4", "--json", str(file)])
    schemas.main()
    measured = json.loads(file.read_text())["measured"]
    assert measured["ended"] >= 4
    assert measured["invalid"] == 0
    assert 1 <= measured["schemas"] <= measured["ended"]
    assert measured["tokens a round"] > 1


@pytest.mark.nightly
def test_a_completion_that_does_not_fit_is_counted(monkeypatch, tmp_path):
    file = tmp_path / "result.json"
    monkeypatch.setattr(schemas, "ROWS", 4)
    monkeypatch.setattr(schemas, "fault_of", lambda text, schema: "it is said not to fit")
    monkeypatch.setattr(sys, "argv", ["schemas", "--count", "1", "--json", str(file)])
    schemas.main()
    measured = json.loads(file.read_text())["measured"]
    assert measured["invalid"] == measured["ended"] >= 1
