"""The output of a chat in the form of ``/v1/chat/completions``: a message, or the deltas of a stream."""

import uuid
from typing import Any

from jspec.outputs import Delta, Result
from jspec.serving.generation.turn_output import TurnOutput


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


def whole_message(output: TurnOutput, result: Result) -> dict[str, Any]:
    """The fields of the whole ``message``; there is no ``tool_calls`` without a call."""
    delta = next_delta(output, result)
    calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.pop("tool_calls", ())]
    content = delta.pop("content", None if calls else "")
    return {"content": content, **delta, **({"tool_calls": calls} if calls else {})}
