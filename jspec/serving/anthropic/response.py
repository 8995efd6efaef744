"""A message of ``/v1/messages``, complete or as events."""

import time
import uuid
from collections.abc import Iterable
from typing import Any

from jspec.serving.generation.block_response import BlockResponse
from jspec.serving.http.errors import ApiError, anthropic_body
from jspec.serving.http.streaming import named_event
from jspec.text.parsers.blocks import Block, Step
from jspec.text.parsers.schema_types import json_object

EMPTY = {"reasoning": {"thinking": "", "signature": ""}, "text": {"text": ""}}
TYPES = {"reasoning": "thinking", "text": "text", "call": "tool_use"}
DELTAS = {"reasoning": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
DELTAS |= {"call": ("input_json_delta", "partial_json")}
SECONDS = 5  # between pings while a call is held


class MessageResponse(BlockResponse):
    """The response of ``/v1/messages``.

    A call is told when it is complete, because a message cannot say that one is not: clients take what they have of its
    input, an empty object perhaps, and run it.
    """

    def whole(self) -> dict[str, Any]:
        content = [self._complete_block(block) for block in self.blocks.done]
        return {**self._message(content), "stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}

    def opening(self) -> Iterable[bytes]:
        self._pinged = time.monotonic()
        yield _event("message_start", message=self._message([]))
        yield _event("ping")

    def step_events(self, step: Step) -> Iterable[bytes]:
        block = step.block
        if step.what == "begin":
            yield _event("content_block_start", index=block.index, content_block=self._empty_block(block))
        elif step.what == "end":
            yield _event("content_block_stop", index=block.index)
        else:
            kind, name = DELTAS[block.kind]
            yield _event("content_block_delta", index=block.index, delta={"type": kind, name: step.text})

    def holds(self, tool: str) -> bool:
        del tool
        return True

    def waiting(self) -> Iterable[bytes]:
        if time.monotonic() - self._pinged >= SECONDS:
            self._pinged = time.monotonic()
            yield _event("ping")

    def closing(self) -> Iterable[bytes]:
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield _event("message_delta", delta=delta, usage=self._usage())
        yield _event("message_stop")

    def failing(self, error: ApiError) -> Iterable[bytes]:
        yield named_event("error", anthropic_body(error))

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _empty_block(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            block.id = block.id or f"toolu_{uuid.uuid4().hex[:24]}"
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        return {"type": TYPES[block.kind], **EMPTY[block.kind]}

    def _complete_block(self, block: Block) -> dict[str, Any]:
        if block.kind == "call":
            return {**self._empty_block(block), "input": json_object(block.text) or {}}
        return {**self._empty_block(block), DELTAS[block.kind][1]: block.text}

    @property
    def _stop_reason(self) -> str:
        if self.is_full:
            prompt, _, new = self.usage
            return "model_context_window_exceeded" if prompt + new >= self.service.max_len else "max_tokens"
        stopped = self.result is not None and self.result.stop_reason is not None
        if self._stop_sequence is not None or (stopped and self.blocks.is_broken):
            return "stop_sequence"
        return "tool_use" if self.blocks.has_call else "end_turn"

    @property
    def _stop_sequence(self) -> str | None:
        reason = None if self.result is None else self.result.stop_reason
        return reason if isinstance(reason, str) else None

    def _usage(self) -> dict[str, int]:
        prompt, cached, new = self.usage
        tokens = {"input_tokens": prompt - cached, "output_tokens": new}
        return {**tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
