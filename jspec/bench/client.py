"""Asks a server that speaks OpenAI's protocol for one answer, as a stream, and takes down when it came."""

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from jspec.bench.answers import Answer
from jspec.bench.datasets import Sample

COMPLETIONS, CHAT = "openai", "openai-chat"
PATHS = {COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"}
SHOWN = 500  # characters of what a server sent, in an error
LONGEST_LINE = 2**22  # bytes of an event


class StreamError(ValueError):
    """What a server sent is no answer."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
      url: the address that answers, with its path.
      model: the name of the model.
      chat: whether prompts are the messages of a user, for ``/v1/chat/completions``.
      fields: further fields of the request's body: temperature, for example.
      headers: of HTTP.
    """

    url: str
    model: str
    chat: bool = False
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def body(self, sample: Sample) -> dict[str, Any]:
        """What is sent for a sample."""
        chat = {"messages": [{"role": "user", "content": sample.prompt}], "max_completion_tokens": sample.output_len}
        text = {"prompt": sample.prompt, "max_tokens": sample.output_len}
        asked = {"model": self.model, **(chat if self.chat else text)}
        return {**asked, "stream": True, "stream_options": {"include_usage": True}, **self.fields}


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint, sample: Sample) -> Answer:
    """The answer to a sample. Whatever goes wrong between here and the server is its ``error``."""
    answer = Answer(sample, time.perf_counter())
    try:
        async with session.post(endpoint.url, json=endpoint.body(sample), headers=endpoint.headers) as response:
            if response.status != 200:
                raise StreamError(f"HTTP {response.status}: {await beginning(response)}")
            if response.content_type != "text/event-stream":
                raise StreamError(f"no stream of events, but {response.content_type}: {await beginning(response)}")
            await _read(response, answer)
    except (aiohttp.ClientError, HttpProcessingError, TimeoutError, OSError, ValueError) as error:
        answer.error = str(error)[:SHOWN] or type(error).__name__
        answer.ended = time.perf_counter()
    return answer


async def beginning(response: aiohttp.ClientResponse) -> str:
    """The first characters of a body, for an error."""
    return (await response.content.read(SHOWN)).decode(errors="replace").strip()


async def _read(response: aiohttp.ClientResponse, answer: Answer):
    """Take down the events of a stream.

    Raises:
      StreamError: the stream has an error in it, something else than OpenAI's chunks, or no end.
    """
    pieces: list[str] = []
    done = False
    async for line in response.content:
        if not line.startswith(b"data:"):  # an empty line, a comment, or a name of the event
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        now = time.perf_counter()
        try:
            text, finished = _taken(json.loads(data), answer)
        except (TypeError, AttributeError, LookupError, json.JSONDecodeError, UnicodeDecodeError, RecursionError):
            raise StreamError(f"no chunk of OpenAI's: {data[:SHOWN].decode(errors='replace')}") from None
        if text:
            pieces.append(text)
            answer.told.append(now)
        if text or finished:
            answer.ended = now
        done = done or finished
    answer.text = "".join(pieces)
    if not done:
        raise StreamError("the stream ended before the answer did")
    if not answer.ended:
        raise StreamError("the stream had neither text nor an end")


def _taken(chunk: dict[str, Any], answer: Answer) -> tuple[str, bool]:
    """The text of a chunk, and whether the answer ends with it. Usage goes into the answer.

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
        answer.prompt_tokens, answer.output_tokens = counts
    text, finished = "", False
    for choice in chunk.get("choices") or ():
        said = choice.get("delta") or choice
        text += "".join(said.get(name) or "" for name in ("reasoning_content", "reasoning", "content", "text"))
        finished = finished or choice.get("finish_reason") is not None
    return text, finished
