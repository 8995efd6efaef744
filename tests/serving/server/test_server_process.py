"""A real server process, asked by the real client of OpenAI; what signals and clients that leave do to it."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from async_callers import slow_model
from openai_server import CHAT, MAX_LEN, family
from server_process import running

import jspec
from jspec import cli
from jspec.commands.demo import FAMILY

ROOT = Path(__file__).parents[3]
KEY = "a-key"
PROMPT = "import os\nimport sys\n\n\ndef main(argv=None):"
MESSAGES: list = [{"role": "user", "content": "A queue."}]
START = 300  # seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    template = folder / "chat.jinja"
    template.write_text(CHAT)
    command = [sys.executable, "-m", "jspec.cli", "serve", str(FAMILY / "target"), "--draft", str(FAMILY / "draft")]
    command += ["--num-speculative-tokens", "3", "--served-model-name", "family", "other", "--port", "0"]
    command += ["--max-num-seqs", "4", "--max-model-len", str(MAX_LEN), "--block-size", "32", "--dtype", "float32"]
    command += ["--reproducible", "--chat-template", str(template), "--api-key", KEY, "--log-level", "warning"]
    with running(command, folder) as (process, address):
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def metric(server: str, name: str) -> float:
    text = httpx.get(f"{server}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    return float(next(line for line in text.splitlines() if line.startswith(name)).rsplit(" ", 1)[1])


def idle(server: str):
    deadline = time.monotonic() + 60
    while metric(server, "vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def generated(prompt, **params) -> jspec.Result:
    found = jspec.generate(family(), prompt, **params)  # from the checkpoint's defaults, as the server
    assert isinstance(found, jspec.Result)
    return found


def test_synchronous_client_gets_completions(server, client):
    assert [model.id for model in client.models.list()] == ["family", "other"]
    text = generated(PROMPT, temperature=0, max_tokens=12).text
    answer = client.completions.create(model="family", prompt=PROMPT, temperature=0, max_tokens=12)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "length")
    stream = client.completions.create(
        **dict(model="family", prompt=PROMPT, temperature=0, max_tokens=12, stream=True),
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    seeded = {"temperature": 0.9, "seed": 5, "max_tokens": 10}
    expected = generated(family().chat_prompt(MESSAGES, chat_template=CHAT), top_k=20, **seeded).text
    chat = client.chat.completions.create(model="other", messages=MESSAGES, extra_body={"top_k": 20}, **seeded)
    assert chat.choices[0].message.content == expected
    stream = client.chat.completions.create(
        **dict(model="other", messages=MESSAGES, extra_body={"top_k": 20}, stream=True, **seeded)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_programs_have_run_when_the_address_is_told(server, tmp_path_factory):
    log = tmp_path_factory.getbasetemp() / "server0" / "log"
    told = r"jspec serve: compiling\n(.*\n)*jspec serve: all \d+ programs have run after \d+ s\n(.*\n)*.* at http://"
    assert re.search(told, log.read_text()), log.read_text()


def test_asynchronous_client_gets_completions(server):
    async def everybody():
        async with openai.AsyncOpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0) as client:

            async def text(seed: int) -> str:
                stream = await client.completions.create(
                    **dict(model="family", prompt=PROMPT, temperature=0.8, seed=seed, max_tokens=10, stream=True)
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(text, range(8)))

    expected = [generated(PROMPT, temperature=0.8, seed=seed, max_tokens=10).text for seed in range(8)]
    assert asyncio.run(asyncio.wait_for(everybody(), 120)) == expected


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_measures_the_server(server, tmp_path, capsys, monkeypatch, backend):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    options = ["--backend", backend, "--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "12"]
    options += ["--ignore-eos", "--temperature", "0.5", "--tokenizer", str(FAMILY / "target"), "--max-concurrency", "3"]
    options += ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    assert cli.main(["bench", "serve", "--base-url", server, *options]) == 0
    assert "Speculative Decoding" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (6, 0, [""] * 6)
    assert result["output_lens"] == [12] * 6
    assert result["max_concurrent_requests"] == 3
    # The first token of an answer comes from reading the prompt or with a round; the others are of rounds alone.
    assert 1 <= result["spec_decode_acceptance_length"] <= 4
    assert result["spec_decode_draft_tokens"] <= 3 * result["spec_decode_num_drafts"]
    assert sum(map(len, result["itls"])) + 6 <= 72
    assert result["mean_tpot_ms"] < result["mean_itl_ms"]  # a chunk has several tokens


def test_errors_are_the_openai_clients_exceptions(server, client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="family", prompt=PROMPT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt=PROMPT)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server}/v1", api_key="wrong", max_retries=0).models.list()
    assert httpx.get(f"{server}/health").status_code == 200


def test_requests_of_disconnected_clients_are_cancelled(server, client):
    """In the middle of a stream, of a wait, and of a request's own body."""
    idle(server)
    body = dict(model="family", prompt="x = ", max_tokens=250, extra_body={"ignore_eos": True})
    before = metric(server, 'vllm:request_success_total{engine="0",finished_reason="abort"')
    stream = client.completions.create(**body, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**body, timeout=0.2)
    host, port = server.removeprefix("http://").split(":")
    for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{", b"\xff" * 999):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(sent)
    idle(server)
    assert metric(server, 'vllm:request_success_total{engine="0",finished_reason="abort"') == before + 2
    assert metric(server, "vllm:kv_cache_usage_perc") == 0


def test_too_long_header_is_refused(server):
    with contextlib.suppress(httpx.TransportError):  # it may hang up
        assert httpx.get(f"{server}/health", headers={"x": "a" * 200_000}).status_code in (400, 431)
    assert httpx.get(f"{server}/health").status_code == 200


SLOW = """
import sys
import jspec
from jspec.serving.http.server import listener
from jspec.serving.server.lifecycle import run
from jspec.serving.http.settings import ServerSettings
from jspec.serving.generation.service import Service
from async_callers import slow_model

service = Service(jspec.AsyncEngine(slow_model()), ["slow"])
run(service, listener("127.0.0.1", 0), ServerSettings(shutdown_timeout=float(sys.argv[1])))
print("ended by itself")
"""


def is_healthy(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:  # it has ended meanwhile
        return False


@pytest.mark.parametrize(("patience", "signals"), [("60", 1), ("0.1", 1), ("60", 2)])
def test_sigterm_finishes_requests_and_exits(tmp_path, patience, signals):
    """Answers end if they can within ``--shutdown-timeout``, and are given up if not, or at a second signal."""
    with running([sys.executable, "-c", SLOW, patience], tmp_path) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        body = dict(model="slow", prompt="abc", max_tokens=400, seed=5, stream=True)
        streams = [client.completions.create(**body) for _ in range(3)]
        texts = [next(stream).choices[0].text for stream in streams]
        process.send_signal(signal.SIGTERM)
        while is_healthy(address):
            time.sleep(0.01)
        if (patience, signals) == ("60", 1):
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                client.completions.create(**body)
            for i, stream in enumerate(streams):
                texts[i] += "".join(chunk.choices[0].text for chunk in stream)
            expected = jspec.generate(slow_model(), "abc", max_tokens=400, seed=5).text
            assert texts == [expected] * 3
        else:
            for _ in range(signals - 1):
                process.send_signal(signal.SIGTERM)
            for stream in streams:
                with pytest.raises(openai.APIError, match="shutting down"):
                    list(stream)
        assert process.wait(30) == 0
        assert process.stdout.read().endswith("ended by itself\n")
