"""The process that reads pickles: what it can see and do, and that its answer is not believed."""

import json
import os
from pathlib import Path

import pytest
from archives import assert_refused, read, saved, state_dict, tensor

from convert import Refusal
from jspec.checkpoints.files import pickles
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.pickles import read_pickle_header


def python(monkeypatch, code: str):
    """Let the reading process run ``code`` instead."""
    monkeypatch.setattr(pickles, "_COMMAND", (*pickles._COMMAND[:4], code, pickles._COMMAND[5]))


def test_the_process_sees_nothing_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN", "a secret")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    saved(tmp_path, b"")
    python(
        monkeypatch,
        "import sys, os, importlib.util, json; sys.path.append(sys.argv[1]); import unpickle.worker\n"
        "names = 'torch', 'numpy', 'jax', 'convert', 'tiny'\n"
        "seen = [n for n in names if n in sys.modules or importlib.util.find_spec(n)]\n"
        "print(json.dumps({'refusal': f'sees {seen} {os.environ.get(\"TOKEN\")} from {os.getcwd()}'}))",
    )
    assert_refused(tmp_path, "x.bin: sees [] None from /")


@pytest.mark.parametrize(
    "deed", ["open('/dev/null')", "__import__('socket').socket()", "os.dup(0)", "os.pipe()", "bytes(5 * 2**30)"]
)
def test_the_process_can_do_nothing_else(tmp_path, monkeypatch, deed):
    saved(tmp_path, b"")
    python(
        monkeypatch,
        "import sys, os, json, socket; sys.path.append(sys.argv[1]); from unpickle.worker import limit; limit()\n"
        f"try: {deed}\n"
        "except (OSError, MemoryError): print(json.dumps({'refusal': 'could not'}))",
    )
    assert_refused(tmp_path, "could not")


HONEST = {"dtype": "float32", "start": 0, "shape": [2], "strides": [1]}


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"tensors": []},
        {"tensors": {"w": None}},
        {"tensors": {"w": {**HONEST, "more": 0}}},
        {"tensors": {"w": {**HONEST, "dtype": "float64"}}},
        {"tensors": {"w": {**HONEST, "dtype": None}}},
        {"tensors": {"w": {**HONEST, "start": -1}}},
        {"tensors": {"w": {**HONEST, "start": 10**6}}},
        {"tensors": {"w": {**HONEST, "start": True}}},
        {"tensors": {"w": {**HONEST, "shape": [10**6]}}},
        {"tensors": {"w": {**HONEST, "shape": [10**6], "strides": [0]}}},
        {"tensors": {"w": {**HONEST, "shape": [-2]}}},
        {"tensors": {"w": {**HONEST, "shape": [2.0]}}},
        {"tensors": {"w": {**HONEST, "strides": [10**6]}}},
        {"tensors": {"w": {**HONEST, "shape": [100], "strides": [100]}}},
        {"tensors": {"w": {**HONEST, "shape": [1], "strides": [2**62]}}},
        {"tensors": {"w": {**HONEST, "strides": [1, 1]}}},
        {"tensors": {"w\n": HONEST}},
    ],
    ids=str,
)
def test_the_answer_is_checked(tmp_path, monkeypatch, answer):
    saved(tmp_path, b"")
    python(monkeypatch, f"print({json.dumps({'tensors': {'w': HONEST}})!r})")
    assert read(tmp_path)["w"].shape == (2,)
    python(monkeypatch, f"print({json.dumps(answer)!r})")
    assert_refused(tmp_path, "x.bin")


def test_process_that_ends_or_hangs(tmp_path, monkeypatch):
    saved(tmp_path, b"")
    python(monkeypatch, "raise SystemExit(3)")
    assert_refused(tmp_path, "ended with code 3")
    python(monkeypatch, "print('no JSON')")
    assert_refused(tmp_path, "no sound answer")
    monkeypatch.setattr(pickles, "MAX_SECONDS", 0.1)
    python(monkeypatch, "import time; time.sleep(60)")
    assert_refused(tmp_path, "more than 0.1 s")


def test_file_that_shrinks_after_its_header_was_read(tmp_path):
    path = saved(tmp_path, state_dict(tensor()))
    [held] = read_pickle_header(Folder(tmp_path), "x.bin").values()
    os.truncate(path, 40)
    with pytest.raises(Refusal, match=r"x\.bin: truncated or damaged"):
        held.read()
