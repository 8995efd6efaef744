"""The programs in examples/ run as they stand, and print what they promise; so does a page that says it does."""

import json
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("batch_generation", [], "acceptance length"),
        ("reproduce_a_seed", [], "the same text in"),
        ("stream_and_serve", [], "4 requests"),
        ("train_by_grpo", ["--steps", "3", "--train-head", "2"], "the reward rose from"),
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
    with_ray = {"ray_data", "ray_serve", "train_by_grpo_on_ray"}  # tests/examples/test_ray_examples.py
    assert {name for name, *_ in parameters} | with_ray == {file.stem for file in EXAMPLES.glob("*.py")}


def test_the_examples_of_the_page_on_serving_run_one_after_the_other(capsys):
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/serving.md").read_text(), re.DOTALL)
    printed = []
    for block in blocks:
        exec(block, names)
        printed.append(capsys.readouterr().out)
    assert len(blocks) == 7
    assert "length" in printed[1]
    assert re.search(r"^\d+ abort ", printed[2], re.MULTILINE)
    assert all(names["answers"])
    uncached, cached = map(int, printed[4].split())
    assert uncached < cached
    assert names["metrics"].num_finished == 10
    assert names["metrics"].pages_used == 0


def test_the_examples_of_the_page_on_rollouts_run_one_after_the_other(capsys):
    page = (ROOT / "docs/guides/rollouts.md").read_text()
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names := {})
    printed = capsys.readouterr().out.splitlines()
    assert len(json.loads(printed.pop(0))) == 4
    assert "((1, 0),)" in printed.pop(0)
    losses = [float(printed.pop(0)) for _ in range(3)]
    assert all(0 < loss < 10 for loss in losses)
    assert printed[:3] == ["True", "length", "the model is asleep: call wake_up()"]
    assert printed[-1] == "length"
    assert names["llm"].is_sleeping is False


def test_the_examples_folder_of_clients_may_be_relative(tmp_path):
    """A stand-in for a client shows where it was looked for, and from where."""
    program = tmp_path / "clients" / "node_modules" / ".bin" / "qwen"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nsed -i 's/41/42/' a.py\necho 42\n")
    program.chmod(0o755)
    command = [sys.executable, str(EXAMPLES / "agents" / "run.py"), "--clients", "clients"]
    command += ["--address", "http://127.0.0.1:9", "qwen-code"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "qwen-code: '42'" in ended.stdout) == (0, True), ended.stderr
