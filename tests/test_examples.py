"""The programs in examples/ run as they stand, and print what they promise."""

import pathlib
import runpy
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("batch_generation", [], "acceptance length"),
        ("reproduce_a_seed", [], "the same text in"),
        ("train_and_export_a_head", ["--steps", "2"], "mlp: "),
        ("verify_a_conversion", [], "config.json: damaged"),
    ],
)
def test_an_example_runs(monkeypatch, capsys, name, arguments, expected):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert expected in capsys.readouterr().out


def test_every_example_is_run():
    parameters = next(mark for mark in test_an_example_runs.pytestmark if mark.name == "parametrize").args[1]
    assert {name for name, *_ in parameters} == {file.stem for file in EXAMPLES.glob("*.py")}
