"""From Anthropic's messages, content blocks and tools to the fields of a chat."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.serving.anthropic.protocol import PASSED_ON, CountTokensRequest, MessagesRequest
from jspec.serving.http.errors import flag, shown, wrong
from jspec.text.chat_messages import unseen

# Claude Code's first text of ``system``, which differs between versions and would make every prompt a new one.
BILLING = "x-anthropic-billing-header"
UNREADABLE = ("redacted_thinking", "fallback")  # blocks of the model's that say nothing
EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "disabled", "adaptive")
CONTENT = "text, or a list of content blocks"
CLEARED = "next_user_message"  # where a system message is meant for no turn but the one that it stands in
# Names of a chat's fields -> those of this endpoint.
NAMES = {"stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}
NAMES |= {"response_format": "output_config.format"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(request: CountTokensRequest) -> tuple[dict[str, Any], list[str]]:
    """The body of a chat that asks for the same, and what of the request was left out.

    Raises:
      ApiError: 400, with the path of what is wrong.
    """
    left_out = list[str]()
    chat: dict[str, Any] = {"messages": _messages(request), "tools": _tools(request.tools or [], left_out)}
    if _is_begun(chat["messages"]):
        chat["continue_final_message"] = True
    choice = request.tool_choice
    if choice is not None and (chat["tools"] or choice.get("type") not in ("auto", "none")):
        chat |= _tool_choice(choice, [tool["function"]["name"] for tool in chat["tools"]])
    thinking = (request.thinking or {}).get("type")
    if not (thinking is None or isinstance(thinking, str)):
        raise wrong("thinking.type", thinking, f"one of {', '.join(THINKING)}")
    if thinking not in (None, *THINKING):
        left_out.append(f"thinking.type={shown(thinking)}")
    budget = (request.thinking or {}).get("budget_tokens")
    if thinking == "enabled" and budget is not None:
        if not isinstance(budget, int) or budget < 0:
            raise wrong("thinking.budget_tokens", budget, "an integer of at least 0")
        chat["thinking_token_budget"] = budget
    config = request.output_config or {}
    if thinking == "disabled":
        chat["reasoning_effort"] = "none"
    elif config.get("effort") is not None:
        if config["effort"] not in EFFORTS:
            raise wrong("output_config.effort", config["effort"], f"one of {', '.join(EFFORTS)}")
        chat["reasoning_effort"] = config["effort"]
    form, former = config.get("format"), request.output_format  # the field's name before it was output_config's
    if form is not None and former not in (None, form):
        raise wrong("output_format", former, "the same as output_config.format, or nothing beside it")
    if form is not None or former is not None:
        chat["response_format"] = _format("output_format" if form is None else "output_config.format", form or former)
    if isinstance(request, MessagesRequest):
        chat |= {"max_tokens": request.max_tokens, "stop": request.stop_sequences, "stream": request.stream}
        chat |= {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        chat |= {name: value for name, value in (request.model_extra or {}).items() if name in PASSED_ON}
    return chat, left_out


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    system = _texts("system", request.system) if request.system is not None else []
    system = [text for text in system if not text.startswith(BILLING)]
    messages = [{"role": "system", "content": "\n".join(system)}] if system else []
    called = set[str]()
    last_user = max((i for i, message in enumerate(request.messages) if message.get("role") == "user"), default=-1)
    for index, message in enumerate(request.messages):
        if message.get("clear_at") == CLEARED and message.get("role") == "system" and index < last_user:
            continue
        path, role = f"messages[{index}]", message.get("role")
        content = message.get("content")
        if "content" not in message and role != "system":
            raise wrong(f"{path}.content", None, CONTENT)
        if role == "assistant":
            messages.append(_assistant(f"{path}.content", content, called))
        elif role == "user":
            messages += _user(f"{path}.content", content, called)
        elif role == "system":
            texts = _texts(f"{path}.content", content)
            messages += [{"role": "system", "content": "\n".join(texts)}] if texts else []
        else:
            raise wrong(f"{path}.role", role, '"user", "assistant" or "system"')
    return messages


def _is_begun(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer, which the model goes on with: text of its own."""
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last


def _assistant(path: str, content: Any, called: set[str]) -> dict[str, Any]:
    """A message of the model: its thinking, text and calls."""
    texts, calls, thoughts = list[str](), [], list[str]()
    for where, block in _blocks(path, content):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(where, block))
        elif kind == "thinking":
            thoughts.append(_text(where, block, "thinking"))
        elif kind == "tool_use":
            id, name, arguments = block.get("id"), block.get("name"), block.get("input", {})
            if not isinstance(id, str) or not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
                raise wrong(where, block, '{"type": "tool_use", "id": "..", "name": "..", "input": {..}}')
            called.add(id)
            calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}})
        elif kind not in UNREADABLE:
            raise wrong(f"{where}.type", kind, '"text", "thinking" or "tool_use"')
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(path: str, content: Any, called: set[str]) -> list[dict[str, Any]]:
    """The messages of a user's: results of tools, and text, in their order."""
    messages = list[dict[str, Any]]()
    for where, block in _blocks(path, content):
        kind = block.get("type")
        if kind == "tool_result":
            id = block.get("tool_use_id")
            if not isinstance(id, str) or id not in called:
                raise wrong(f"{where}.tool_use_id", id, "the id of a tool_use of a message before")
            text = "\n".join(_texts(f"{where}.content", block.get("content"), of_tool=True))
            if flag(f"{where}.is_error", block.get("is_error")) and not text.lower().startswith("error"):
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": id, "content": text})
            continue
        text = _readable(where, block, of_tool=False)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user", "content": text})
    return messages or [{"role": "user", "content": ""}]


def _blocks(path: str, content: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content and their paths; a text is one block."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    if content is None:
        return []
    if not isinstance(content, list):
        raise wrong(path, content, CONTENT)
    for index, block in enumerate(content):
        if not isinstance(block, Mapping):
            raise wrong(f"{path}[{index}]", block, 'a content block, {"type": "text", "text": ".."} for example')
    return [(f"{path}[{index}]", block) for index, block in enumerate(content)]


def _texts(path: str, content: Any, of_tool: bool = False) -> list[str]:
    """The texts of a content's blocks. In place of images in tools' results there are sentences."""
    return [_readable(where, block, of_tool) for where, block in _blocks(path, content)]


def _readable(path: str, block: Mapping[str, Any], of_tool: bool) -> str:
    """The text of a block: of text, of a search's result, or of a document that is text."""
    kind, source = block.get("type", "text"), block.get("source")
    if kind == "text":
        return _text(path, block)
    heading = [str(block[name]) for name in ("title", "source", "context") if isinstance(block.get(name), str)]
    if kind == "search_result":
        return "\n".join([*heading, *_texts(f"{path}.content", block.get("content"), of_tool)])
    if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
        name = "data" if source["type"] == "text" else "content"
        return "\n".join([*heading, *_texts(f"{path}.source.{name}", source.get(name), of_tool)])
    if of_tool and kind == "tool_reference":  # to a tool that the prompt has anyway
        return _text(path, block, "tool_name")
    sentence = unseen(path, kind) if of_tool else None
    if sentence is None:
        raise wrong(f"{path}.type", kind, '"text" or "tool_result"; images and files are not supported')
    return sentence


def _text(path: str, block: Mapping[str, Any], name: str = "text") -> str:
    if not isinstance(block.get(name), str):
        raise wrong(f"{path}.{name}", block.get(name), "text")
    return block[name]


def _tools(tools: Sequence[Mapping[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The tools as functions. Those that Anthropic's servers carry out are left out."""
    functions = []
    for index, tool in enumerate(tools):
        path, kind, name = f"tools[{index}]", tool.get("type", "custom"), tool.get("name")
        if kind not in ("custom", None):
            left_out.append(f"{path}.type={shown(kind)}")
            continue
        if not isinstance(name, str) or not name:
            raise wrong(f"{path}.name", name, "the name of a tool")
        schema = tool.get("input_schema")
        if not (schema is None or isinstance(schema, Mapping)):
            raise wrong(f"{path}.input_schema", schema, "a JSON schema, which is an object")
        function = {"name": name, "description": _description(tool), "parameters": schema or {"type": "object"}}
        function |= {"strict": True} if flag(f"{path}.strict", tool.get("strict")) else {}
        functions.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})
    return functions


def _description(tool: Mapping[str, Any]) -> Any:
    """The description of a tool, with the examples of its input."""
    description, examples = tool.get("description"), tool.get("input_examples")
    return f"{description or ''}\nExamples of its input: {json.dumps(examples)}".lstrip() if examples else description


def _tool_choice(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    kind, name = given.get("type"), given.get("name")
    alone = flag("tool_choice.disable_parallel_tool_use", given.get("disable_parallel_tool_use"))
    chat: dict[str, Any] = {"parallel_tool_calls": False} if alone else {}
    if kind == "tool":
        if name not in names:
            raise wrong("tool_choice.name", name, f"one of {', '.join(names)}" if names else "tools beside it")
        return chat | {"tool_choice": {"type": "function", "function": {"name": name}}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise wrong("tool_choice.type", kind, '"auto", "any", "tool" or "none"')
    return chat | {"tool_choice": CHOICES[kind]}


def _format(path: str, given: Any) -> dict[str, Any]:
    schema = given.get("schema") if isinstance(given, Mapping) else None
    if not isinstance(schema, Mapping) or given.get("type") != "json_schema":
        raise wrong(path, given, '{"type": "json_schema", "schema": {..}}')
    return {"type": "json_schema", "json_schema": {"schema": schema}}
