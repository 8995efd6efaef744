"""``/v1/chat/completions``: the endpoint and its response."""

import json
import re
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec.outputs import Delta, Result
from jspec.sampling.structured import StructuredOutputsParams
from jspec.serving.openai.chat_output import ChatFormat, ChatOutput
from jspec.serving.openai.errors import ApiError, require_that, wrong
from jspec.serving.openai.header_checks import request_id_of
from jspec.serving.openai.json_body import read_object
from jspec.serving.openai.logprobs import chat_logprobs, prompt_logprobs
from jspec.serving.openai.protocol import ChatFields, ChatRequest, parsed
from jspec.serving.openai.responses import GenerationResponse
from jspec.serving.openai.service import Service
from jspec.serving.openai.serving_base import request_settings, requests_of, respond, tenant_of
from jspec.serving.openai.tool_choice import ToolChoice, choice_of, forced_schema
from jspec.text.detokenizer import TooLong

MAX_KWARG = 256  # characters of a text for the template


async def chat(service: Service, http: HttpRequest) -> Response:
    """The response to a request for the next message of a chat."""
    request = parsed(ChatRequest, await read_object(service, http), service.most_entries)
    model = service.require_model(request.model)
    special = request.add_special_tokens
    require_that(not special, "add_special_tokens", special, "false; the chat template writes special tokens itself")
    choice = choice_of(request)
    if choice.kind == "none":
        request.tools = None
    if choice.is_forced:
        _force(service, request, choice)
    output = service.chat_format(choice, request.tools)
    if output is not None:
        request.skip_special_tokens = False  # markers of calls and reasoning may be special tokens

    settings = request_settings(service, request, 1, tenant_of(http))

    def prepare() -> ChatResponse:
        requests = requests_of(
            service, request, settings, prompt_of(service, request, request.truncate_prompt_tokens), "messages"
        )
        return ChatResponse(service, request, model, requests, len(requests), request_id_of(http.scope), choice, output)

    return await respond(service, http, request, settings, prepare)


def _force(service: Service, request: ChatRequest, choice: ToolChoice):
    """Have a grammar make the model call a tool.

    Raises:
      ApiError: 400; the request has a form of its own, or the tools make a grammar that is too large.
    """
    for name in ("response_format", "structured_outputs"):
        given = getattr(request, name)
        require_that(
            not given or given == {"type": "text"}, name, given, "nothing beside a tool_choice that forces calls"
        )
    schema = json.dumps(forced_schema(request.tools or [], choice))
    most = service.limits.max_grammar_bytes
    if len(schema) > most:
        message = f"tools are {len(schema)} characters as a grammar: expected at most {most} (--max-grammar-bytes)"
        raise ApiError(400, message, "tools")
    try:
        request._forced = StructuredOutputsParams(json=schema)
    except (ValueError, TypeError) as error:
        raise ApiError(400, str(error).replace("structured_outputs", "tools", 1), "tools") from None


def prompt_of(service: Service, request: ChatFields, kept: int | None = None) -> list[int]:
    """The tokens that the chat template makes of a conversation; if it will be cut to its last ``kept`` tokens, at least
    those.

    Raises:
      ApiError: 400; the conversation is malformed or too long, or the template refuses it.
    """
    ends_open = bool(request.continue_final_message)
    adds = not ends_open if request.add_generation_prompt is None else request.add_generation_prompt
    if ends_open and adds:
        raise wrong("continue_final_message", True, "add_generation_prompt=false beside it")
    try:
        return service.llm.chat_prompt(
            request.messages,
            tools=request.tools or None,
            add_generation_prompt=adds,
            continue_final_message=ends_open,
            chat_template=service.chat_template,
            documents=request.documents or None,
            truncate_prompt_tokens=kept,
            **_template_variables(service, request),
        )
    except TooLong:
        raise service.too_long("messages") from None
    except (ValueError, TypeError) as error:
        field = re.match(r"((?:messages|tools|documents)[\w.\[\]]*)", str(error))
        raise ApiError(400, str(error), field[1] if field else "messages") from None


def _template_variables(service: Service, request: ChatFields) -> dict[str, Any]:
    """The variables of the template: the server's defaults, then what ``reasoning_effort`` stands for, then the request's."""
    effort = getattr(request, "reasoning_effort", None)
    by_effort = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    given = _template_kwargs(service, request.chat_template_kwargs or {})
    return {**service.default_template_kwargs, **by_effort, **given}


def _template_kwargs(service: Service, given: dict[str, Any]) -> dict[str, Any]:
    """The template variables of a request, checked against those that the server allows."""
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


class ChatResponse(GenerationResponse):
    """The response of ``/v1/chat/completions``."""

    prefix, complete_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        request: ChatRequest,
        model: str,
        requests,
        n: int,
        request_id: str,
        choice: ToolChoice,
        output: ChatFormat | None,
    ):
        super().__init__(service, request, model, requests, n, request_id)
        self._top = (request.top_logprobs or 0) if request.logprobs else None
        self._choice, self._deltas = choice, dict[int, dict[str, Any]]()
        shows = request.include_reasoning is not False
        outputs = [] if output is None else [output.parser(request.prompt) for request in requests]
        self._outputs = [ChatOutput(parser, choice.several, shows) for parser in outputs]

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        text, fields = result.text or "", {"content": result.text or ""}
        if self._outputs:
            fields = self._outputs[index].message(text, result.token_ids)
        return {
            "index": index,
            "message": {"role": "assistant", **fields, "refusal": None},
            "logprobs": self._logprobs(result),
            **self._ending(index, result),
            **self.details(result, index),
        }

    def shown(self, index: int, delta: Delta) -> Delta:
        if self._outputs and self.request.stream:
            self._deltas[index] = self._outputs[index].add(delta.text or "", delta.token_ids, delta.finished)
        return delta

    def has_text(self, index: int, delta: Delta) -> bool:
        return bool(self._deltas.get(index)) if self._outputs else bool(delta.text)

    def opening(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        opening = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": opening, "logprobs": None, **self.ending(None)}]

    def chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": self._deltas[index] if self._outputs else {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta),
            **self._ending(index, delta.result),
            **self.details(delta, index),
        }

    def _ending(self, index: int, result: Result | None) -> dict[str, Any]:
        """As ``ending``, where a message that ended by itself ended with its calls, unless one was forced by name."""
        ending = self.ending(result)
        calls = self._outputs[index].num_calls if self._outputs else 0
        if calls and self._choice.kind != "named" and ending["finish_reason"] == "stop":
            return {**ending, "finish_reason": "tool_calls"}
        return ending

    def extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        first = self._results[0]
        if self.request.return_token_ids:
            extras["prompt_token_ids"] = first.prompt_token_ids
        places = first.prompt_logprobs
        if self.request.prompt_logprobs is not None and places is not None:
            extras["prompt_logprobs"] = prompt_logprobs(places)
        return extras

    def _logprobs(self, output: Delta | Result) -> dict[str, Any] | None:
        places = output.logprobs
        if places is None or self._top is None:
            return None
        return chat_logprobs(output.token_ids, places, self._top, self.service.token_bytes)
