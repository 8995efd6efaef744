"""Shared steps of completions and chats: settings of a request, the engine's requests, and the response."""

import dataclasses
from collections.abc import Callable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.engine.request import Request
from jspec.sampling.params import SamplingParams
from jspec.serving.generation.protocol import GenerationRequest
from jspec.serving.generation.response import GenerationResponse
from jspec.serving.generation.sampling import num_choices, of_value_error, params_of
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import Tenant, tenant_of
from jspec.serving.http.errors import ApiError, require_that
from jspec.serving.http.streaming import EventStream, while_connected

PRIORITIES = 2**31
SMALL = 2000  # tokens and log-probabilities of a response that the event loop renders itself, in some milliseconds


@dataclasses.dataclass(frozen=True)
class RequestSettings:
    """What holds for all prompts of a request.

    Attributes:
      service: the model and its settings.
      request: the fields of the request.
      copies: the sampling parameters of each completion of a prompt.
      priority: lower numbers go first.
      salt: only requests with the same salt share cached pages.
      tenant: the name of who has sent it.
    """

    service: Service
    request: GenerationRequest
    copies: Sequence[SamplingParams]
    priority: int
    salt: str
    tenant: str

    @classmethod
    def of(
        cls,
        service: Service,
        request: GenerationRequest,
        num_prompts: int,
        tenant: Tenant,
        defaults: SamplingParams | None = None,
    ) -> "RequestSettings":
        """The settings of a request, checked. What it leaves open comes from ``defaults``, or else from the checkpoint.

        Raises:
          ApiError: 400.
        """
        limits, priority, salt = service.limits, request.priority or 0, request.cache_salt
        count = num_choices(request, num_prompts, limits, service.room)
        params = params_of(request, defaults or service.llm.default_sampling_params, limits)
        ok, most = salt is None or 1 <= len(salt) <= limits.max_cache_salt, limits.max_cache_salt
        require_that(ok, "cache_salt", salt, f"1 to {most} characters (--max-cache-salt)")
        alone = "0; the server was not started with --scheduling-policy priority"
        require_that(service.priorities or not priority, "priority", priority, alone)
        require_that(-PRIORITIES <= priority < PRIORITIES, "priority", priority, "an integer in -2^31..2^31 - 1")
        copies = dataclasses.replace(params, n=count // num_prompts).copies()
        return cls(service, request, copies, priority, service.keys.salt(tenant.key, salt), tenant.name)

    def requests(self, prompt: Sequence[int], name: str) -> list[Request]:
        """The engine's requests for the completions of one prompt, called ``name`` in error messages.

        Raises:
          ApiError: 400; the prompt has no token, or leaves no room for a new one, or a value cannot be served.
        """
        if self.request.truncate_prompt_tokens is None:
            if not prompt:
                raise ApiError(400, f"{name} is empty: expected at least one token", name)
            if len(prompt) >= self.service.max_len:
                raise self.service.too_long(name, len(prompt))
        try:
            return self.service.requests(prompt, self.copies, self.priority, self.salt, self.tenant)
        except (ValueError, TypeError) as error:
            raise of_value_error(error, self.request, name) from None


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
        checked = settings if isinstance(settings, RequestSettings) else await service.prepare(settings)
        try:
            grammar = await service.grammar(checked.copies[0].structured_outputs)
        except ValueError as error:
            raise of_value_error(error, request) from None
        prepared = await service.prepare(lambda: prepare(checked))
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
