"""Sends one request to a server that speaks OpenAI's protocol, and records when each chunk of the response comes."""

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from jspec.bench.datasets import Sample
from jspec.bench.responses import Response

COMPLETIONS, CHAT = "openai", "openai-chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
SHOWN = 500  # characters of a server's response that an error quotes
LONGEST_LINE = 2**22  # bytes of an event


class StreamError(ValueError):
    """The server sent an error, or something else than a stream of OpenAI's chunks."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what they have in common.

    Attributes:
      url: address and path.
      model: the name of the model.
      chat: whether prompts are sent as a user's messages, to ``/v1/chat/completions``.
      fields: further fields of the request's body: temperature, for example.
      headers: of HTTP.
    """

    url: str
    model: str
    chat: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def body(self, sample: Sample) -> dict[str, Any]:
        """The body of the request for a sample."""
        chat = {"messages": [{"role": "user", "content": sample.prompt}], "max_completion_tokens": sample.output_len}
        text = {"prompt": sample.prompt, "max_tokens": sample.output_len}
        prompt = {"model": self.model, **(chat if self.chat else text)}
        return {**prompt, "stream": True, "stream_options": {"include_usage": True}, **self.fields}


async def send_request(session: aiohttp.ClientSession, endpoint: Endpoint, sample: Sample) -> Response:
    """The response to a sample. A failure, of the network too, is its ``error``."""
    response = Response(sample, time.perf_counter())
    try:
        async with session.post(endpoint.url, json=endpoint.body(sample), headers=endpoint.headers) as http_response:
            if http_response.status != 200:
                raise StreamError(f"HTTP {http_response.status}: {await beginning(http_response)}")
            if http_response.content_type != "text/event-stream":
                raise StreamError(
                    f"no stream of events, but {http_response.content_type}: {await beginning(http_response)}"
                )
            await _read(http_response, response)
    except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError, ValueError) as error:
        response.error = str(error)[:SHOWN] or type(error).__name__
        response.ended = time.perf_counter()
    return response


async def beginning(http_response: aiohttp.ClientResponse) -> str:
    """The first characters of a body, for an error."""
    return (await http_response.content.read(SHOWN)).decode(errors="replace").strip()


async def _read(http_response: aiohttp.ClientResponse, response: Response):
    """Record the events of a stream.

    Raises:
      StreamError: the stream has an error in it, something else than OpenAI's chunks, or no end.
    """
    texts: list[str] = []
    done = False
    async for line in http_response.content:
        if not line.startswith(b"data:"):  # an empty line, a comment, or a name of the event
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        now = time.perf_counter()
        try:
            text, finished = _parse_chunk(json.loads(data), response)
        except (TypeError, AttributeError, LookupError, json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise StreamError(f"no chunk of OpenAI's: {data[:SHOWN].decode(errors='replace')}") from None
        if text:
            texts.append(text)
            response.chunk_times.append(now)
        if text or finished:
            response.ended = now
        done = done or finished
    response.text = "".join(texts)
    if not done:
        raise StreamError("the stream ended before the response did")
    if not response.ended:
        raise StreamError("the stream had neither text nor an end")


def _parse_chunk(chunk: dict[str, Any], response: Response) -> tuple[str, bool]:
    """The text of a chunk, and whether the response ends with it. Usage goes into the response.

    Raises:
      StreamError: the chunk is an error.
    """
    if chunk.get("error"):
        error = chunk["error"]
        raise StreamError(f"an error in the stream: {error.get('message') if isinstance(error, dict) else error}")
    if chunk.get("usage"):
        usage = chunk["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise StreamError(f"no numbers of tokens in usage: {usage}")
        response.prompt_tokens, response.output_tokens = counts
    text, finished = "", False
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or choice
        text += "".join(delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content", "text"))
        finished = finished or choice.get("finish_reason") is not None
    return text, finished
