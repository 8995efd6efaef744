"""``jspec serve --distributed ray``: which hosts it takes, and on two simulated nodes what clients get when one is lost."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import jax
import psutil
import pytest
from tiny import smallest

import jspec
from jspec import cli
from jspec.serving.supervisor.ray_group import Hosts, hosts_of

ROOT = Path(__file__).parents[2]
START = 300  # seconds
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: jspec[ray]")


@pytest.mark.parametrize(
    ("nnodes", "tensor_parallel", "gpus", "hosts"),
    [
        (None, 8, [8, 8], Hosts(1, 8)),
        (None, 16, [0, 8, 8], Hosts(2, 8)),
        (None, 12, [8, 8], Hosts(2, 6)),
        (4, 8, [4, 4, 2, 2, 0], Hosts(4, 2)),
        (2, 2, [0, 0], Hosts(2, 0)),
    ],
)
def test_hosts_follow_from_gpus(nnodes, tensor_parallel, gpus, hosts):
    assert hosts_of(nnodes, tensor_parallel, gpus) == hosts


@pytest.mark.parametrize(
    ("nnodes", "tensor_parallel", "gpus", "error"),
    [
        (None, 2, [0, 0], "nnodes=None: expected a number of hosts, since no node of the Ray cluster has GPUs"),
        (3, 8, [8, 8, 8], "nnodes=3: expected a divisor of tensor_parallel_size=8"),
        (None, 16, [8, 4], "nnodes=2: expected at most 1, the nodes of the Ray cluster that have 8 GPUs each"),
        (2, 2, [0], "nnodes=2: expected at most 1, the nodes"),
    ],
)
def test_too_many_hosts_are_refused(nnodes, tensor_parallel, gpus, error):
    with pytest.raises(ValueError, match=error):
        hosts_of(nnodes, tensor_parallel, gpus)


def test_missing_ray_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["serve", str(tmp_path), "--distributed", "ray", "--nnodes", "2"]) == 2
    assert "distributed='ray': expected what pip install 'jspec[ray]' installs" in capsys.readouterr().err


@contextlib.contextmanager
def process(home: Path, name: str, *command, **environment: str) -> Iterator[subprocess.Popen]:
    """A process whose standard error goes to the file ``name``."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "HOME": str(home)}
    found |= {"RAY_USAGE_STATS_ENABLED": "0", **environment}
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": home, "env": found}
    with (
        (home / name).open("w") as log,
        subprocess.Popen([sys.executable, *map(str, command)], stderr=log, **streams) as started,
    ):
        try:
            yield started
        finally:
            if name == "serve":
                started.kill()
            else:
                started.communicate(timeout=60)


def until(condition, home: Path):
    deadline = time.monotonic() + START
    while not condition():
        assert time.monotonic() < deadline, (home / "serve").read_text()[-5000:]
        time.sleep(0.05)


def actors() -> list[psutil.Process]:
    named = psutil.process_iter(["cmdline"])
    return [one for one in named if one.info["cmdline"] and one.info["cmdline"][0].startswith("ray::Host")]


@needs_ray
@pytest.mark.long
def test_ray_starts_the_group(tmp_path):
    """The driver answers, fails requests when an actor or a worker dies, starts all of them again, and ends in order."""
    target = smallest(tmp_path / "target")
    serve = ["-m", "jspec.cli", "serve", target, "-tp", 2, "--distributed", "ray", "--nnodes", 2, "--port", 0]
    serve += ["--max-num-seqs", 2, "--max-model-len", 256, "--dtype", "float32", "--reproducible", "--lost-after", 6]
    speed = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if jax.config.jax_compilation_cache_dir is not None:
        speed["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
        speed["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    with process(tmp_path, "cluster", Path(__file__).parents[1] / "helpers" / "ray_cluster.py") as cluster:
        address = cluster.stdout.readline().strip()
        with process(tmp_path, "serve", *serve, RAY_ADDRESS=address, JSPEC_API_KEY="a-key", **speed) as driver:
            ask_through_losses(tmp_path, str(target), driver)
    assert not actors()


def ask_through_losses(home: Path, target: str, driver: subprocess.Popen):
    def addresses() -> list[str]:
        return [line.split(" at ")[1] for line in (home / "serve").read_text().splitlines() if " at http://" in line]

    until(lambda: addresses() or driver.poll() is not None, home)
    assert addresses(), (home / "serve").read_text()
    params = {"max_tokens": 240, "seed": 7, "ignore_eos": True}
    expected = jspec.generate(
        jspec.load(target, max_batch=2, max_len=256, dtype="float32", tensor_parallel=2), "abc", **params
    ).text
    body, headers = {"prompt": "abc", **params}, {"authorization": "Bearer a-key"}
    with httpx.Client(base_url=addresses()[0], headers=headers, timeout=START, trust_env=False) as client:
        for lost in ("actor", "worker"):
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
            starts, before = len(addresses()), actors()
            workers = [
                child for actor in before for child in actor.children() if "supervisor.worker" in str(child.cmdline())
            ]
            assert (len(before), len(workers)) == (2, 2)
            with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                lines = response.iter_lines()
                assert next(lines)
                (before if lost == "actor" else workers)[-1].kill()
                *_, error, done = [line for line in lines if line]
            assert "was lost" in error
            assert done == "data: [DONE]"
            assert client.get("/health").status_code == 503
            until(lambda starts=starts: len(addresses()) > starts, home)
            assert not any(one.is_running() for one in (*before, *workers))
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
        assert client.get("/v1/models", headers={"authorization": ""}).status_code == 401
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 0, (home / "serve").read_text()[-5000:]
