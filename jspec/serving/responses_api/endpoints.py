"""``/v1/responses``: the endpoints."""

import functools
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.engine.request import Request
from jspec.serving.generation.chat_turn import ChatTurn
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.protocol import ChatRequest, parsed, read_fields, unread
from jspec.serving.generation.response_store import Stored
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import tenant_of
from jspec.serving.http.errors import ApiError, renaming, shown, wrong
from jspec.serving.http.streaming import json_of
from jspec.serving.responses_api.conversation import Conversation
from jspec.serving.responses_api.protocol import PASSED_ON, UNSUPPORTED, WITHOUT_EFFECT, ResponsesRequest
from jspec.serving.responses_api.response import PREFIX, ResponsesResponse
from jspec.serving.responses_api.tools import Tools, choice_of

log = logging.getLogger("jspec.serve")

# Names of a chat's fields -> those of this endpoint.
NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "reasoning_effort": "reasoning.effort"}
NAMES |= {"messages": "input"}


async def responses(service: Service, http: HttpRequest) -> Response:
    """The response to a request."""
    with renaming(NAMES):
        tenant = tenant_of(http)
        body = await read_object(service, http)
        asked = await service.prepare(lambda: _read(service, http, body, tenant.key))  # items may be many
        request, chat, tools, conversation = asked
        model = service.require_model(request.model)
        turn = ChatTurn(service, chat, tenant)

        def make(requests: list[Request]) -> ResponsesResponse:
            own_id, before = uuid.uuid4().hex, json_of(conversation)  # several requests may have one ``x-request-id``

            def store(response: bytes, message: bytes, items: Mapping[str, bytes]):
                if request.store is not False:
                    messages = (before[:-1] + b"," if conversation else b"[") + message + b"]"
                    service.stored_responses.add(f"{PREFIX}{own_id}", Stored(tenant.key, messages, response, items))

            return ResponsesResponse(turn, model, requests, own_id, request, tools, store)

        return await turn.respond(http, make)


async def stored_response(service: Service, http: HttpRequest) -> Response:
    """A response that was asked for before."""
    stored = _stored(service, http.path_params["id"], tenant_of(http).key, None)
    return Response(stored.response, media_type="application/json")


async def forget_response(service: Service, http: HttpRequest) -> Response:
    """Forget a response."""
    id = http.path_params["id"]
    _stored(service, id, tenant_of(http).key, None)
    service.stored_responses.remove(id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


def _read(
    service: Service, http: HttpRequest, body: dict[str, Any], tenant: bytes
) -> tuple[ResponsesRequest, ChatRequest, Tools, list[dict[str, Any]]]:
    """The request, the chat that asks for the same, the tools, and the conversation without instructions, which do not stay
    for the next response."""
    request = read_fields(ResponsesRequest, body, service.most_entries)
    if request.background:
        raise wrong("background", True, "false; jspec answers while the client waits")
    if (request.prompt_cache_options or {}).get("prewarm"):
        raise wrong("prompt_cache_options.prewarm", True, "false; a request for one token fills the cache, too")
    tools, before = Tools(request.tools or []), []
    if request.previous_response_id is not None:
        stored = _stored(service, request.previous_response_id, tenant, "previous_response_id")
        before = json.loads(stored.messages)
    items = functools.partial(_stored_item, service, tenant)
    conversation = Conversation(before, tools, items)
    conversation.add(request.input)
    instructions = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat = {"messages": [*instructions, *conversation.messages], "max_tokens": request.max_output_tokens}
    chat |= {name: getattr(request, name) for name in ("stream", "temperature", "top_p", "parallel_tool_calls")}
    chat |= {name: value for name, value in (request.model_extra or {}).items() if name in PASSED_ON}
    if tools.functions:
        chat |= {"tools": tools.functions, "tool_choice": choice_of(request.tool_choice, tools)}
    elif request.tool_choice not in (None, "auto", "none"):
        raise wrong("tool_choice", request.tool_choice, "tools beside it")
    effort = (request.reasoning or {}).get("effort")
    chat |= ({} if effort is None else {"reasoning_effort": effort}) | _format(request)
    left_out = [*tools.left_out, *unread(request, {*WITHOUT_EFFECT, *PASSED_ON}, UNSUPPORTED)][:8]
    if left_out:
        log.info("%s: ignored %s", http.url.path, ", ".join(left_out))
    return request, parsed(ChatRequest, chat, service.most_entries), tools, conversation.messages


def _format(request: ResponsesRequest) -> dict[str, Any]:
    form = (request.text or {}).get("format")
    if form is None or form == {"type": "text"}:
        return {}
    if form == {"type": "json_object"}:
        return {"response_format": form}
    if isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("schema"), dict):
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["schema"]}}}
    kinds = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": "..", "schema": {..}}'
    raise wrong("text.format", form, kinds)


def _stored(service: Service, id: str, tenant: bytes, param: str | None) -> Stored:
    stored = service.stored_responses.get(id, tenant)
    if stored is None:
        message = f"there is no response {shown(id)}: expected one of the newest, of this key, with store=true"
        raise ApiError(404, message, param, "response_not_found")
    return stored


def _stored_item(service: Service, tenant: bytes, path: str, id: str) -> dict[str, Any]:
    """An item of the output of a stored response."""
    item = service.stored_responses.item(id, tenant)
    if item is None:
        message = f"{path}.id={shown(id)}: there is no such item; expected that of a new response with store=true"
        raise ApiError(404, message, f"{path}.id", "item_not_found")
    return item
