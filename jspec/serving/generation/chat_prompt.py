"""The prompt of a chat, which the chat template makes of its messages and tools."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.serving.generation.protocol import ChatFields
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError, flag, require_that, wrong
from jspec.text.detokenizer import TooLong

# Fields of an assistant's message that are not read, and what to send instead.
FORMER = {"function_call": "tool_calls instead of it", "audio": "content, which is text"}
MAX_KWARG = 256  # characters of a text for the template


def prompt_of(service: Service, request: ChatFields, kept: int | None = None) -> list[int]:
    """The tokens that the chat template makes of a conversation; if it will be cut to its last ``kept`` tokens, at least
    those.

    Raises:
      ApiError: 400; the conversation is malformed or too long, or the template refuses it.
    """
    if not service.chats:
        message = "the model has no chat template: ask /v1/completions, or have the server started with --chat-template"
        raise ApiError(400, message, "messages")
    ends_open = bool(request.continue_final_message)
    adds = not ends_open if request.add_generation_prompt is None else request.add_generation_prompt
    if ends_open and adds:
        raise wrong("continue_final_message", True, "add_generation_prompt=false beside it")
    _require_readable(request.messages)
    _require_calls(request.messages)
    for index, tool in enumerate(request.tools or ()):
        function = tool.get("function", tool)
        if isinstance(function, Mapping):  # what else it is, the template's checks refuse
            flag(f"tools[{index}].function.strict", function.get("strict"))
    try:
        return service.llm.chat_prompt(
            request.messages,
            tools=None if request.tool_choice == "none" else request.tools or None,
            add_generation_prompt=adds,
            continue_final_message=ends_open,
            chat_template=service.chat_template,
            documents=request.documents or None,
            truncate_prompt_tokens=kept,
            **_variables(service, request),
        )
    except TooLong:
        raise service.too_long("messages") from None
    except (ValueError, TypeError) as error:
        field = re.match(r"((?:messages|tools|documents)[\w.\[\]]*)", str(error))
        raise ApiError(400, str(error), field[1] if field else "messages") from None


def _require_readable(messages: Sequence[Any]):
    """Check that no message has its content in OpenAI's former fields, which templates do not read.

    Raises:
      ApiError: 400.
    """
    for index, message in enumerate(messages):
        for name, expected in FORMER.items():
            require_that(message.get(name) is None, f"messages[{index}].{name}", message.get(name), expected)
        role = message.get("role")
        require_that(role != "function", f"messages[{index}].role", role, '"tool", with tool_call_id')


def _require_calls(messages: Sequence[Any]):
    """Check that each result of a tool is one of a call before.

    Raises:
      ApiError: 400.
    """
    called, ids = False, set[Any]()
    for index, message in enumerate(messages):
        role = message.get("role")
        calls = message.get("tool_calls") if role == "assistant" else None
        if isinstance(calls, list) and calls:
            called = True
            ids |= {call.get("id") for call in calls if isinstance(call, Mapping) and isinstance(call.get("id"), str)}
        if role == "tool":
            id = message.get("tool_call_id")
            ok = called and (id is None or not ids or (isinstance(id, str) and id in ids))
            expected = "the id of one of the tool_calls before it"
            require_that(ok, f"messages[{index}].tool_call_id", id, expected)


def _variables(service: Service, request: ChatFields) -> dict[str, Any]:
    """The variables of the template: the server's defaults, those that ``reasoning_effort`` sets, and those of the request
    that the server allows."""
    effort, variables = request.reasoning_effort, request.chat_template_kwargs or {}
    by_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    for name, value in variables.items():
        if name not in service.template_kwargs:
            allowed = ", ".join(service.template_kwargs) or "none"
            message = f"chat_template_kwargs has {name[:64]!r}: expected names among {allowed} (--template-kwargs)"
            raise ApiError(400, message, "chat_template_kwargs")
        ok = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MAX_KWARG)
        expected = f"true, false, a number, or a text of up to {MAX_KWARG} characters"
        require_that(ok, f"chat_template_kwargs.{name}", value, expected)
    return {**service.default_template_kwargs, **by_effort, **variables}
