"""``/v1/messages`` and ``/v1/messages/count_tokens``: the endpoints."""

import logging
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.serving.anthropic import protocol
from jspec.serving.anthropic.conversation import NAMES, chat_of
from jspec.serving.anthropic.protocol import CountTokensRequest, MessagesRequest
from jspec.serving.anthropic.response import MessageResponse
from jspec.serving.generation.chat_prompt import prompt_of
from jspec.serving.generation.chat_turn import ChatTurn
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.protocol import ChatRequest, parsed, read_fields, unread
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import tenant_of
from jspec.serving.http.errors import ApiError, renaming, shown
from jspec.serving.http.headers import request_id_of

log = logging.getLogger("jspec.serve")

R = TypeVar("R", bound=CountTokensRequest)


async def messages(service: Service, http: HttpRequest) -> Response:
    """The response to a request for the next message."""
    with renaming(NAMES):
        request, chat, model = await _read(service, http, MessagesRequest)
        turn, request_id = ChatTurn(service, chat, tenant_of(http)), request_id_of(http.scope)
        shows = (request.thinking or {}).get("type") != "disabled"
        return await turn.respond(http, lambda requests: MessageResponse(turn, model, requests, request_id, shows))


async def count_tokens(service: Service, http: HttpRequest) -> Response:
    """How many tokens the prompt of a request has."""
    with renaming(NAMES):
        _, chat, _ = await _read(service, http, CountTokensRequest)
        return JSONResponse({"input_tokens": len(await service.prepare(lambda: prompt_of(service, chat)))})


async def _read(service: Service, http: HttpRequest, kind: type[R]) -> tuple[R, ChatRequest, str]:
    """The request, the chat that asks for the same, and the model's name."""
    body = await read_object(service, http)
    request = read_fields(kind, body, service.most_entries)
    model = service.require_model(request.model)
    if request.thread is not None:
        message = f"thread={shown(request.thread)} is not supported: jspec stores no messages; send all of them"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # upon which SDKs do so
        raise ApiError(400, message, "thread", details=details)
    fields, left_out = await service.prepare(lambda: chat_of(request))  # blocks may be many
    left_out += unread(request, {*protocol.WITHOUT_EFFECT, *protocol.PASSED_ON}, protocol.UNSUPPORTED)
    if left_out:
        log.info("%s: ignored %s", http.url.path, ", ".join(left_out))
    if not fields["tools"]:
        del fields["tools"]
    if service.reasoning_parser is None:  # then nothing is known to be thinking
        fields.pop("thinking_token_budget", None)
    return request, parsed(ChatRequest, fields, service.most_entries), model
