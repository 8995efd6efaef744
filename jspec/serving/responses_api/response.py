"""A response of ``/v1/responses``, complete or as events."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jspec.engine.request import Request
from jspec.sampling.params import SamplingParams
from jspec.serving.generation.block_response import BlockResponse
from jspec.serving.generation.chat_turn import ChatTurn
from jspec.serving.http.errors import ApiError
from jspec.serving.http.streaming import json_of, named_event, named_json_event
from jspec.serving.responses_api.protocol import ResponsesRequest
from jspec.serving.responses_api.tools import Tools, custom_input
from jspec.text.parsers.blocks import Block, Step, as_message

PREFIX = "resp_"  # of a response's id
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponsesResponse(BlockResponse):
    """The response of ``/v1/responses``.

    Args:
      turn, model, requests, request_id: as of ``BlockResponse``.
      asked: the request.
      tools: of the request.
      store: called with the JSON of the complete response, of its message for a chat, and of its items by their ids, once it
        is complete.
    """

    def __init__(
        self,
        turn: ChatTurn,
        model: str,
        requests: list[Request],
        request_id: str,
        asked: ResponsesRequest,
        tools: Tools,
        store: Callable[[bytes, bytes, Mapping[str, bytes]], None],
    ):
        self._asked, self._tools, self._store = asked, tools, store
        super().__init__(turn, model, requests, request_id)
        self._number = 0  # of the next event
        self._ids = dict[int, str]()  # of items, and of calls by their place -1 - index
        self._echo = _echo(asked, requests[0].params)
        self._echo_json = json_of(self._echo)  # here, in another thread, since tools may be megabytes

    @property
    def num_entries(self) -> int:
        return super().num_entries + len(self._echo_json) // 16

    def whole(self) -> dict[str, Any]:
        return {**self._completed(), **self._echo}

    def _completed(self) -> dict[str, Any]:
        """The state of the complete response, which is stored with it."""
        state = self._state("incomplete" if self.is_full or self.blocks.is_broken else "completed", self._items())
        items = {item["id"]: json_of(item) for item in state["output"]}
        self._store(self._with_echo(state), json_of(as_message(self.blocks.done, self._call_id)), items)
        return state

    def opening(self) -> Iterable[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._response_event(kind, self._state("in_progress", []))

    def holds(self, tool: str) -> bool:
        return self._tools.origin(tool).custom  # whose input is known at its end

    def step_events(self, step: Step) -> Iterable[bytes]:
        block = step.block
        place = {"item_id": self._id(block), "output_index": block.index}
        if step.what == "begin":
            item = self._item(block, "in_progress")
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.kind != "call":
                yield self._event("response.content_part.added", **place, content_index=0, part=_part(block.kind, ""))
        elif step.what == "more":
            yield from self._more(block, step.text, place)
        else:
            yield from self._done(block, place)
            item = self._item(block, _status(block))
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def closing(self) -> Iterable[bytes]:
        state = self._completed()
        yield self._response_event(f"response.{state['status']}", state)

    def failing(self, error: ApiError) -> Iterable[bytes]:
        told = {"code": error.code or "server_error", "message": error.message}
        yield self._response_event("response.failed", {**self._state("failed", self._items()), "error": told})

    def _more(self, block: Block, text: str, place: dict[str, Any]) -> Iterable[bytes]:
        if block.kind != "call":
            yield self._part_event("delta", block, place, delta=text)
        elif not self._tools.origin(block.name).custom:  # whose input is known at its end
            yield self._event("response.function_call_arguments.delta", **place, delta=text)

    def _done(self, block: Block, place: dict[str, Any]) -> Iterable[bytes]:
        if block.kind == "call":
            if self._tools.origin(block.name).custom:
                given = custom_input(block.text)
                yield self._event("response.custom_tool_call_input.delta", **place, delta=given)
                yield self._event("response.custom_tool_call_input.done", **place, input=given)
            elif block.complete:
                done = {"name": self._tools.origin(block.name).name, "arguments": block.text}
                yield self._event("response.function_call_arguments.done", **place, **done)
            return
        yield self._part_event("done", block, place, text=block.text)
        part = _part(block.kind, block.text)
        yield self._event("response.content_part.done", **place, content_index=0, part=part)

    def _part_event(self, what: str, block: Block, place: dict[str, Any], **text: str) -> bytes:
        """``delta`` or ``done`` of reasoning or text."""
        kind, logprobs = ("reasoning_text", {}) if block.kind == "reasoning" else ("output_text", {"logprobs": []})
        return self._event(f"response.{kind}.{what}", **place, content_index=0, **text, **logprobs)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _id(self, block: Block) -> str:
        prefix = PREFIXES[block.kind]
        if block.kind == "call" and self._tools.origin(block.name).custom:
            prefix = "ctc"
        return self._ids.setdefault(block.index, f"{prefix}_{uuid.uuid4().hex}")

    def _call_id(self, block: Block) -> str:
        return block.id or self._ids.setdefault(-1 - block.index, f"call_{uuid.uuid4().hex}")

    def _items(self) -> list[dict[str, Any]]:
        return [self._item(block, _status(block)) for block in self.blocks.done]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an item; it is empty while it is in progress."""
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        begun = status != "in_progress"
        content = [_part(block.kind, block.text)] if begun else []
        if block.kind == "reasoning":
            return {**item, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        if block.kind == "text":
            return {**item, "type": "message", "role": "assistant", "content": content}
        tool, text = self._tools.origin(block.name), block.text if begun else ""
        call = {**item, "call_id": self._call_id(block), "name": tool.name}
        call |= {"namespace": tool.namespace} if tool.namespace else {}
        if tool.custom:
            return {**call, "type": "custom_tool_call", "input": custom_input(text)}
        return {**call, "type": "function_call", "arguments": text}

    def _response_event(self, kind: str, state: dict[str, Any]) -> bytes:
        """An event with the response."""
        number, self._number = self._number, self._number + 1
        head = json_of({"type": kind, "sequence_number": number})[:-1]
        return named_json_event(kind, head + b',"response":' + self._with_echo(state) + b"}")

    def _with_echo(self, state: dict[str, Any]) -> bytes:
        """The JSON of the response."""
        return json_of(state)[:-1] + b"," + self._echo_json[1:]

    def _state(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields that change while the response comes."""
        has_ended = status in ("completed", "incomplete")
        why = "max_output_tokens" if self.is_full else "stop"  # within a call
        return {
            "id": f"{PREFIX}{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if has_ended else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": why} if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "usage": self._usage() if has_ended else None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, cached, new = self.usage
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": new,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": prompt + new,
        }


def _echo(asked: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """The fields that say what was asked for."""
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(asked.reasoning or {})},
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"}, **(asked.text or {})},
        "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        "tools": asked.tools or [],
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _status(block: Block) -> str:
    return "completed" if block.complete else "incomplete"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
