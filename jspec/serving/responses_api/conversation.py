"""From the items of ``/v1/responses`` to the messages of a chat."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.serving.http.errors import wrong
from jspec.serving.responses_api.tools import Tools
from jspec.text.chat_messages import unseen

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
CONTENT = 'text, or a list of {"type": "input_text", "text": ".."}'
REFERENCE = "item_reference"
KINDS = ("message", "reasoning", *CALLS, *OUTPUTS, REFERENCE)


class Conversation:
    """Collects the messages of a chat.

    Reasoning, text and calls of the model in a row are one message, as it wrote them.

    Args:
      messages: those before, of earlier responses.
      tools: of the request.
      stored: the item of a path with an id, among those of responses before; raises ``ApiError`` where there is none.

    Attributes:
      messages: all of them.
    """

    def __init__(
        self, messages: Sequence[dict[str, Any]], tools: Tools, stored: Callable[[str, str], Mapping[str, Any]]
    ):
        self.messages, self._tools, self._stored = [*messages], tools, stored
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        self._called = {call["id"] for call in calls}

    def add(self, given: str | Sequence[Mapping[str, Any]]):
        """Add the field ``input``.

        Raises:
          ApiError: 400, with the path of what is wrong.
        """
        if isinstance(given, str):
            self.messages.append({"role": "user", "content": given})
            return
        for index, item in enumerate(given):
            self._item(f"input[{index}]", item)

    def _item(self, path: str, item: Mapping[str, Any]):
        kind = item.get("type")
        if kind is None:
            kind = REFERENCE if "role" not in item and "id" in item else "message"
        if kind == REFERENCE:
            if not isinstance(item.get("id"), str):
                raise wrong(f"{path}.id", item.get("id"), "the id of an item of a response before")
            item = self._stored(path, item["id"])
            kind = item["type"]
        if kind not in KINDS:  # what servers of OpenAI carried out, for example
            raise wrong(f"{path}.type", kind, f"one of {', '.join(KINDS)}")
        if kind == "message":
            self._message(path, item)
        elif kind == "reasoning":
            field = "content" if item.get("content") else "summary"
            thoughts = _texts(f"{path}.{field}", item.get(field) or "", any_kind=True)
            if thoughts:
                message = self._assistant(new=True)
                message["reasoning_content"] = "\n".join(thoughts)
        elif kind in CALLS:
            self._call(path, item, CALLS[kind])
        else:
            id = item.get("call_id")
            if not isinstance(id, str) or id not in self._called:
                raise wrong(f"{path}.call_id", id, "the call_id of a call before")
            text = "\n".join(_content(path, item, "output", of_tool=True))
            self.messages.append({"role": "tool", "tool_call_id": id, "content": text})

    def _message(self, path: str, item: Mapping[str, Any]):
        role, texts = item.get("role"), _content(path, item, "content")
        if role not in ROLES:
            raise wrong(f"{path}.role", role, f"one of {', '.join(ROLES)}")
        if role != "assistant":
            self.messages.append({"role": role, "content": "\n".join(texts)})
            return
        message = self._assistant(new=False, kind="content")
        message["content"] = "\n".join(texts)

    def _call(self, path: str, item: Mapping[str, Any], field: str):
        id, name, written = item.get("call_id"), item.get("name"), item.get(field)
        if not (isinstance(id, str) and isinstance(name, str) and name and isinstance(written, str)):
            raise wrong(path, item, f'{{"type": "{item["type"]}", "call_id": "..", "name": "..", "{field}": ".."}}')
        self._called.add(id)
        function = self._tools.function(name, str(item.get("namespace") or ""))
        arguments = written if field == "arguments" else json.dumps({"input": written})
        call = {"id": id, "type": "function", "function": {"name": function, "arguments": arguments}}
        self._assistant(new=False).setdefault("tool_calls", []).append(call)

    def _assistant(self, new: bool, kind: str = "") -> dict[str, Any]:
        """The model's message that is under way; a new one behind others' messages, or where it has calls or ``kind``."""
        last = self.messages[-1] if self.messages else {"role": ""}
        full = bool(last.get(kind)) or (kind != "" and "tool_calls" in last)
        if new or last["role"] != "assistant" or full:
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _content(path: str, item: Mapping[str, Any], field: str, of_tool: bool = False) -> list[str]:
    """The texts of a field that has to be there."""
    if field not in item:
        raise wrong(f"{path}.{field}", None, CONTENT)
    return _texts(f"{path}.{field}", item[field], of_tool=of_tool)


def _texts(path: str, content: Any, any_kind: bool = False, of_tool: bool = False) -> list[str]:
    """The texts of a content: text itself, or a list of parts. In place of images in tools' results there are sentences."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise wrong(path, content, CONTENT)
    texts = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "refusal":
            texts.append(str(part.get("refusal", "")))
            continue
        if of_tool and (sentence := unseen(where, kind)):
            texts.append(sentence)
            continue
        if not (any_kind or kind in TEXTS):
            raise wrong(f"{where}.type", kind, f"one of {', '.join(TEXTS)}; images, audio and files are not supported")
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise wrong(where, part, '{"type": "..", "text": ".."}')
        texts.append(part["text"])
    return texts
