"""A server whose target is run by two processes: what its clients get, also when one of the processes is lost.

Each of the tests takes a start of the group or two, on the CPU, so most of them are for ``make long``.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from children import environment
from tiny import smallest

import jspec

ROOT = Path(__file__).parents[2]
START = 300  # seconds
LOST_AFTER = 6  # seconds
PROMPT, LONG = "abc", {"max_tokens": 240, "seed": 7, "extra_body": {"ignore_eos": True}}
LOADING = {"max_batch": 2, "max_len": 256, "dtype": "float32", "tensor_parallel": 2}
OPTIONS = ("--max-num-seqs", 2, "--max-model-len", 256, "--dtype", "float32", "--reproducible", "-tp", 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(smallest(tmp_path_factory.mktemp("checkpoint") / "target"))


class Group:
    """Two supervisors, the first of which answers.

    Args:
      folder: for their logs.
      target: the checkpoint.
      options: further ones of ``jspec serve``.
      slurm: whether JAX is to find out from the environment who belongs together.
    """

    def __init__(self, folder: Path, target: str, *options, slurm: bool = False):
        with socket.create_server(("localhost", 0)) as free, socket.create_server(("127.0.0.1", 0)) as public:
            self._port, self.port = free.getsockname()[1], public.getsockname()[1]
        self.url, self.folder = f"http://127.0.0.1:{self.port}", folder
        self._slurm = slurm
        self._command = [sys.executable, "-m", "jspec.cli", "serve", target, "--port", str(self.port)]
        self._command += ["--lost-after", str(LOST_AFTER), *map(str, (*OPTIONS, *options))]
        self.supervisors = [self.start(rank) for rank in range(2)]
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=START)

    def start(self, rank: int) -> subprocess.Popen:
        """Start a supervisor."""
        variables = environment()
        if self._slurm:
            options = ["--distributed"]
            variables |= {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
            variables |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            variables["JAX_COORDINATOR_PORT"] = str(self._port)
        else:
            options = ["--nnodes", "2", "--node-rank", str(rank)]
            options += ["--master-addr", "localhost", "--master-port", str(self._port)]
        with (self.folder / f"log{rank}").open("a") as log:
            command = [*self._command, *options]
            return subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=self.folder)

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"log{rank}").read_text()

    def worker(self, rank: int) -> psutil.Process:
        """The worker of a supervisor."""
        (found,) = psutil.Process(self.supervisors[rank].pid).children()
        return found

    def starts(self) -> int:
        """How often the group has been ready."""
        return self.log().count(f"at {self.url}")

    def wait_for_start(self, number: int):
        deadline = time.monotonic() + START
        while self.starts() < number:
            assert time.monotonic() < deadline, self.log() + self.log(1)
            assert all(supervisor.poll() is None for supervisor in self.supervisors), self.log() + self.log(1)
            time.sleep(0.05)

    def text(self, **options) -> str:
        stream = self.client.completions.create(model=self.client.models.list().data[0].id, prompt=PROMPT, **options)
        return stream.choices[0].text if not options.get("stream") else "".join(c.choices[0].text for c in stream)

    def end(self):
        """End whatever is left."""
        self.client.close()
        for supervisor in self.supervisors:
            if supervisor.poll() is None:
                for child in psutil.Process(supervisor.pid).children():
                    child.kill()
                supervisor.kill()
            supervisor.wait()


@contextlib.contextmanager
def running(folder: Path, target: str, *options) -> Iterator[Group]:
    group = Group(folder, target, *options)
    try:
        group.wait_for_start(1)
        yield group
    finally:
        group.end()


def asked(group: Group, found: list, stream: bool):
    """Append to ``found`` when an answer has begun, and what it ended with."""
    try:
        answer = group.client.completions.create(model="model", prompt=PROMPT, stream=stream, **LONG)
        for _ in answer if stream else ():
            found.append("begun")
        found.append("an answer")
    except openai.APIError as error:
        found.append(error)


def lose(group: Group, process: psutil.Process, number: int, seconds: float):
    """Have a process lost while requests are under way, and see that they fail in time and that the group comes back."""
    starts, streamed, answered = group.starts(), [], []
    threads = [threading.Thread(target=asked, args=(group, found, found is streamed)) for found in (streamed, answered)]
    for thread in threads:
        thread.start()
    while "begun" not in streamed:
        time.sleep(0.001)
    began = time.monotonic()
    process.send_signal(number)
    for thread in threads:
        thread.join(START)
    assert time.monotonic() - began < seconds
    for error in (streamed[-1], answered[-1]):
        assert isinstance(error, openai.APIError)
        assert "was lost" in str(error) or "failed in the engine" in str(error)
    health = httpx.get(f"{group.url}/health")
    if group.starts() == starts:
        assert (health.status_code, "try again" in health.text, "retry-after" in health.headers) == (503, True, True)
        with pytest.raises(openai.InternalServerError, match="was lost, and is being restarted"):
            group.client.models.list()
    group.wait_for_start(starts + 1)
    assert httpx.get(f"{group.url}/health").status_code == 200


def expected(target: str, **options) -> str:
    return jspec.generate(jspec.load(target, **LOADING), PROMPT, **options).text


def aborted(group: Group) -> float:
    lines = httpx.get(f"{group.url}/metrics").text.splitlines()
    name = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def test_two_processes_serve_one_model(tmp_path, target):
    """It answers as one process does, notices clients that leave, comes back when a process is lost, and ends in order."""
    options = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
    with running(tmp_path, target, "--served-model-name", "model") as group:
        text = expected(target, **options)
        assert [group.text(**options), group.text(**options, stream=True)] == [text, text]
        assert httpx.get(group.url).headers["content-type"].startswith("text/html")
        stream = group.client.completions.create(model="model", prompt=PROMPT, stream=True, **LONG)
        next(iter(stream))
        stream.close()
        deadline = time.monotonic() + 30
        while not aborted(group):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lose(group, group.worker(1), signal.SIGKILL, LOST_AFTER)
        assert group.text(**options, stream=True) == text
        workers = [group.worker(rank) for rank in range(2)]
        stream = group.client.completions.create(model="model", prompt=PROMPT, stream=True, **LONG)
        next(iter(stream))
        for supervisor in reversed(group.supervisors):
            supervisor.terminate()
        for _ in stream:  # to its end
            pass
        assert [supervisor.wait(60) for supervisor in group.supervisors] == [0, 0], group.log() + group.log(1)
        assert not any(worker.is_running() for worker in workers)


@pytest.mark.long
def test_recovers_from_loss_of_any_process(tmp_path, target):
    options = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
    with running(tmp_path, target, "--served-model-name", "model") as group:
        text = group.text(**options)
        for rank, number in ((0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)):
            lose(group, group.worker(rank), number, LOST_AFTER + 2)
            assert group.text(**options, stream=True) == text


@pytest.mark.long
def test_recovers_from_loss_of_a_host(tmp_path, target):
    """Nobody there says anything any more, its supervisor neither: JAX misses its heartbeat."""
    with running(tmp_path, target, "--served-model-name", "model") as group:
        text = group.text(max_tokens=12, seed=5)
        worker, supervisor = group.worker(1), psutil.Process(group.supervisors[1].pid)
        supervisor.suspend()
        threading.Timer(LOST_AFTER + 8, supervisor.resume).start()  # the host is back
        lose(group, worker, signal.SIGSTOP, LOST_AFTER + 2)
        assert group.text(max_tokens=12, seed=5, stream=True) == text


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_supervisor_leaves_no_process(tmp_path, target, rank):
    """WorkerHandle again, it brings the group back."""
    with running(tmp_path, target, "--served-model-name", "model") as group:
        worker, starts = group.worker(rank), group.starts()
        group.supervisors[rank].kill()
        group.supervisors[rank].wait()
        worker.wait(10)
        group.supervisors[rank] = group.start(rank)
        group.wait_for_start(starts + 1)
        assert group.text(max_tokens=12, seed=5, stream=True) == group.text(max_tokens=12, seed=5)


@pytest.mark.long
def test_slurm_starts_the_group(tmp_path, target):
    """Only the workers know which of them is the first. A port that is taken is told before anything is loaded."""
    group = Group(tmp_path, target, "--served-model-name", "model", slurm=True)
    try:
        group.wait_for_start(1)
        lose(group, group.worker(1), signal.SIGKILL, LOST_AFTER)
        assert group.text(max_tokens=12, seed=5, stream=True) == group.text(max_tokens=12, seed=5)
    finally:
        group.end()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = tmp_path / "other"
        other.mkdir()
        group = Group(other, target, "--port", taken.getsockname()[1], slurm=True)
        assert ended(group)[0] == 2
        assert f"jspec serve: port={taken.getsockname()[1]}: expected a free port" in group.log()


def ended(group: Group) -> list[int]:
    try:
        return [supervisor.wait(START) for supervisor in group.supervisors]
    finally:
        group.end()


def test_refused_first_start_ends_the_group(tmp_path):
    """The message and the exit code are those of a server of one process, which starts once."""
    for target, options, message in (
        ("nowhere", (), "jspec serve: 'nowhere' is no folder, and the local hub cache has no such model"),
        (str(tmp_path), ("--chat-template", "absent"), "jspec serve: chat_template='absent' cannot be read"),
    ):
        folder = tmp_path / str(len(options))
        folder.mkdir()
        group = Group(folder, target, *options)
        assert ended(group) == [2, 2]
        assert group.log().startswith(message)
        assert group.log().count("jspec serve: ") == 1
        assert "restarted" not in group.log() + group.log(1)


@pytest.mark.long
def test_first_start_that_fails_in_loading_ends_the_group(tmp_path, target):
    group = Group(tmp_path, target, "-tp", 3)
    codes = ended(group)
    assert codes[0] == 2
    assert codes[1] != 0  # JAX may end it before it has come to its own refusal
    assert "jspec serve: tensor_parallel=3: expected at most 2" in group.log()
    assert "restarted" not in group.log() + group.log(1)


@pytest.mark.long
def test_signals_before_the_group_is_ready_end_it(tmp_path, target):
    group = Group(tmp_path, target)
    while "Gloo" not in group.log():
        time.sleep(0.05)
    workers = [group.worker(rank) for rank in range(2)]
    group.supervisors[0].send_signal(signal.SIGINT)
    codes = ended(group)
    assert codes[0] == 130
    assert codes[1] not in (0, 2)
    assert not any(worker.is_running() for worker in workers)
    assert group.log().endswith("jspec serve: interrupted\n")
