"""The examples with Ray: a killed job answers every prompt once, a served model streams the same texts, and training is the
same whatever is killed.

They run as processes of their own, because Ray warns of its own deprecations and keeps processes in the background.
"""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import warnings

import httpx
import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
from tiny import smallest

import jspec
from jspec.checkpoints.converted.orbax import quiet

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
START = 300  # seconds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: jspec[ray]")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(smallest(tmp_path_factory.mktemp("checkpoint") / "target"))


def write_prompts(folder: pathlib.Path, count: int) -> pathlib.Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {i} is"}) + "\n" for i in range(count)))
    return file


def environment(home: pathlib.Path) -> dict[str, str]:
    """Ray keeps its files below ``home``, and so does nothing that a later run could find."""
    found = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "JAX_PLATFORMS": "cpu", "HOME": str(home)}
    if jax.config.jax_compilation_cache_dir is not None:
        found["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    return {**found, "RAY_USAGE_STATS_ENABLED": "0"}


@contextlib.contextmanager
def running(home: pathlib.Path, name: str, *arguments):
    """The process of an example. What it prints goes to the file ``log`` in ``home``."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    with (
        (home / "log").open("w") as log,
        subprocess.Popen(command, cwd=home, env=environment(home), stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def until(condition, process: subprocess.Popen, home: pathlib.Path):
    deadline = time.monotonic() + START
    while not condition():
        assert process.poll() is None, (home / "log").read_text()[-3000:]
        assert time.monotonic() < deadline, (home / "log").read_text()[-3000:]
        time.sleep(0.005)


@pytest.mark.long
def test_killed_job_resumes(tmp_path, target):
    prompts, answers = write_prompts(tmp_path, 80), tmp_path / "answers.jsonl"
    options = [prompts, answers, "--target", target, "--draft", "ngram", "--batch", 2, "--max-tokens", 6, "--seed", 100]

    def lines() -> list[str]:
        return answers.read_text().split("\n")[:-1] if answers.exists() else []

    with running(tmp_path, "ray_data", *options) as process:
        until(lambda: len(lines()) >= 3, process, tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = lines()
    assert 3 <= len(before) < 80
    with answers.open("a") as file:
        file.write('{"index": 79, "se')  # as a killed process may leave it
    with running(tmp_path, "ray_data", *options) as process:
        assert process.wait(START) == 0, (tmp_path / "log").read_text()[-3000:]
    assert f"{len(before)} of 80 prompts have answers already" in (tmp_path / "log").read_text()
    assert lines()[: len(before)] == before
    found = {one["index"]: one for one in map(json.loads, lines())}
    assert len(lines()) == len(found) == 80
    llm = jspec.load(target, "ngram", max_batch=2, max_len=256)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    params = [jspec.SamplingParams(seed=100 + i, temperature=0.8, max_tokens=6) for i in range(80)]
    for i, result in enumerate(jspec.generate(llm, texts, params)):
        assert (found[i]["prompt"], found[i]["text"], found[i]["seed"]) == (texts[i], result.text, 100 + i)


def test_run_finds_the_results_of_the_one_before(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        names = runpy.run_path(str(EXAMPLES / "ray_data.py"))
    prompts = names["asked"](write_prompts(tmp_path, 3), 7)
    assert prompts[2] == {"index": 2, "seed": 9, "prompt": "prompt 2 is"}
    answers = tmp_path / "answers.jsonl"
    assert names["answered"](answers, prompts) == set()
    line = json.dumps({**prompts[1], "text": "é"}, ensure_ascii=False) + "\n"
    for rest in ("", '{"index": 2', "{"):
        answers.write_text(line + rest, "utf-8")
        assert names["answered"](answers, prompts) == {1}
        assert answers.read_text("utf-8") == line
    answers.write_text('{"index": 0')
    assert names["answered"](answers, prompts) == set()
    assert answers.read_text() == ""
    answers.write_text(line, "utf-8")
    for other in (names["asked"](tmp_path / "prompts.jsonl", 8), prompts[:1]):
        with pytest.raises(ValueError, match="is of another prompt or seed; expected a new file"):
            names["answered"](answers, other)


@pytest.mark.long
@pytest.mark.parametrize("shards", [1, 2])
def test_model_is_served(tmp_path, target, monkeypatch, shards):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(shards))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--target", target, "--draft", "ngram", "--engines", 1, "--port", port, "--tensor-parallel", shards]
    with running(tmp_path, "ray_serve", *options) as process, httpx.Client(timeout=60) as client:
        url = f"http://127.0.0.1:{port}/"

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return client.post(url, content=b"{}").status_code == 400
            return False

        until(answers, process, tmp_path)
        body = {"prompt": "prompt 0 is", "seed": 5, "temperature": 0.8, "max_tokens": 40}
        with client.stream("POST", url, json=body) as response:
            chunks = list(response.iter_text())
        llm = jspec.load(target, "ngram", max_batch=8, max_len=256, tensor_parallel=shards)
        assert "".join(chunks) == jspec.generate(llm, body.pop("prompt"), **body).text
        assert len(chunks) > 1
        wrong = client.post(url, json={"prompt": "a", "temperature": -1})
        assert (wrong.status_code, wrong.text.startswith("temperature=-1")) == (400, True)
        process.send_signal(signal.SIGINT)
        process.wait(60)


STEPS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[dict[int, str], list[np.ndarray]]:
    """The rewards and the last weights of a run by one engine."""
    home = tmp_path_factory.mktemp("undisturbed")
    with running(home, "train_by_grpo_on_ray", *training(home, 1)) as process:
        assert process.wait(START) == 0, (home / "log").read_text()[-3000:]
    assert "the reward rose from" in (home / "log").read_text()
    return rewards_of(home), trained(home)


@pytest.mark.long
def test_training_by_ray_is_that_of_one_process(tmp_path, undisturbed):
    with running(tmp_path, "train_by_grpo", "--steps", STEPS) as process:
        assert process.wait(START) == 0, (tmp_path / "log").read_text()[-3000:]
    assert rewards_of(tmp_path) == undisturbed[0]  # means of 32 integers: two digits are all of it


@pytest.mark.long
def test_training_is_the_same_whatever_is_killed(tmp_path, undisturbed):
    """An engine that samples, the trainer behind its checkpoint, and then the program."""
    with running(tmp_path, "train_by_grpo_on_ray", *training(tmp_path, 2)) as process:
        until(lambda: 0 in rewards_of(tmp_path), process, tmp_path)
        until(lambda: kill_one_that(process, "ray::Engine.sample"), process, tmp_path)
        until(lambda: 2 in rewards_of(tmp_path), process, tmp_path)
        assert kill_one_that(process, "ray::Trainer")
        until(lambda: "the trainer was lost" in (tmp_path / "log").read_text(), process, tmp_path)
        until(lambda: 3 in rewards_of(tmp_path), process, tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert re.search(r"the trainer was lost in step \d, and goes on with step 2$", (tmp_path / "log").read_text(), re.M)
    before = rewards_of(tmp_path)
    with running(tmp_path, "train_by_grpo_on_ray", *training(tmp_path, 2)) as process:
        assert process.wait(START) == 0, (tmp_path / "log").read_text()[-3000:]
    after = rewards_of(tmp_path)
    assert min(after) == 4
    assert before | after == undisturbed[0]
    for found, expected in zip(trained(tmp_path), undisturbed[1], strict=True):
        np.testing.assert_array_equal(found, expected, strict=True)


def training(home: pathlib.Path, engines: int) -> list:
    return [home / "checkpoints", "--steps", STEPS, "--every", 2, "--engines", engines]


def rewards_of(home: pathlib.Path) -> dict[int, str]:
    """Step -> reward, in what an example has printed. A step that is made twice has the same reward."""
    printed = re.findall(r"^step +(\d+)  reward +([\d.]+) ", (home / "log").read_text(), re.M)
    assert len({number for number, _ in printed}) == len(set(printed))
    return {int(number): reward for number, reward in printed}


def trained(home: pathlib.Path) -> list[np.ndarray]:
    """What the last checkpoint holds: the weights, and the state of the optimizer."""
    with quiet():
        return ocp.StandardCheckpointer().restore(home / "checkpoints" / str(STEPS) / "state")


def kill_one_that(driver: subprocess.Popen, does: str) -> bool:
    """Kill an actor whose title begins so, if there is one. It stands still when its title is read, and is in that call."""
    for actor in psutil.Process(driver.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(actor.cmdline()[:1]).startswith(does):
                actor.suspend()
                if "".join(actor.cmdline()[:1]).startswith(does):
                    actor.kill()
                    return True
                actor.resume()
    return False
