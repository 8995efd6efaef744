"""``/v1/chat/completions``."""

import re
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec.outputs import Delta, Result
from jspec.serving.openai.errors import ApiError, require_that, wrong
from jspec.serving.openai.json_body import read_object
from jspec.serving.openai.logprobs import chat_logprobs, prompt_logprobs
from jspec.serving.openai.protocol import ChatFields, ChatRequest, parsed
from jspec.serving.openai.responses import Answer
from jspec.serving.openai.service import Service
from jspec.serving.openai.serving_base import answered, requests_of, settings_of, tenant_of

MAX_KWARG = 256  # characters of a text for the template


async def chat(service: Service, http: HttpRequest) -> Response:
    """Answer a request for the next message of a chat."""
    asked = parsed(ChatRequest, await read_object(service, http), service.most_entries)
    model = service.require_model(asked.model)
    choice = asked.tool_choice
    require_that(choice in (None, "none", "auto"), "tool_choice", choice, '"none" or "auto"; no call can be forced')
    special = asked.add_special_tokens
    require_that(not special, "add_special_tokens", special, "false; the chat template writes special tokens itself")
    if choice == "none":
        asked.tools = None

    settings = settings_of(service, asked, 1, tenant_of(http))

    def prepare() -> ChatAnswer:
        requests = requests_of(
            service, asked, settings, prompt_of(service, asked, asked.truncate_prompt_tokens), "messages"
        )
        return ChatAnswer(asked, model, requests, service.llm.tokenizer, len(requests))

    return await answered(service, http, asked, settings, prepare)


def prompt_of(service: Service, asked: ChatFields, kept: int | None = None) -> list[int]:
    """The tokens that the chat template makes of a conversation; of one that will be cut to its last ``kept`` tokens, at
    least those.

    Raises:
      ApiError: 400; the conversation is malformed or too long, or the template refuses it.
    """
    ends_open = bool(asked.continue_final_message)
    adds = not ends_open if asked.add_generation_prompt is None else asked.add_generation_prompt
    if ends_open and adds:
        raise wrong("continue_final_message", True, "add_generation_prompt=false beside it")
    try:
        return service.llm.chat_prompt(
            asked.messages,
            tools=asked.tools or None,
            add_generation_prompt=adds,
            continue_final_message=ends_open,
            chat_template=service.chat_template,
            documents=asked.documents or None,
            truncate_prompt_tokens=kept,
            **_template_kwargs(service, asked.chat_template_kwargs or {}),
        )
    except (ValueError, TypeError) as error:
        found = re.match(r"((?:messages|tools|documents)[\w.\[\]]*)", str(error))
        raise ApiError(400, str(error), found[1] if found else "messages") from None


def _template_kwargs(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """Those of a request, all of which the operator allows."""
    for name, value in given.items():
        if name not in service.template_kwargs:
            allowed = ", ".join(service.template_kwargs) or "none"
            message = f"chat_template_kwargs has {name[:64]!r}: expected names among {allowed} (--template-kwargs)"
            raise ApiError(400, message, "chat_template_kwargs")
        ok = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= MAX_KWARG)
        require_that(
            ok, "chat_template_kwargs", value, f"true, false, numbers, or texts of up to {MAX_KWARG} characters"
        )
    return given


class ChatAnswer(Answer):
    """The answer of ``/v1/chat/completions``."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, model: str, requests, tokenizer, n: int):
        super().__init__(asked, model, requests, tokenizer, n)
        self._top = (asked.top_logprobs or 0) if asked.logprobs else None

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": result.text or "", "refusal": None},
            "logprobs": self._logprobs(result),
            **self.ending(result),
            **self.details(result, index),
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, **self.ending(None)}]

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta),
            **self.ending(delta.result),
            **self.details(delta, index),
        }

    def extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        first = self._results[0]
        if self.asked.return_token_ids:
            extras["prompt_token_ids"] = first.prompt_token_ids
        places = first.prompt_logprobs
        if self.asked.prompt_logprobs is not None and places is not None:
            extras["prompt_logprobs"] = prompt_logprobs(places)
        return extras

    def _logprobs(self, told: Delta | Result) -> dict[str, Any] | None:
        places = told.logprobs
        return None if places is None or self._top is None else chat_logprobs(told.token_ids, places, self._top)
