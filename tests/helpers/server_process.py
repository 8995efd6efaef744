"""Servers in processes of their own, and their addresses."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from children import environment
from openai_server import CHAT, MAX_LEN

from jspec.commands.demo import FAMILY

START = 300  # seconds
DRAFTS = "--draft", str(FAMILY / "draft"), "--num-speculative-tokens", "3"  # options of ``serving``
ROWS, WAITING = 4, 6  # of ``serving``: requests that decode together, and that may wait beside them


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process that serves, and its address."""
    variables = environment(Path(__file__).parent)
    log = folder / "log"
    streams = {"stdout": subprocess.PIPE, "stderr": log.open("w"), "text": True}
    with streams["stderr"], subprocess.Popen(command, env=variables, cwd=folder, **streams) as process:
        try:
            yield process, _address(process, log)
        finally:
            process.kill()


def _address(process: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + START
    while not (found := re.search(r"at (http://127.0.0.1:\d+)\n", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found[1]


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[psutil.Process, str]]:
    """A server that ends with 0 at SIGTERM. Drafts, which take longest to compile, come with ``DRAFTS``."""
    (template := folder / "chat.jinja").write_text(CHAT)
    command = [sys.executable, "-m", "jspec.cli", "serve", str(FAMILY / "target"), "--reproducible"]
    command += ["--served-model-name", "family", "--port", "0"]
    command += ["--max-num-seqs", str(ROWS), "--max-waiting", str(WAITING), "--max-model-len", str(MAX_LEN)]
    command += ["--block-size", "32", "--dtype", "float32", "--chat-template", str(template)]
    with running([*command, "--log-level", "warning", *options], folder) as (process, address):
        yield psutil.Process(process.pid), address
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (folder / "log").read_text()
