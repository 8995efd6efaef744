"""The output of a chat in the form of ``/v1/chat/completions``: a message, or the deltas of a stream."""

import uuid
from collections.abc import Sequence
from typing import Any

from jspec.outputs import Result
from jspec.serving.generation.chat_turn import TurnParser
from jspec.text.parsers.blocks import Block, Blocks


class ChatOutput:
    """One choice of a chat, as its text comes.

    Args:
      parser: of the choice's text.
      blocks: collects its events.
    """

    def __init__(self, parser: TurnParser, blocks: Blocks):
        self._parser, self.blocks = parser, blocks

    def add(self, text: str, token_ids: Sequence[int], result: Result | None) -> dict[str, Any]:
        """The fields of the next ``delta``, the last of which has the result; empty if there is nothing to show yet.

        ``id``, ``type`` and ``name`` of a call are in its first delta alone, since clients join what comes twice.
        """
        events = self._parser.feed(text, token_ids)
        events = events if result is None else [*events, *self._parser.finish(ended=not result.was_cut)]
        delta: dict[str, Any] = {}
        calls = dict[int, dict[str, Any]]()
        for step in self.blocks.add(events, ended=result is not None):
            block = step.block
            if block.kind == "call":
                self._add_call(calls, block, step.what == "begin", step.text)
            elif step.what == "more":
                name = "content" if block.kind == "text" else "reasoning"
                delta[name] = delta.get(name, "") + step.text
        if "reasoning" in delta:  # some clients read one name, and some the other
            delta["reasoning_content"] = delta["reasoning"]
        return {**delta, "tool_calls": list(calls.values())} if calls else delta

    def message(self, result: Result) -> dict[str, Any]:
        """The fields of the whole ``message``; there is no ``tool_calls`` without a call."""
        delta = self.add(result.text or "", result.token_ids, result)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.pop("tool_calls", ())]
        content = delta.pop("content", None if calls else "")
        return {"content": content, **delta, **({"tool_calls": calls} if calls else {})}

    def _add_call(self, calls: dict[int, dict[str, Any]], block: Block, begins: bool, text: str):
        index = sum(other.kind == "call" for other in self.blocks.done[: block.index])
        if begins:
            id = block.id or f"chatcmpl-tool-{uuid.uuid4().hex}"
            function = {"name": block.name, "arguments": ""}
            calls[index] = {"index": index, "id": id, "type": "function", "function": function}
        elif text:
            call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
            call["function"]["arguments"] += text
