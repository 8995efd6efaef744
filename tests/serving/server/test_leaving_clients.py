"""A client that leaves frees its row before the next round, whatever it had asked for and wherever its request was."""

import asyncio
import contextlib
import itertools
import json
from typing import Any

import pytest
from disturbances import by_hand
from openai_server import CHAT, ask, assert_nothing_is_held, family, service_of

from jspec.serving.server.app import make_app

TEMPLATE = CHAT.removesuffix("{% endif %}") + "<think>{% endif %}"
SCHEMA = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string", "minLength": 9}, "minItems": 99}},
    "required": ["lines"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Read a file, and say all that is in it."}]
CHAT_TOOL = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
# What each endpoint calls the same: a forced call, a thinking budget, a long form.
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {
        "plain": {},
        "call": {"tools": [CHAT_TOOL], "tool_choice": "required"},
        "budget": {"thinking_token_budget": 5},
        "form": {"response_format": {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA}}},
        "call after a budget": {"tools": [CHAT_TOOL], "tool_choice": "required", "thinking_token_budget": 2},
    },
    "/v1/responses": {
        "plain": {},
        "call": {"tools": [{"type": "function", "name": "write", "parameters": SCHEMA}], "tool_choice": "required"},
        "form": {"text": {"format": {"type": "json_schema", "name": "file", "schema": SCHEMA}}},
    },
    "/v1/messages": {
        "plain": {},
        "call": {"tools": [{"name": "write", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        "budget": {"thinking": {"type": "enabled", "budget_tokens": 5}},
        "form": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    },
    "/inference/v1/generate": {"plain": {}},
}
# When the client leaves: while its prompt is prepared, while its grammar is compiled, or after so many steps of the engine.
MOMENTS = ["prompt", "grammar", 0, 1, 4]
CASES = [
    (path, kind, stream, moment)
    for path, kinds in KINDS.items()
    for kind, stream, moment in itertools.product(kinds, (False, True), MOMENTS)
    if moment != "grammar" or kind in ("call", "form", "call after a budget")
]
TEST = CASES[::11]


def body_of(path: str, kind: str, stream: bool) -> dict[str, Any]:
    if path == "/inference/v1/generate":
        return {"token_ids": [7] * 20, "sampling_params": {"max_tokens": 150, "logprobs": 1}, "stream": stream}
    size = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    conversation = {"input": MESSAGES} if path == "/v1/responses" else {"messages": MESSAGES}
    return {**conversation, size: 150, "stream": stream, "model": "family", **KINDS[path][kind]}


@pytest.fixture(scope="module")
def service():
    made = service_of(family(), tool_parser="hermes", reasoning_parser="qwen3", chat_template=TEMPLATE)
    yield made
    asyncio.run(made.engine.close())


class Client:
    """A client of the ASGI application, which leaves when it is told to."""

    def __init__(self, app, path: str, body: dict[str, Any]):
        self._body, self._left, self.sent = json.dumps(body).encode(), asyncio.Event(), b""
        head = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        head |= {"headers": [(b"content-type", b"application/json")], "client": ("here", 1), "http_version": "1.1"}
        self.task = asyncio.ensure_future(app(head | {"root_path": "", "scheme": "http"}, self._receive, self._send))

    async def _receive(self):
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        self.sent += message.get("body", b"")

    async def leave(self):
        self._left.set()
        await asyncio.wait_for(self.task, 60)


@contextlib.contextmanager
def noticed(engine, name: str, monkeypatch):
    """An event that is set when a method of the engine is awaited, which goes on later."""
    reached, method = asyncio.Event(), getattr(engine, name)

    async def slow(*args):
        reached.set()
        await asyncio.sleep(0.02)
        return await method(*args)

    with monkeypatch.context() as patch:
        patch.setattr(engine, name, slow)
        yield reached


def held(service) -> tuple:
    """What requests under way hold in the server and in the engine."""
    engine = service.llm.engine
    grammars, core = engine.frontend.grammars, engine.handle._core
    return (
        *(service.in_flight, service.engine._subscribers, service.engine._compilations, grammars._under_way),
        *(core._subscribers, engine.scheduler.under_way, [*engine.scheduler.waiting], engine.scheduler.pages.used),
    )


async def left(service, path: str, kind: str, stream: bool, moment, monkeypatch):
    """A client comes and leaves, and the engine makes one step more."""
    app, engine = make_app(service), service.llm.engine
    with by_hand(engine) as step:
        if isinstance(moment, str):
            name = {"prompt": "prepare", "grammar": "grammar"}[moment]
            with noticed(service.engine, name, monkeypatch) as reached:
                client = Client(app, path, body_of(path, kind, stream))
                await asyncio.wait_for(reached.wait(), 60)
                await client.leave()
        else:
            client = Client(app, path, body_of(path, kind, stream))
            while not engine.handle.arriving:
                assert not client.task.done(), client.sent
                await asyncio.sleep(0.001)
            for _ in range(moment):
                step()
                await asyncio.sleep(0.001)
            assert moment == 0 or engine.metrics().num_running == 1, client.sent
            await client.leave()
        step()
        assert held(service) == (0, set(), set(), {}, {}, [], [], 0)


@pytest.fixture(scope="module")
def alone(service) -> list[dict]:
    return answer(service)


def answer(service) -> list[dict]:
    """The answer to the same conversation, whose pages are shared."""
    path = "/v1/chat/completions"
    response = ask(service, path, {**body_of(path, "plain", False), "max_tokens": 12, "seed": 3})
    assert response.status_code == 200, response.text
    return response.json()["choices"]


@pytest.mark.parametrize(
    ("path", "kind", "stream", "moment"),
    [pytest.param(*case, marks=() if case in TEST else pytest.mark.nightly) for case in CASES],
)
def test_a_client_that_leaves_frees_its_row_within_a_round(service, alone, monkeypatch, path, kind, stream, moment):
    """And leaves nothing behind: the next request has the text that it has alone."""
    asyncio.run(left(service, path, kind, stream, moment, monkeypatch))
    assert answer(service) == alone
    assert_nothing_is_held(family())
