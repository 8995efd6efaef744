"""Shared steps of completions and chats: settings of a request, the engine's requests, and the response."""

import contextlib
import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.engine.request import Request
from jspec.sampling.params import SamplingParams
from jspec.serving.generation.protocol import GenerationRequest
from jspec.serving.generation.response import GenerationResponse
from jspec.serving.generation.sampling import num_choices, of_value_error, params_of
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError, require_that, wrong
from jspec.serving.http.streaming import EventStream, while_connected

PRIORITIES = 2**31
SMALL = 2000  # tokens and log-probabilities of a response that the event loop renders itself, in some milliseconds


class Tenant(NamedTuple):
    """Who has sent a request.

    Attributes:
      key: the digest of its API key, which the middleware has stored; empty if none is needed.
      name: of those who take turns: the key, or else the client's address, of which an IPv6 client has many.
    """

    key: bytes
    name: str


def tenant_of(http: HttpRequest) -> Tenant:
    """Who has sent a request."""
    key = http.scope["state"]["tenant"]
    host = http.client.host if http.client else ""
    with contextlib.suppress(ValueError):
        host = str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host
    return Tenant(key, key.hex() or host)


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """Settings that hold for all prompts of a request.

    Attributes:
      copies: the sampling parameters of each completion of a prompt.
      priority: lower numbers go first.
      salt: only requests with the same salt share cached pages.
      tenant: the name of who has sent it.
    """

    copies: Sequence[SamplingParams]
    priority: int
    salt: str
    tenant: str


def request_settings(service: Service, request: GenerationRequest, num_prompts: int, tenant: Tenant) -> RequestSettings:
    """The settings of a request, checked.

    Raises:
      ApiError: 400.
    """
    count = num_choices(request, num_prompts, service.limits, service.room)
    params = params_of(request, service.llm.default_sampling_params, service.limits)
    copies = dataclasses.replace(params, n=count // num_prompts).copies()
    salt = _salt(service, request.cache_salt, tenant.key)
    return RequestSettings(copies, _priority(service, request.priority), salt, tenant.name)


def requests_of(
    service: Service, request: GenerationRequest, settings: RequestSettings, prompt: Sequence[int], name: str
) -> list[Request]:
    """The engine's requests for the completions of one prompt, called ``name`` in error messages.

    Raises:
      ApiError: 400.
    """
    if request.truncate_prompt_tokens is None:
        service.require_context(prompt, name)
    try:
        requests = service.requests(prompt, settings.copies, settings.priority, settings.salt, settings.tenant)
    except (ValueError, TypeError) as error:
        raise of_value_error(error, request, name) from None
    return requests


def require_bounded(service: Service, requests: Sequence[Request]):
    """Check that a complete response, which is in memory as a whole, has not too many log-probabilities.

    Raises:
      ApiError: 400.
    """
    total = 0
    for request in requests:
        params, length = request.params, len(request.prompt)
        room = service.max_len - length
        new = room if params.max_tokens is None else min(params.max_tokens, room)
        total += 0 if params.logprobs is None else new * (params.logprobs + 1)
        total += 0 if params.prompt_logprobs is None else length * (params.prompt_logprobs + 1)
    if total > (most := service.limits.max_logprob_entries):
        message = (
            f"the response may have {total} log-probabilities: expected at most {most} (--max-logprob-entries); lower "
            "logprobs, max_tokens or n, or stream"
        )
        raise ApiError(400, message, "logprobs")


async def respond(
    service: Service,
    http: HttpRequest,
    request: GenerationRequest,
    settings: RequestSettings | Callable[[], RequestSettings],
    prepare: Callable[[RequestSettings], GenerationResponse],
) -> Response:
    """The response to a request, complete or as a stream. It is cancelled when the client disconnects.

    Args:
      settings: of the engine's requests, or what makes them.
      prepare: makes the response with the engine's requests. Both are called in another thread, because prompts may be
        long.

    Raises:
      ApiError: the request cannot be served.
      ClientDisconnect: the client disconnected.
    """

    async def generate() -> Response:
        service.require_room(tenant_of(http).name)  # before any work
        known = settings if isinstance(settings, RequestSettings) else await service.prepare(settings)
        try:
            grammar = await service.grammar(known.copies[0].structured_outputs)
        except ValueError as error:
            raise of_value_error(error, request) from None
        prepared = await service.prepare(lambda: prepare(known))
        if not request.stream:
            require_bounded(service, prepared.requests)
        del grammar  # the requests hold it
        group = service.start(prepared.requests)
        if request.stream:
            return EventStream(prepared.events(group), group.close)
        try:
            await prepared.collect(group)
        finally:
            group.close()
        if prepared.num_entries <= SMALL:
            return JSONResponse(prepared.complete())
        return await service.prepare(lambda: JSONResponse(prepared.complete()))

    return await while_connected(http.receive, generate())


def _priority(service: Service, priority: int | None) -> int:
    given = priority or 0
    if given and not service.priorities:
        raise wrong("priority", given, "0; the server was not started with --scheduling-policy priority")
    require_that(-PRIORITIES <= given < PRIORITIES, "priority", given, "an integer in -2^31..2^31 - 1")
    return given


def _salt(service: Service, cache_salt: str | None, tenant: bytes) -> str:
    most = service.limits.max_cache_salt
    ok = cache_salt is None or 1 <= len(cache_salt) <= most
    require_that(ok, "cache_salt", cache_salt, f"1 to {most} characters (--max-cache-salt)")
    return service.keys.salt(tenant, cache_salt)
