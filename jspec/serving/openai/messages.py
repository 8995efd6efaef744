"""The messages of a chat, checked, in the form that chat templates expect."""

import json
from typing import Any

from jspec.serving.openai.errors import ApiError, shown

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_KNOWN = {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "reasoning", "reasoning_content"}
_NOTHING = {"audio", "function_call", "annotations"}  # a client that sends back what it got has them, with null


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with one text each, and with the arguments of tool calls as objects.

    Raises:
      ApiError: 400, with the place of what is wrong: ``messages[2].content``.
    """
    if not messages:
        raise ApiError(400, "messages is empty: expected at least one message", "messages")
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def characters_of(message: dict[str, Any]) -> int:
    """How many characters of text a message has."""
    return sum(len(value) for value in message.values() if isinstance(value, str))


def _plain(where: str, message: dict[str, Any]) -> dict[str, Any]:
    for name, value in message.items():
        if name not in _KNOWN and not (name in _NOTHING and value in (None, [])):
            raise _wrong(f"{where}.{name[:64]}", value, f"only {', '.join(sorted(_KNOWN))}")
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    found: dict[str, Any] = {"role": role, "content": _text(f"{where}.content", message.get("content"))}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise _wrong(f"{where}.{name}", value, "text")
            found[name] = value
    calls = message.get("tool_calls")
    if calls:
        if role != "assistant":
            raise _wrong(f"{where}.tool_calls", calls, "tool calls in messages of the assistant alone")
        found["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    elif found["content"] is None:
        raise _wrong(f"{where}.content", None, "text, or tool_calls beside it")
    return found


def _text(where: str, content: Any) -> str | None:
    """One text, of a text or of text parts; vLLM joins parts with line breaks, too."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, content, "text, or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        name = "refusal" if kind == "refusal" else "text"
        if isinstance(part, str):
            texts.append(part)
        elif kind in _TEXT_PARTS and isinstance(part.get(name), str):
            texts.append(part[name])
        else:
            raise _wrong(f"{where}[{index}]", part, '{"type": "text", "text": ..}; jspec reads text alone')
    return "\n".join(texts)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, calls, "a list of tool calls")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{index}]", call, '{"type": "function", "function": {"name": .., "arguments": ..}}')
        arguments = _arguments(f"{where}[{index}].function.arguments", function.get("arguments"))
        found.append({**call, "function": {**function, "arguments": arguments}})
    return found


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    """The arguments of a call as an object, which is what templates expect; OpenAI has them as JSON text."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            value = None
    elif arguments is None:
        value = {}
    if not isinstance(value, dict):
        raise _wrong(where, arguments, "a JSON object as text")
    return value


def _wrong(where: str, value: Any, expected: str) -> ApiError:
    return ApiError(400, f"{where}={shown(value)}: expected {expected}", where)
