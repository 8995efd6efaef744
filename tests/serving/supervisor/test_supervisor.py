"""A supervisor and its worker, without a model: the worker is a script, or a list of reports."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from children import killed_at_the_end
from loops import in_a_loop
from starlette.responses import PlainTextResponse

from jspec.serving.supervisor import supervisor, worker_process
from jspec.serving.supervisor.messages import HEADER, Ended, Failed, Joined, Ready, Task, report_line, report_of
from jspec.serving.supervisor.supervisor import LOST, Supervisor
from jspec.serving.supervisor.worker_process import WorkerProcess
from jspec.serving.worker.link import ORPHANED
from jspec.serving.worker.private_server import RequireToken

ROOT = Path(__file__).parents[3]
TASK = Task({"target": "t"}, {"num_processes": 2}, "127.0.0.1", "a-token")
PATIENCE = 60  # seconds
LINK = "import sys, time\nfrom jspec.serving.worker.link import Link\nfrom jspec.serving.supervisor.messages import *\n"
LINK += "link = Link(int(sys.argv[1]))\n"


def running(script: str):
    """What stands for ``python_command``: a worker that is this script."""
    code = f"import json, sys\nsys.path[:] = json.loads(sys.argv[2])\n{script}"
    return lambda _, descriptor: [sys.executable, "-P", "-c", code, descriptor, json.dumps(sys.path)]


def run(work):
    return asyncio.run(asyncio.wait_for(work, PATIENCE))


@pytest.mark.parametrize("report", [Joined(1, 2), Ready(), Ready("http://127.0.0.1:1"), Failed("é\n")])
def test_messages_are_lines(report):
    assert report_of(report_line(report)) == report
    assert report_line(report).count(b"\n") == 1
    assert Task.of(TASK.line()) == TASK


async def reports_of(monkeypatch, script: str, lost_after: float = 30, do=lambda report, process: None) -> list:
    """What a worker reports that is this script; ``do`` is called at each report."""
    monkeypatch.setattr(worker_process, "python_command", running(LINK + script))
    process, reports = await WorkerProcess.start(TASK, lost_after, {"OF_MINE": "é"}), []
    while not reports or not isinstance(reports[-1], Ended):
        reports.append(await process.report())
        do(reports[-1], process)
    assert not psutil.pid_exists(process._process.pid)
    return reports


def test_worker_messages_arrive(monkeypatch):
    script = f"import os\nassert link.task == {TASK!r}\nassert os.environ['OF_MINE'] == 'é'\n"
    script += "link.send(Joined(0, 2)); link.send(Ready('http://here')); sys.exit(0)"
    reports = run(reports_of(monkeypatch, script))
    assert reports == [Joined(0, 2), Ready("http://here"), Ended(0, "it ended with exit code 0")]


def test_worker_reports_why_it_ends(monkeypatch):
    script = "from jspec.serving.worker.main import end_at_once\nend_at_once(link, 'out of luck', 7)"
    assert run(reports_of(monkeypatch, script)) == [Ended(7, "out of luck")]


def test_crashed_worker_is_reported(monkeypatch):
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGABRT)"
    assert run(reports_of(monkeypatch, script)) == [Ended(128 + signal.SIGABRT, "it was ended by SIGABRT")]


def test_worker_that_sends_invalid_messages_is_killed(monkeypatch):
    script = "link._socket.sendall(b'[1, 2]\\n')\ntime.sleep(60)"
    (ended,) = run(reports_of(monkeypatch, script))
    assert (ended.code, "its reports could not be read" in ended.why) == (128 + signal.SIGKILL, True)


def test_killed_worker_with_unread_messages_is_reported(monkeypatch):
    script = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"
    asked = []

    async def work():
        monkeypatch.setattr(worker_process, "python_command", running(LINK + script))
        process = await WorkerProcess.start(TASK, 1000)
        while psutil.Process(process._process.pid).status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0.05)
        process.end()
        os.kill(process._process.pid, signal.SIGKILL)
        asked.append(await process.report())

    run(work())
    assert asked == [Ended(128 + signal.SIGKILL, "it was ended by SIGKILL")]


@pytest.mark.parametrize("frozen", ["os.kill(os.getpid(), signal.SIGSTOP)", "serve()"])
def test_silent_worker_is_killed(monkeypatch, frozen):
    """Stopped as a whole, or its event loop, which is to answer."""
    script = """
import asyncio, os, signal
def serve():
    async def hang():
        with link.serving():
            time.sleep(60)
    asyncio.run(hang())
link.send(Ready())
"""
    began = time.monotonic()
    reports = run(reports_of(monkeypatch, script + frozen, 1.0))
    assert reports == [Ready(), Ended(128 + signal.SIGKILL, "it did not respond to its supervisor within 1 seconds")]
    assert time.monotonic() - began < 10


def test_busy_worker_is_not_killed(monkeypatch):
    script = """
import asyncio
async def serve():
    with link.serving() as stops:
        link.send(Ready())
        for _ in range(2):
            await stops.get()
asyncio.run(serve())
time.sleep(1.5)  # a worker without an event loop: its thread answers
"""

    def end(report, process):
        if isinstance(report, Ready):
            for seconds in (1.5, 1.6):
                asyncio.get_running_loop().call_later(seconds, process.end)

    assert run(reports_of(monkeypatch, script, 1.0, end))[-1] == Ended(0, "it ended with exit code 0")


def test_children_of_a_worker_end_with_it(monkeypatch):
    script = (
        "import subprocess\nother = subprocess.Popen(['sleep', '60'])\nlink.send(Joined(other.pid, 1)); sys.exit(0)"
    )
    joined, _ = run(reports_of(monkeypatch, script))
    deadline = time.monotonic() + 10
    while psutil.pid_exists(joined.rank) and psutil.Process(joined.rank).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


SUPERVISOR = f"""
import asyncio, json, sys, time
from jspec.serving.supervisor import worker_process
from jspec.serving.supervisor.messages import Task
code = "import json, sys; sys.path[:] = json.loads(sys.argv[2])\\n" + sys.argv[1]
worker_process.python_command = lambda _, descriptor: [sys.executable, "-P", "-c", code, descriptor, json.dumps(sys.path)]
async def keep():
    started = await worker_process.WorkerProcess.start({TASK!r}, 30)
    print(started._process.pid, (await started.report()).rank, flush=True)
    time.sleep(60)
asyncio.run(keep())
"""


def test_worker_ends_when_its_supervisor_is_killed():
    script = LINK + "link.send(Joined(7, 8))\ntime.sleep(60)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SUPERVISOR, script]
    with (
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process,
        killed_at_the_end(process),
    ):
        pid, rank = map(int, process.stdout.readline().split())
        assert rank == 7
        worker = psutil.Process(pid)
        process.kill()
    assert worker.wait(10) in (None, ORPHANED)  # None: it is nobody's child any more


@pytest.mark.parametrize(("shown", "status"), [(None, 403), ("wrong", 403), ("", 403), ("a-token", 200)])
def test_only_the_supervisor_reaches_a_workers_address(shown, status):
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(RequireToken(PlainTextResponse("hello"), "a-token"))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            return await client.get("/health", headers={} if shown is None else {HEADER: shown})

    response = run(ask())
    assert response.status_code == status
    assert ("only the supervisor of the server may use" in response.text) == (status == 403)


class Listed:
    """A worker that reports what is in a list."""

    def __init__(self, *reports, hangs: bool = False):
        self._reports, self._hangs = list(reports), hangs
        self.done: list[str] = []
        self._news = asyncio.Event()

    async def report(self):
        while self._hangs and len(self._reports) == 1:
            self._news.clear()
            await self._news.wait()
        return self._reports.pop(0)

    def end(self):
        self.done.append("end")
        self._go()

    def kill(self, why):
        self.done.append(f"kill: {why}")
        self._reports[-1] = Ended(137, why)
        self._go()

    def _go(self):
        self._hangs = False
        self._news.set()


class FakePublic:
    """Notes what a supervisor tells it."""

    def __init__(self):
        self.told, self.refuse = [], []

    async def open(self, address, token):
        assert len(token) == 64
        if self.refuse:
            raise OSError(self.refuse.pop())
        self.told.append(address)

    def shut(self, why):
        self.told.append(why)

    async def close(self):
        self.told.append("closed")


def supervise(workers: list, leads: bool | None, public: FakePublic, signals=(), to_end: float | None = None) -> int:
    """The exit code of a supervisor of these workers, one after the other; ``signals`` come after so many seconds each."""

    async def start(token: str):
        made = workers.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    async def work() -> int:
        process = Supervisor(start, lambda: public, leads, shutdown_timeout=5, lost_after=5)
        if to_end is not None:
            process._to_drain = process._to_end = to_end
        for seconds, number in signals:
            asyncio.get_running_loop().call_later(seconds, os.kill, os.getpid(), number)
        return await process.run()

    return run(work())


LEADS = (Joined(0, 2), Ready("http://a"))


def test_failed_first_start_is_not_repeated(capsys):
    public = FakePublic()
    assert supervise([Listed(Joined(0, 2), Ended(2, "max_len=1: expected more"))], True, public) == 2
    assert capsys.readouterr().err == "jspec serve: max_len=1: expected more\n"
    assert "closed" in public.told


def test_worker_is_restarted_until_it_exits_in_order(monkeypatch, caplog):
    delays = []
    monkeypatch.setattr(supervisor.random, "uniform", lambda low, high: delays.append(high) or 0.001)
    lost = [Listed(Ended(1, f"reason {i}")) for i in range(8)]
    workers = [Listed(*LEADS, Ended(4, "first")), *lost, OSError("no more processes"), Listed(*LEADS, Ended(0, "done"))]
    public = FakePublic()
    assert supervise(workers, True, public) == 0
    assert public.told[:2] == ["http://a", LOST]
    assert public.told.count("http://a") == 2
    assert "reason 7; it is restarted in 30.0 s" in caplog.text
    assert "no more processes" in caplog.text
    assert len(delays) == 10


def test_ready_worker_that_does_not_respond_is_restarted(monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_DELAY", 0.01)
    public, deaf = FakePublic(), Listed(*LEADS, Ended(0, ""), hangs=True)
    public.refuse = ["it did not answer"]
    assert supervise([Listed(*LEADS, Ended(4, "lost")), Listed(Ended(0, ""))], True, FakePublic()) == 0
    assert supervise([deaf], True, public) == 137  # as any first start that fails
    assert deaf.done == ["kill: it did not answer"]


def test_leader_address_is_known_once_the_worker_has_joined():
    public = FakePublic()
    assert supervise([Listed(*LEADS, Ended(0, ""))], None, public) == 0
    assert public.told[0] == "http://a"
    public = FakePublic()
    assert supervise([Listed(Joined(1, 2), Ready(), Ended(0, ""))], None, public) == 0
    assert public.told == []


@in_a_loop
async def test_taken_address_ends_the_worker():
    worker = Listed(Joined(0, 2), Ended(0, ""), hangs=True)

    def taken():
        raise ValueError("port=1: expected a free port")

    async def start(token):
        return worker

    with pytest.raises(ValueError, match="port=1"):
        await Supervisor(start, taken, None, shutdown_timeout=1, lost_after=5).run()
    assert worker.done == ["kill: port=1: expected a free port"]


@pytest.mark.parametrize(
    ("reports", "leads", "signals", "code", "done"),
    [
        (LEADS, True, 1, 0, ["end"]),
        ((Joined(1, 2), Ready()), False, 2, 0, ["kill: interrupted"]),
        ((Joined(0, 2),), True, 1, 143, ["kill: interrupted"]),
    ],
    ids=["leads", "follows", "starts"],
)
def test_signals_reach_the_worker(reports, leads, signals, code, done):
    worker = Listed(*reports, Ended(0, ""), hangs=True)
    times = [(0.3 + 0.3 * i, signal.SIGTERM) for i in range(signals)]
    assert supervise([worker], leads, FakePublic(), times) == code
    assert worker.done == done


def test_worker_that_does_not_end_in_time_is_killed(monkeypatch):
    worker = Listed(*LEADS, Ended(0, ""), hangs=True)
    monkeypatch.setattr(worker, "end", lambda: worker.done.append("end"))
    signals = [(0.3, signal.SIGTERM), (0.4, signal.SIGTERM)]
    assert supervise([worker], True, FakePublic(), signals, to_end=0.5) == 137
    assert worker.done == ["end", "end", "kill: it did not end within 0 seconds"]


def test_signals_between_two_starts_end_the_supervisor():
    worker = Listed(*LEADS, Ended(4, "lost"))
    began = time.monotonic()
    assert supervise([worker], True, FakePublic(), [(0.1, signal.SIGTERM)]) == 0
    assert time.monotonic() - began < PATIENCE / 2
