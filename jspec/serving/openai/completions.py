"""``/v1/completions``."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec.outputs import Delta, Result
from jspec.serving.openai.errors import ApiError, require_that, wrong
from jspec.serving.openai.json_body import read_object
from jspec.serving.openai.logprobs import completion_logprobs, prompt_logprobs
from jspec.serving.openai.protocol import CompletionRequest, parsed
from jspec.serving.openai.responses import Answer
from jspec.serving.openai.service import Service
from jspec.serving.openai.serving_base import answered, requests_of, settings_of, tenant_of


async def completions(service: Service, http: HttpRequest) -> Response:
    """Answer a request for completions of one or several prompts."""
    asked = parsed(CompletionRequest, await read_object(service, http), service.most_entries)
    model = service.require_model(asked.model)
    prompts = _prompts(service, asked)
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{i}]" for i in range(len(prompts))]

    settings = settings_of(service, asked, len(prompts), tenant_of(http))

    def prepare() -> CompletionAnswer:
        requests = []
        for prompt, name in zip(prompts, names, strict=True):
            if isinstance(prompt, str):
                special = asked.add_special_tokens is not False
                prompt = service.encoded(prompt, name, special, asked.truncate_prompt_tokens)
            requests += requests_of(service, asked, settings, prompt, name)
        return CompletionAnswer(service, asked, model, requests, len(settings.copies), texts)

    require_that(not (asked.echo and service.llm.tokenizer is None), "echo", True, "false; the model has no tokenizer")
    return await answered(service, http, asked, settings, prepare)


class CompletionAnswer(Answer):
    """The answer of ``/v1/completions``.

    Args:
      texts: the prompts as the client gave them; None for those that were token ids.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, asked: CompletionRequest, model, requests, n: int, texts):
        super().__init__(asked, model, requests, service.llm.tokenizer, n)
        self._service, self._texts, self._echo = service, texts, bool(asked.echo)
        self._top, self._offsets = asked.logprobs, dict.fromkeys(range(len(requests)), 0)

    def choice(self, index: int, result: Result) -> dict[str, Any]:
        prompt = self._prompt_text(index) if self._echo else ""
        choice = {
            "index": index,
            "text": prompt + (result.text or ""),
            "logprobs": self._whole_logprobs(result),
            **self.ending(result),
            **self.details(result, index),
        }
        places = result.prompt_logprobs
        if self.asked.prompt_logprobs is not None and places is not None:
            choice["prompt_logprobs"] = prompt_logprobs(places)
        if self.asked.return_token_ids:
            choice["prompt_token_ids"] = result.prompt_token_ids
        return choice

    def opening(self, index: int) -> list[dict[str, Any]]:
        text = self._prompt_text(index) if self._echo else ""
        self._offsets[index] = len(text)
        if not text and not self.asked.return_token_ids:
            return []
        choice = {"index": index, "text": text, "logprobs": None, **self.ending(None)}
        if self.asked.return_token_ids:
            choice.update(prompt_token_ids=list(self.requests[index].prompt), token_ids=[])
        return [choice]

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        places, told = delta.logprobs, None
        if places is not None and self._top is not None:
            told = completion_logprobs(delta.token_ids, places, self._top, self._offsets[index])
            self._offsets[index] += sum(map(len, told["tokens"]))
        ending, details = self.ending(delta.result), self.details(delta, index)
        return {"index": index, "text": delta.text or "", "logprobs": told, **ending, **details}

    def _whole_logprobs(self, result: Result) -> dict[str, Any] | None:
        places = result.logprobs
        if places is None or self._top is None:
            return None
        if not self._echo:
            return completion_logprobs(result.token_ids, places, self._top)
        before = result.prompt_logprobs or []
        both = [*result.prompt_token_ids, *result.token_ids]
        return completion_logprobs(both, [*before, *places], self._top, decode=lambda t: self._service.decoded([t]))

    def _prompt_text(self, index: int) -> str:
        text = self._texts[index // self.n]
        return self._service.decoded(self.requests[index].prompt) if text is None else text


def _prompts(service: Service, asked: CompletionRequest) -> list[Any]:
    """The prompts of a request, each text or token ids.

    Raises:
      ApiError: 400; ``prompt`` is neither a prompt nor a list of prompts, or one is several times longer than the context.
    """
    given, most, kept = asked.prompt, service.limits.max_prompts, asked.truncate_prompt_tokens
    if given is None:
        raise ApiError(400, "prompt is missing", "prompt")
    if isinstance(given, str):
        return [given]
    expected = "text, a list of token ids, or a list of either"
    if not isinstance(given, list) or not given:
        raise wrong("prompt", given, expected)
    if type(given[0]) is int:
        return [service.given_ids("prompt", given, kept)]
    if len(given) > most:
        raise ApiError(400, f"prompt has {len(given)} prompts: expected at most {most} (--max-prompts)", "prompt")
    return [prompt if isinstance(prompt, str) else service.given_ids("prompt", prompt, kept) for prompt in given]
