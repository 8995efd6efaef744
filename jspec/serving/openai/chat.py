"""``/v1/chat/completions``: the endpoint and its response."""

import uuid
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.serving.generation.chat_turn import ChatTurn, TurnOutput
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.protocol import ChatRequest, parsed
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import tenant_of
from jspec.serving.http.headers import request_id_of
from jspec.serving.openai.choice_response import ChoiceResponse
from jspec.serving.openai.logprobs import chat_logprobs, prompt_logprobs


async def chat(service: Service, http: HttpRequest) -> Response:
    """The response to a request for the next message of a chat."""
    request = parsed(ChatRequest, await read_object(service, http), service.most_entries)
    model = service.require_model(request.model)
    turn, request_id = ChatTurn(service, request, tenant_of(http)), request_id_of(http.scope)
    return await turn.respond(http, lambda requests: ChatResponse(turn, model, requests, request_id))


class ChatResponse(ChoiceResponse):
    """The response of ``/v1/chat/completions``."""

    prefix, complete_object, chunk_object, content = "chatcmpl", "chat.completion", "chat.completion.chunk", "delta"

    def __init__(self, turn: ChatTurn, model: str, requests: list[Request], request_id: str):
        super().__init__(turn.service, turn.request, model, requests, request_id, len(requests))
        request = turn.request
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        shows = request.include_reasoning is not False
        self._turn, self._outputs = turn, [turn.output(shows) for _ in (requests if turn.is_parsed else ())]

    def whole(self, index: int, result: Result) -> dict[str, Any]:
        fields: dict[str, Any] = {"content": result.text or ""}
        if self._outputs:
            fields = next_delta(self._outputs[index], result)
            calls = [{key: call[key] for key in ("id", "type", "function")} for call in fields.pop("tool_calls", ())]
            content = fields.pop("content", None if calls else "")
            fields = {"content": content, **fields, **({"tool_calls": calls} if calls else {})}
        return {"message": {"role": "assistant", **fields, "refusal": None}}

    def shown(self, index: int, delta: Delta) -> dict[str, Any]:
        if self._outputs:
            return next_delta(self._outputs[index], delta)
        return {"content": delta.text} if delta.text else {}

    def opening_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        opening = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": opening, "logprobs": None, **self.ending(index, None)}]

    def ending(self, index: int, result: Result | None) -> dict[str, Any]:
        """As of any choice, but that a message that ended by itself ended with its calls, unless one was forced by name.

        Not where one is broken, which a client must not take for a call."""
        ending = super().ending(index, result)
        blocks = self._outputs[index].blocks if self._outputs else None
        called = blocks is not None and blocks.has_call and not blocks.is_broken
        if called and self._turn.choice.kind != "named" and ending["finish_reason"] == "stop":
            return {**ending, "finish_reason": "tool_calls"}
        return ending

    def num_reasoning_tokens(self) -> int | None:
        if not self._outputs:
            return None
        ended = self.results.items()
        return sum(self._turn.num_reasoning_tokens(self._outputs[i].blocks, result.token_ids) for i, result in ended)

    def extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        first = self.results[0]
        if self.request.return_token_ids:
            extras["prompt_token_ids"] = first.prompt_token_ids
        places = first.prompt_logprobs
        if self.request.prompt_logprobs is not None and places is not None:
            extras["prompt_logprobs"] = prompt_logprobs(places)
        return extras

    def logprobs(self, index: int, output: Delta | Result) -> dict[str, Any] | None:
        places = output.logprobs
        if places is None or self._top is None:
            return None
        return chat_logprobs(output.token_ids, places, self._top, self.service.token_bytes)


def next_delta(output: TurnOutput, new: Delta | Result) -> dict[str, Any]:
    """The fields of the next ``delta``; empty if there is nothing to show yet.

    ``id``, ``type`` and ``name`` of a call are in its first delta alone, since clients join what comes twice.
    """
    delta: dict[str, Any] = {}
    calls = dict[int, dict[str, Any]]()
    for step in output.add(new):
        block = step.block
        if block.kind == "call":
            index = sum(other.kind == "call" for other in output.blocks.done[: block.index])
            if step.what == "begin":
                id = block.id or f"chatcmpl-tool-{uuid.uuid4().hex}"
                function = {"name": block.name, "arguments": ""}
                calls[index] = {"index": index, "id": id, "type": "function", "function": function}
            elif step.text:
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += step.text
        elif step.what == "more":
            name = "content" if block.kind == "text" else "reasoning"
            delta[name] = delta.get(name, "") + step.text
    if "reasoning" in delta:  # some clients read one name, and some the other
        delta["reasoning_content"] = delta["reasoning"]
    return {**delta, "tool_calls": list(calls.values())} if calls else delta
