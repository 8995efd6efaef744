"""What completions and chat answers have in common on their way from a client's fields to the engine and back."""

import dataclasses
from collections.abc import Callable, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from jspec.engine.request import Request
from jspec.sampling.params import SamplingParams
from jspec.serving.openai.errors import require_that, wrong
from jspec.serving.openai.protocol import GenerationRequest
from jspec.serving.openai.responses import Answer
from jspec.serving.openai.sampling import num_choices, of_value_error, params_of
from jspec.serving.openai.service import Service
from jspec.serving.openai.streaming import EventStream, while_there

PRIORITIES = 2**31


def tenant_of(http: HttpRequest) -> bytes:
    """Which API key a request came with: what the gate found."""
    return http.scope["state"]["tenant"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a request says of all its prompts.

    Attributes:
      copies: how each completion of a prompt is sampled.
      priority: lower numbers go first.
      salt: only requests with the same one share cached pages.
    """

    copies: Sequence[SamplingParams]
    priority: int
    salt: str


def settings_of(service: Service, asked: GenerationRequest, num_prompts: int, tenant: bytes) -> Settings:
    """The settings of a request, checked.

    Raises:
      ApiError: 400.
    """
    count = num_choices(asked, num_prompts, service.limits, service.room)
    params = params_of(asked, service.llm.default_sampling_params, service.limits)
    copies = dataclasses.replace(params, n=count // num_prompts).copies()
    return Settings(copies, _priority(service, asked.priority), _salt(service, asked.cache_salt, tenant))


def requests_of(
    service: Service, asked: GenerationRequest, settings: Settings, prompt: Sequence[int], name: str
) -> list[Request]:
    """The engine's requests for the completions of one prompt, which messages call ``name``.

    Raises:
      ApiError: 400.
    """
    if asked.truncate_prompt_tokens is None:
        service.require_context(prompt, name)
    try:
        return service.requests(prompt, settings.copies, settings.priority, settings.salt)
    except (ValueError, TypeError) as error:
        raise of_value_error(error, asked, name) from None


async def answered(
    service: Service, http: HttpRequest, asked: GenerationRequest, settings: Settings, prepare: Callable[[], Answer]
) -> Response:
    """Answer a request, at once or in a stream, as long as its client is there.

    Args:
      prepare: makes the answer with its requests; another thread calls it, because prompts may be long.

    Raises:
      ApiError: it cannot be served.
      ClientDisconnect: the client left.
    """

    async def answer() -> Response:
        service.require_room()  # before work goes into it
        try:
            grammar = await service.grammar(settings.copies[0].structured_outputs)
        except ValueError as error:
            raise of_value_error(error, asked) from None
        prepared = await service.prepare(prepare)
        del grammar  # the requests have it
        group = service.start(prepared.requests)
        if prepared.asked.stream:
            return EventStream(prepared.events(group), group.close)
        try:
            return JSONResponse(await prepared.whole(group))
        finally:
            group.close()

    return await while_there(http.receive, answer())


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
