"""The supervisor's public address with HTTPS."""

import asyncio
import shutil
import subprocess

import pytest
from loops import in_a_loop
from supervised_worker import CHUNK, EVENT, STREAM, chunk, running


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    """A certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not installed")
    folder = tmp_path_factory.mktemp("https")
    files = str(folder / "certificate"), str(folder / "key")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-out", files[0], "-keyout", files[1]]
    command += ["-days", "1", "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return files


@in_a_loop
async def test_https_is_served(files):
    async def answer(asked, reader, writer):
        writer.write(STREAM + chunk(EVENT))

    async with running(answer, certificate=files) as (_, _, client):
        response = await client.post("/v1/completions", json=CHUNK)
        assert response.content.startswith(EVENT)
        assert "was lost" in response.text


@in_a_loop
async def test_a_client_without_a_handshake_is_disconnected(files):
    async def never(asked, reader, writer):
        raise AssertionError("the worker has heard of it")

    async with running(never, certificate=files, max_header_seconds=0.5) as (_, side, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", side._bound.getsockname()[1])
        assert await asyncio.wait_for(reader.read(), 20) == b""
        writer.close()
