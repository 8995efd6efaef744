"""``/inference/v1/generate``, vLLM's: token ids in, token ids and their log-probabilities out.

Trainers of agents call it, which render and tokenise conversations by themselves: text that is decoded and encoded again
need not have the tokens that were sampled. A request becomes one for a completion, and shares everything with it.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec.outputs import Delta, Result
from jspec.sampling.params import SamplingParams
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.protocol import Body, CompletionRequest, StreamOptions, parsed
from jspec.serving.generation.respond import RequestSettings, respond
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import tenant_of
from jspec.serving.http.errors import ApiError, renaming, require_that
from jspec.serving.http.headers import request_id_of
from jspec.serving.openai.choice_response import ChoiceResponse
from jspec.serving.openai.completions import token_ids_of
from jspec.serving.openai.logprobs import id_logprobs, prompt_logprobs

# Fields of a completion that stand in ``sampling_params`` here, and their names in errors.
NAMES = {
    field.name: f"sampling_params.{field.name}"
    for field in dataclasses.fields(SamplingParams)
    if field.name in CompletionRequest.model_fields
}
# What vLLM's have beside them, and what changes no token: there is no text, and no experts come back.
WITHOUT_EFFECT = {"detokenize", "flat_logprobs", "output_kind", "routed_experts_prompt_start"}


class GenerateRequest(Body):
    """``/inference/v1/generate``: what is not in ``sampling_params``. Ids are checked with those of other prompts."""

    token_ids: list[Any]
    sampling_params: dict[str, Any] | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None


async def generate(service: Service, http: HttpRequest) -> Response:
    """The response to a request for completions of one prompt of token ids.

    What ``sampling_params`` leave open is as ``SamplingParams`` have it, whatever the checkpoint says, so that a trainer
    knows of which distribution the tokens are; ``max_tokens`` is the rest of the context.
    """
    asked = parsed(GenerateRequest, await read_object(service, http), service.most_entries)
    model = service.require_model(asked.model)
    with renaming(NAMES):
        request = _completion_of(service, asked)
        prompt = token_ids_of(service, request, "token_ids", asked.token_ids)
        defaults = SamplingParams(detokenize=bool(request.stop))
        settings = RequestSettings.of(service, request, 1, tenant_of(http), defaults)

        def prepare(settings: RequestSettings) -> TokensResponse:
            requests, request_id = settings.requests(prompt, "token_ids"), asked.request_id or request_id_of(http.scope)
            return TokensResponse(service, request, model, requests, request_id, len(requests))

        return await respond(service, http, request, settings, prepare)


def _completion_of(service: Service, asked: GenerateRequest) -> CompletionRequest:
    """The request for a completion that asks for the same, without its prompt.

    Raises:
      ApiError: 400; a field is wrong, unknown, or not one of ``sampling_params``.
    """
    given = {name: value for name, value in (asked.sampling_params or {}).items() if name not in WITHOUT_EFFECT}
    for name in given:
        if name in CompletionRequest.model_fields and name not in NAMES:
            raise ApiError(400, f"unknown field 'sampling_params.{name}': leave it out", f"sampling_params.{name}")
    request = parsed(CompletionRequest, {"max_tokens": None, **given}, service.most_entries)
    whole = not (asked.stream and asked.return_token_ids)
    require_that(whole, "return_token_ids", True, "stream=false beside it")
    beside = ("stream", "stream_options", "priority", "cache_salt", "return_token_ids")
    return request.model_copy(update={name: getattr(asked, name) for name in beside})


class TokensResponse(ChoiceResponse):
    """The response of ``/inference/v1/generate``, complete or as chunks."""

    content = "token_ids"

    def head(self, streamed: bool) -> dict[str, Any]:
        del streamed
        return {"request_id": self.request_id, "created": self.created, "model": self.model}

    def whole(self, index: int, result: Result) -> dict[str, Any]:
        del index
        return {"token_ids": result.token_ids}

    def shown(self, index: int, delta: Delta) -> list[int]:
        del index
        return delta.token_ids

    def opening_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        del index, delta
        return []

    def logprobs(self, index: int, output: Delta | Result) -> dict[str, Any] | None:
        wanted = self.requests[index].params.logprobs is not None
        return id_logprobs(output.token_ids, output.logprobs or ()) if wanted else None

    def details(self, index: int, output: Delta | Result) -> dict[str, Any]:
        del index
        result = output.result if isinstance(output, Delta) else output
        return {} if result is None else {"weight_versions": list(_spans(result))}

    def extras(self) -> dict[str, Any]:
        places, prompt = self.results[0].prompt_logprobs, self.results[0].prompt_token_ids
        extras: dict[str, Any] = {"prompt_logprobs": None if places is None else prompt_logprobs(places)}
        return extras | ({"prompt_token_ids": prompt} if self.request.return_token_ids else {})


def _spans(result: Result) -> Iterable[dict[str, Any]]:
    """The versions of the weights that a completion is of: each with its first token, and the one behind its last."""
    ends = [start for _, start in result.weights_versions[1:]] + [len(result.token_ids)]
    for (version, start), end in zip(result.weights_versions, ends, strict=False):  # without tokens there is none
        yield {"version": version, "start": start, "end": end}
