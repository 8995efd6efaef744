"""Chat messages, checked and converted to the plain form that chat templates expect."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.text.parsers.schema_types import json_object

log = logging.getLogger("jspec.chat")

TEXT_PARTS = ("text", "input_text", "output_text")  # the types of a part that hold their text under "text"
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields with an assistant's reasoning
CALL = "{'function': {'name': ..., 'arguments': ...}}"  # form of a tool call, for error messages
NOTHING = ("", "null", '""')  # texts of a tool call's arguments that mean none
# What no model here reads, by a part of the name of its type -> what a sentence calls it.
UNSEEN = {"image": "An image", "audio": "A sound", "video": "A video", "file": "A file", "document": "A document"}
SHOWN = 80  # characters of a value that an error message quotes


def plain_messages(messages: Any, where: str = "messages") -> list[dict[str, Any]]:
    """One conversation as a list of new dictionaries.

    A message has the fields of OpenAI's. ``role`` is text. ``content`` is text, or a list of ``{"type": "text", "text":
    ...}`` whose texts are joined by newlines, as in vLLM; None is the empty text. Only an assistant's message may be without
    it, if it has ``tool_calls`` or reasoning. In place of an image in a tool's result, which is the tool's doing and not the
    user's, a sentence says that it was there. ``arguments`` of a tool call become an object if they are the JSON of one, an
    empty object for nothing and ``null``, and else stay the text that the model wrote. Other fields, ``name`` and
    ``tool_call_id`` for example, are kept, and fields that are None are left out: templates know a missing field, but
    seldom None.

    Args:
      messages: a list or another iterable of dictionaries, or of objects with ``model_dump``, as the OpenAI client returns
        them.
      where: name of the conversation in error messages.

    Raises:
      ValueError: this is no conversation, it is empty, or a message has a field that no template could use.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise ValueError(f"{where}={short(messages)}: expected a list of {{'role': ..., 'content': ...}}")
    listed = list(messages)
    if not listed:
        raise ValueError(f"{where} is empty: expected at least one {{'role': ..., 'content': ...}}")
    return [_message(f"{where}[{i}]", message) for i, message in enumerate(listed)]


def short(value: Any) -> str:
    """The ``repr`` of a value for an error message, shortened to ``SHOWN`` characters."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."


def unseen(where: str, kind: Any) -> str | None:
    """The sentence in place of a part of a tool's result that no model here reads, with a warning in the log; None for
    another type of part.

    Args:
      where: path of the part, for the log.
      kind: its type, ``image_url`` for example.
    """
    called = next((name for part, name in UNSEEN.items() if isinstance(kind, str) and part in kind), None)
    if called is None:
        return None
    sentence = f"[{called} was here, which this model cannot see.]"
    log.warning("%s of type %s, in a tool's result, is told to the model as %s", where, kind, sentence)
    return sentence


def _message(where: str, given: Any) -> dict[str, Any]:
    if callable(getattr(given, "model_dump", None)):  # a pydantic object
        given = given.model_dump()
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}={short(given)}: expected a dictionary with 'role' and 'content'")
    message = {str(name): value for name, value in given.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role={short(role)}: expected text: 'system', 'user', 'assistant' or 'tool'")
    if "content" in message:
        message["content"] = _content(f"{where}.content", message["content"], role == "tool")
    if "tool_calls" in message:
        calls, place = message["tool_calls"], f"{where}.tool_calls"
        if not isinstance(calls, list | tuple):
            raise ValueError(f"{place}={short(calls)}: expected a list of {CALL}")
        message["tool_calls"] = [_tool_call(f"{place}[{i}]", call) for i, call in enumerate(calls)]
        if not message["tool_calls"]:  # templates would take an empty list for calls
            del message["tool_calls"]
            message.setdefault("content", "")
    if role == "assistant" and isinstance(refusal := message.pop("refusal", None), str):  # what OpenAI's said instead
        message["content"] = "\n".join(filter(None, (message.get("content"), refusal)))
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    if isinstance(reasoning, str):  # under both names that servers write, because templates read either
        message["reasoning"] = message["reasoning_content"] = reasoning
    speaks = role == "assistant" and any(name in message for name in ("tool_calls", *REASONING))
    if "content" in given and not speaks:
        message.setdefault("content", "")
    if "content" not in message and not speaks:
        also = ", or tool_calls" if role == "assistant" else ""
        raise ValueError(f"{where}.content is missing: expected text, a list of {{'type': 'text', 'text': ...}}{also}")
    return message


def _content(where: str, given: Any, of_tool: bool) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list | tuple):
        raise ValueError(f"{where}={short(given)}: expected text, or a list of {{'type': 'text', 'text': ...}}")
    return "\n".join(_part(f"{where}[{i}]", part, of_tool) for i, part in enumerate(given))


def _part(where: str, part: Any, of_tool: bool) -> str:
    expected = "expected {'type': 'text', 'text': ...}"
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{where}={short(part)}: {expected}")
    kind = part.get("type", "text")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return part["refusal"]
    if of_tool and (sentence := unseen(where, kind)):
        return sentence
    if kind not in TEXT_PARTS:
        raise ValueError(f"{where}.type={short(kind)}: images, audio and files are not supported; {expected}")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text={short(part.get('text'))}: {expected}")
    return part["text"]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """The call with its arguments as an object. Templates read the function beside ``type`` and ``id``, or without them."""
    if isinstance(call, Mapping):
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": _function(f"{where}.function", call["function"])}
        if "name" in call:
            return _function(where, call)
    raise ValueError(f"{where}={short(call)}: expected {CALL}")


def _function(where: str, function: Mapping) -> dict[str, Any]:
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name={short(name)}: expected the name of a function")
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in NOTHING):
        return {**function, "arguments": {}}
    if isinstance(arguments, str):
        read = json_object(arguments)  # None of a call that was cut, or that the model got wrong
        return {**function, "arguments": arguments if read is None else read}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{where}.arguments={short(arguments)}: expected an object, or a text, the JSON of one")
    return {**function, "arguments": dict(arguments)}


def with_argument_objects(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The conversation with ``{"arguments": text}`` in place of arguments that are no object, for templates that go through
    the entries of an object; None if there are no such arguments."""
    changed, messages = False, []
    for message in conversation:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call.get("function", call)
            if isinstance(function["arguments"], str):
                function, changed = function | {"arguments": {"arguments": function["arguments"]}}, True
            calls.append(call | {"function": function} if "function" in call else function)
        messages.append(message | {"tool_calls": calls} if calls else message)
    return messages if changed else None
