"""Two processes with a device each generate what one process with two devices does; a process that is lost is an error."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from children import environment
from tiny import tiny_checkpoint, tiny_tokenizer
from tiny_heads import eagle3, p_eagle

import jspec
from jspec.engine.multihost.leader import fewest, require_leading
from jspec.models.sharding import mesh_of

SCRIPT = Path(__file__).parents[1] / "helpers" / "one_process.py"
LOADING = {"tensor_parallel": 2, "max_batch": 3, "max_len": 96, "page_size": 8, "dtype": "float32"}
PROMPTS = ["def add(a, b):\n", "import os\n\nfor name in", "class A:", "x = ["]
OPTIONS = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0.8, "seed": 7, "top_p": 0.95, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 16, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0, "max_tokens": 16, "structured_outputs": {"regex": "[a-z ]{5,20};"}},
]
PATIENCE = 300  # seconds


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A target and drafters of it that compile in seconds."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokens = {"vocab_size": 258, "bos_token_id": 0, "eos_token_id": 1}
    tiny_tokenizer(tiny_checkpoint(folder / "target", num_hidden_layers=4, **tokens))
    tiny_tokenizer(tiny_checkpoint(folder / "draft", num_hidden_layers=1, **tokens))
    eagle3(folder / "eagle3", **tokens)
    p_eagle(folder / "parallel", **tokens)
    return folder


def loading(checkpoints: Path, draft: str, **more) -> dict:
    folders = {"target": str(checkpoints / "target"), "draft": str(checkpoints / draft)}
    return {**folders, "num_draft_tokens": 3, **LOADING, **more}


@contextlib.contextmanager
def processes(count: int, what: dict):
    """So many processes of a group, which are ended with the block."""
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), address, str(count), str(place), json.dumps(what)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen) -> tuple[int, str]:
    """The exit code of a process, and the last line that it printed."""
    out, errors = process.communicate(timeout=PATIENCE)
    lines = [line for line in out.splitlines() if line and not line.startswith("[Gloo]")]
    assert lines, errors[-4000:]
    return process.returncode, lines[-1]


def outcome(llm: jspec.LLM, options: dict) -> list:
    results: Any = jspec.generate(llm, PROMPTS, **options)
    return [[one.token_ids, one.stats.num_accepted_draft_tokens] for one in results]


@pytest.mark.parametrize(
    ("draft", "more", "options"),
    [
        ("eagle3", {"num_pages": 16}, OPTIONS[:2]),
        pytest.param("eagle3", {"num_pages": 16}, OPTIONS, marks=pytest.mark.nightly),
        pytest.param("eagle3", {"num_pages": 16, "warmup": True}, OPTIONS, marks=pytest.mark.long),
        pytest.param("draft", {"draft_tensor_parallel": 2, "num_pages": 16}, OPTIONS, marks=pytest.mark.long),
        pytest.param("parallel", {"reproducible": False}, OPTIONS, marks=pytest.mark.long),
    ],
)
def test_two_processes_generate_what_one_does(checkpoints, draft, more, options):
    """Requests are preempted, come back from host memory, are sampled, penalised and held to a grammar."""
    more = dict(more)
    what = {
        "warmup": more.pop("warmup", False),
        "prompts": PROMPTS,
        "options": options,
        "load": loading(checkpoints, draft, **more),
    }
    with processes(2, what) as (leader, follower):
        code, line = said(leader)
        assert code == 0
        found = json.loads(line)
        code, line = said(follower)
        assert (code, "process 1 of 2 follows process 0" in line) == (0, True)
    llm = jspec.load(**what["load"])
    assert found["outcomes"] == [outcome(llm, each) for each in options]
    assert found["preemptions"] == llm.engine.metrics().num_preemptions
    assert found["preemptions"] > 0 or "num_pages" not in more


def test_calls_end_soon_when_a_process_is_killed_and_name_it(checkpoints):
    what = {"dies_after": 6, "prompts": PROMPTS, "options": OPTIONS[:1], "load": loading(checkpoints, "eagle3")}
    with processes(2, what) as (leader, follower):
        follower.communicate(timeout=PATIENCE)
        killed = time.monotonic()
        code, line = said(leader)
        assert time.monotonic() - killed < 10
        assert (follower.returncode, code) == (-signal.SIGKILL, 1)
        assert "process 1 of 2, at 127.0.0.1, was lost" in json.loads(line)["error"]


def test_follower_ends_when_its_leader_is_lost(checkpoints):
    what = {"prompts": PROMPTS, "options": [{"max_tokens": 80}] * 1000, "load": loading(checkpoints, "eagle3")}
    with processes(2, what) as (leader, follower):
        assert follower.stdout is not None
        while "follows process 0" not in (line := follower.stdout.readline()):
            assert line, follower.communicate()
        leader.kill()
        follower.communicate(timeout=PATIENCE)  # JAX's own watch over the group may be the first to see it
        assert follower.returncode != 0


def test_one_process_is_a_group_of_its_own(monkeypatch):
    assert fewest(5) == 5
    require_leading(None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="tensor_parallel=2: expected 8, the number of devices of all 2 processes"):
        mesh_of(2, "tp")
