"""A server whose disk is full, whose cache cannot be written, and whose checkpoint is gone goes on serving."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from children import environment

from jspec.commands.demo import FAMILY
from jspec.serving.http.standard_streams import BestEffort, keep_serving_without_them

ROOT = Path(__file__).parents[3]
ASKED = {"prompt": "import os\n", "temperature": 0, "max_tokens": 8}


def test_output_that_cannot_be_written_is_lost(tmp_path):
    with open("/dev/full", "w") as full:
        stream = BestEffort(full.fileno())
        print("a" * 100_000, file=stream, flush=True)
    print("closed", file=BestEffort(full.fileno() if not full.closed else 999), flush=True)
    with (tmp_path / "log").open("w") as log:
        stream = BestEffort(log.fileno())
        assert (print("é\udc80", file=stream), stream.isatty(), stream.writable()) == (None, False, True)
    assert (tmp_path / "log").read_text() == "é\\udc80\n"


def test_streams_that_are_no_files_stay(capsys):
    before = sys.stderr, sys.stdout
    keep_serving_without_them()
    assert (sys.stderr, sys.stdout) == before
    print("kept", file=sys.stderr)
    assert capsys.readouterr().err == "kept\n"


@pytest.mark.nightly
def test_a_server_goes_on_without_disk_cache_and_checkpoint(tmp_path):
    checkpoint = shutil.copytree(FAMILY / "target", tmp_path / "target")
    (cache := tmp_path / "cache").write_text("a file in the place of a folder")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jspec.cli", "serve", str(checkpoint), "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "128", "--max-num-seqs", "2", "--served-model-name", "family"]
    variables = {**environment(ROOT / "tests" / "helpers"), "XDG_CACHE_HOME": str(cache)}
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, env=variables, stdout=full, stderr=full) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        try:
            deadline = time.monotonic() + 300
            while not _is_up(client):
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            before = client.post("/v1/completions", json=ASKED)
            shutil.rmtree(checkpoint)
            os.unlink(cache)
            for _ in range(3):
                after = client.post("/v1/completions", json=ASKED)
                assert after.status_code == 200
                assert after.json()["choices"] == before.json()["choices"]
                assert client.post("/v1/completions", json={"prompt": 5}).status_code == 400
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def _is_up(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
