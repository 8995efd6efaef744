"""``/v1/completions``: the endpoint and its response."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec.outputs import Delta, Result
from jspec.serving.generation.json_body import read_object
from jspec.serving.generation.protocol import CompletionRequest, parsed
from jspec.serving.generation.respond import RequestSettings, respond
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import tenant_of
from jspec.serving.http.errors import ApiError, require_that, wrong
from jspec.serving.http.headers import request_id_of
from jspec.serving.openai.choice_response import ChoiceResponse
from jspec.serving.openai.logprobs import TextOffsets, completion_logprobs, prompt_logprobs
from jspec.text.detokenizer import COUNTED_CONTEXTS


async def completions(service: Service, http: HttpRequest) -> Response:
    """The response to a request for completions of one or several prompts."""
    request = parsed(CompletionRequest, await read_object(service, http), service.most_entries)
    model = service.require_model(request.model)
    prompts = _prompts(service, request)
    whole = request.truncate_prompt_tokens is None  # else the text is that of the remaining tokens
    texts = [prompt if whole and isinstance(prompt, str) else None for prompt in prompts]
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]

    settings = RequestSettings.of(service, request, len(prompts), tenant_of(http))

    def prepare(settings: RequestSettings) -> CompletionResponse:
        requests = []
        for prompt, name in zip(prompts, names, strict=True):
            if isinstance(prompt, str):
                special = request.add_special_tokens is not False
                prompt = service.encoded(prompt, name, special, request.truncate_prompt_tokens)
            requests += settings.requests(prompt, name)
        n, request_id = len(settings.copies), request_id_of(http.scope)
        return CompletionResponse(service, request, model, requests, request_id, n, texts)

    require_that(
        not (request.echo and service.llm.tokenizer is None), "echo", True, "false; the model has no tokenizer"
    )
    return await respond(service, http, request, settings, prepare)


class CompletionResponse(ChoiceResponse):
    """The response of ``/v1/completions``.

    Args:
      service, request, model, requests, request_id, n: as of ``ChoiceResponse``.
      texts: the prompts' texts; None for prompts that are known as token ids alone.
    """

    prefix, complete_object, chunk_object, content = "cmpl", "text_completion", "text_completion", "text"

    def __init__(self, service: Service, request: CompletionRequest, model, requests, request_id, n, texts):
        super().__init__(service, request, model, requests, request_id, n)
        self._texts, self._echo, self._prompt_alone = texts, bool(request.echo), request.wants_prompt_alone
        self._top, self._offsets = request.logprobs, dict[int, TextOffsets]()

    def whole(self, index: int, result: Result) -> dict[str, Any]:
        return {"text": (self._prompt_text(index) if self._echo else "") + (result.text or "")}

    def details(self, index: int, output: Delta | Result) -> dict[str, Any]:
        details = super().details(index, output)
        if isinstance(output, Delta):
            return details
        if self.request.prompt_logprobs is not None and output.prompt_logprobs is not None:
            details["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        if self.request.return_token_ids:
            details["prompt_token_ids"] = output.prompt_token_ids
        return details

    def opening_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        text = self._prompt_text(index) if self._echo else ""
        self._offsets[index] = self._text_offsets(index, self.requests[index].prompt, len(text))
        if not text and not self.request.return_token_ids:
            return []
        logprobs = self._of_prompt(index, delta.prompt_logprobs) if self._echo else None
        choice = {"index": index, "text": text, "logprobs": logprobs, **self.ending(index, None)}
        if self.request.return_token_ids:
            choice.update(prompt_token_ids=list(self.requests[index].prompt), token_ids=[])
        return [choice]

    def shown(self, index: int, delta: Delta) -> str:
        return delta.text or ""

    def take(self, index: int, delta: Delta) -> Delta:
        """Without the token that was drawn because there has to be one, if only the prompt is wanted."""
        if self._prompt_alone:
            nothing: dict[str, Any] = {"token_ids": [], "sources": [], "text": None if delta.text is None else ""}
            if delta.logprobs is not None:
                nothing["logprobs"] = []
            result = delta.result
            if result is not None:
                result = dataclasses.replace(result, finish_reason="length", stop_reason=None, **nothing)
            delta = dataclasses.replace(delta, result=result, **nothing)
        return super().take(index, delta)

    def logprobs(self, index: int, output: Delta | Result) -> dict[str, Any] | None:
        if output.logprobs is None or self._top is None:
            return None
        before, offsets = None, self._offsets.get(index)
        if isinstance(output, Result):
            before = self._of_prompt(index, output.prompt_logprobs) if self._echo else None
            start = len(self._prompt_text(index)) if self._echo else 0
            offsets = self._text_offsets(index, output.prompt_token_ids, start)
        assert offsets is not None, "a chunk comes after the opening one"
        new = completion_logprobs(output.token_ids, output.logprobs, self._top, offsets.add(output.token_ids))
        return new if before is None else {name: before[name] + new[name] for name in new}

    def _of_prompt(self, index: int, places: Sequence[Any] | None) -> dict[str, Any] | None:
        """The log-probabilities of the prompt's tokens."""
        if places is None or self._top is None:
            return None
        tokens, length = self.requests[index].prompt, len(self._prompt_text(index))
        offsets = [min(offset, length) for offset in self._text_offsets(index).add(tokens)]
        return completion_logprobs(tokens, places, self._top, offsets, lambda token: self.service.decoded([token]))

    def _text_offsets(self, index: int, prompt: Sequence[int] = (), start: int = 0) -> TextOffsets:
        """Counts the characters of a choice's text.

        Args:
          prompt: tokens before the text.
          start: characters before its first token.
        """
        if self.service.llm.tokenizer is None:
            return TextOffsets(None, prompt, start)
        shown = not self.requests[index].params.skip_special_tokens
        return TextOffsets(functools.partial(self.service.decoded, special=shown), prompt, start)

    def _prompt_text(self, index: int) -> str:
        text = self._texts[index // self.n]
        return self.service.decoded(self.requests[index].prompt) if text is None else text


def _prompts(service: Service, request: CompletionRequest) -> list[Any]:
    """The prompts of a request, each text or token ids.

    Raises:
      ApiError: 400; ``prompt`` is neither a prompt nor a list of prompts, or one is several times longer than the context.
    """
    given, most = request.prompt, service.limits.max_prompts
    ids = functools.partial(token_ids_of, service, request, "prompt")
    if given is None:
        raise ApiError(400, "prompt is missing", "prompt")
    if isinstance(given, str):
        return [given]
    expected = "text, a list of token ids, or a list of either"
    if not isinstance(given, list) or not given:
        raise wrong("prompt", given, expected)
    if type(given[0]) is int:
        return [ids(given)]
    if len(given) > most:
        raise ApiError(400, f"prompt has {len(given)} prompts: expected at most {most} (--max-prompts)", "prompt")
    return [prompt if isinstance(prompt, str) else ids(prompt) for prompt in given]


def token_ids_of(service: Service, request: CompletionRequest, name: str, value: Any) -> list[int]:
    """A prompt of token ids, in the field ``name``; of one that will be truncated, at least the remaining ones.

    Raises:
      ApiError: 400; it is no list of token ids, or several times longer than the context.
    """
    longest = COUNTED_CONTEXTS * service.max_len
    if isinstance(value, list) and len(value) > longest:
        if request.truncate_prompt_tokens is None:
            raise service.too_long(name, len(value))
        value = value[-longest:]
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise wrong(name, value, "a list of token ids")
    return value
