"""A server over the shipped models, in this process, and a client that asks it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
from engines import shared

import jspec
from jspec.commands.demo import FAMILY
from jspec.llm import LLM
from jspec.serving.generation.service import Service
from jspec.serving.server.app import make_app

CHAT = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}"
)
MAX_LEN = 256


@shared
def family() -> LLM:
    return jspec.load(
        *(FAMILY / "target", FAMILY / "draft"),
        **dict(num_draft_tokens=3, max_batch=4, max_len=MAX_LEN, page_size=32, dtype="float32", max_waiting=300),
    )


def service_of(llm: LLM, **settings) -> Service:
    return Service(jspec.AsyncEngine(llm), **{"names": ["family", "other"], "chat_template": CHAT, **settings})


def closing_service(**settings) -> Iterator[Service]:
    """For a fixture: a service over ``family``, which is closed at the end and holds nothing then."""
    service = service_of(family(), **settings)
    yield service
    asyncio.run(service.engine.close())
    assert_nothing_is_held(family())


async def asked(service: Service, path: str, body: Any = None, headers=None, content=None) -> httpx.Response:
    """What the server answers: to GET, or to POST where there is a body."""
    transport = httpx.ASGITransport(make_app(service))
    headers = {"content-type": "application/json", **(headers or {})}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        if body is None and content is None:
            return await client.get(path, headers=headers)
        return await client.post(path, headers=headers, content=json.dumps(body) if content is None else content)


def ask(service: Service, path: str, body: Any = None, headers=None, content=None) -> httpx.Response:
    return asyncio.run(asyncio.wait_for(asked(service, path, body, headers, content), 120))


def events(response: httpx.Response) -> list[dict]:
    """The chunks of a stream, which ends as OpenAI's do."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(chunk.startswith("data: ") for chunk in chunks)
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


def named_events(response: httpx.Response) -> list[dict]:
    """The events of a stream, whose names are those of their data."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def assert_nothing_is_held(llm: LLM):
    metrics = llm.engine.metrics()
    assert (metrics.pages_used, metrics.pages_swapped, metrics.num_running, metrics.num_waiting) == (0, 0, 0, 0)
