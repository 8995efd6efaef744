"""A small server of OpenAI's streams, which fails in the way that the name of the model says."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

from aiohttp import web

CHUNKS = ("one", " two", " three")  # of two tokens each
TOKENS = 6
PAUSE = 0.05  # seconds before each chunk
FAILURES = ("500", "cut", "garbage", "array", "error", "whole", "endless line", "silent", "odd usage")


class FakeServer:
    """What was asked, and what ``/metrics`` answers.

    Attributes:
      bodies: of the requests, in their order.
      under_way, most_under_way: requests that are being answered, now and at the busiest moment.
      pages: what ``/metrics`` answers, one after the other; 404 when there is no more.
      looks: how many requests there had been at each look at ``/metrics``.
    """

    def __init__(self):
        self.bodies: list[dict] = []
        self.under_way = self.most_under_way = 0
        self.pages: list[str] = []
        self.looks: list[int] = []
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") == "Bearer wrong":
            return web.Response(status=401, text="no such key")
        return web.json_response({"data": [{"id": "sound"}, {"id": "another"}]})

    async def _metrics(self, _) -> web.Response:
        self.looks.append(len(self.bodies))
        return web.Response(text=self.pages.pop(0)) if self.pages else web.Response(status=404)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._stream(request, body)
        finally:
            self.under_way -= 1

    async def _stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        how = body["model"] if body.get("prompt") != "the bad one" else "500"
        if how == "500":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        if how == "whole":
            return web.json_response({"choices": [{"text": "one"}]})
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b": a comment\n\n")
        for text in CHUNKS:
            await asyncio.sleep(3600 if how == "stuck" else PAUSE)
            if how == "cut" and text == CHUNKS[1]:
                request.transport.close()
                return response
            await response.write(_event(_bad_data(how) or _chunk(body, text, None)))
        if how == "silent":
            return response
        await response.write(_event(_chunk(body, "", "length")))
        if how != "no usage":
            tokens = "many" if how == "odd usage" else TOKENS
            await response.write(
                _event(json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}}))
            )
        await response.write(_event("[DONE]"))
        return response


def _bad_data(how: str) -> str | None:
    return {
        "garbage": "{not json",
        "array": "[1]",
        "error": json.dumps({"error": {"message": "out of memory"}}),
        "endless line": "x" * 2**24,
    }.get(how)


def _event(data: str) -> bytes:
    return f"data: {data}\r\n\r\n".encode()


def _chunk(body: dict, text: str, reason: str | None) -> str:
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    return json.dumps({"choices": [{"index": 0, "finish_reason": reason, **said}], "usage": None})


@contextlib.contextmanager
def fake_server() -> Iterator[FakeServer]:
    """A server in a thread of its own, with its address as ``url``."""
    fake, started, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()

    async def serve(stopped: asyncio.Event):
        runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stopped.wait()
        await runner.cleanup()

    stopped = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve(stopped)))
    thread.start()
    try:
        assert started.wait(10)
        yield fake
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(10)
        loop.close()


def page(drafts: int, draft_tokens: int, accepted: int, at: list[int], engine: str = "0") -> str:
    """A text of ``/metrics`` with these counters, ``at`` of them by position."""
    label = f'engine="{engine}",model_name="m"'
    lines = [f"vllm:spec_decode_num_drafts_total{{{label}}} {drafts}.0"]
    lines += [f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {draft_tokens}.0"]
    lines += [f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {accepted}.0"]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{{label},position="{i}"}} {n}.0' for i, n in enumerate(at)]
    return "\n".join(["# TYPE other gauge", "other 5", *lines, ""])
