"""OpenAI's responses, complete and streamed, from deltas and results: the base of completions and chats."""

import abc
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import jspec
from jspec.engine.contradictions import NoTokenAllowed
from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.serving.async_engine import Group
from jspec.serving.generation.protocol import GenerationRequest, StreamOptions
from jspec.serving.generation.sampling import of_value_error
from jspec.serving.generation.service import Service, unavailable
from jspec.serving.http.errors import ApiError
from jspec.serving.http.streaming import DONE, event
from jspec.text.grammar.constraint import GrammarDeadEnd
from jspec.text.token_spans import TokenSpans

log = logging.getLogger("jspec.serve")


class GenerationResponse(abc.ABC):
    """The response to one HTTP request, complete or as a stream of chunks.

    Args:
      service: the model and its settings.
      request: the fields that the client sent.
      model: the model's name in the request.
      requests: the engine's requests, one for each choice, those of the first prompt first.
      n: number of choices of each prompt.
      request_id: the id of the HTTP request.
    """

    prefix: ClassVar[str]  # of the response's id
    complete_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        model: str,
        requests: Sequence[Request],
        n: int,
        request_id: str,
    ):
        self.service, self.request, self.requests, self.n = service, request, requests, n
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._fingerprint = f"jspec-{jspec.__version__}"
        self._results: dict[int, Result] = {}
        self._begun: set[int] = set()  # choices that have had a chunk
        self._num_tokens = 0  # of all completions so far
        self._spans = [
            TokenSpans(service.llm.tokenizer, r.prompt, r.params.skip_special_tokens) for r in self._sourced()
        ]

    async def collect(self, group: Group):
        """Wait until all completions have ended; then ``complete`` has the response.

        Raises:
          ApiError: 500 or 503; a completion failed or was aborted.
        """
        async for index, delta in group:
            self._count(index, self.shown(index, delta))

    @property
    def num_entries(self) -> int:
        """How many tokens and log-probabilities the complete response has, about."""
        results = self._results.values()
        return sum(
            len(p or ()) for r in results for p in (r.token_ids, *(r.logprobs or ()), *(r.prompt_logprobs or ()))
        )

    def complete(self) -> dict[str, Any]:
        """The complete response."""
        choices = [self.choice(index, self._results[index]) for index in range(len(self.requests))]
        return {
            **self._head,
            "object": self.complete_object,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            "usage": self._usage(),
            **self.extras(),
        }

    async def events(self, group: Group) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error is an event as well, the last before ``[DONE]``."""
        options = self.request.stream_options or StreamOptions()
        try:
            async for index, delta in group:
                delta = self.shown(index, delta)
                self._count(index, delta)
                choices = [] if index in self._begun else self.opening(index, delta)
                self._begun.add(index)
                if self._has_content(index, delta, options):
                    choices = [*choices, self.chunk_choice(index, delta)]
                for choice in choices:
                    yield event(self._chunk([choice], options, delta))
            if options.include_usage:
                yield event({**self._chunk([], options), "usage": self._usage()})
        except Exception as error:
            yield event(as_api_error(error).body)
        yield DONE

    @abc.abstractmethod
    def choice(self, index: int, result: Result) -> dict[str, Any]:
        """``choices[index]`` of a complete response."""

    @abc.abstractmethod
    def opening(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices of the chunk before a choice's first delta; none or one."""

    @abc.abstractmethod
    def chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of a delta's chunk."""

    def shown(self, index: int, delta: Delta) -> Delta:
        """A delta of a choice as the client gets it; called once for each, in their order."""
        del index
        return delta

    def num_reasoning_tokens(self) -> int | None:
        """How many tokens of the completions that have ended are reasoning; None if they are not told apart."""
        return None

    def extras(self) -> dict[str, Any]:
        """Further fields of a complete response."""
        return {}

    def ending(self, result: Result | None) -> dict[str, Any]:
        """Finish reason and stop reason of a choice; both None before it has ended."""
        if result is None:
            return {"finish_reason": None, "stop_reason": None}
        return {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}

    def details(self, output: Delta | Result, index: int) -> dict[str, Any]:
        """The token ids and sources of a choice, where the request asks for them."""
        fields: dict[str, Any] = {}
        if self.request.return_token_ids:
            fields["token_ids"] = output.token_ids
        if self.request.return_token_sources:
            fields["token_sources"] = output.sources
            if isinstance(output, Delta):
                fields["text_sources"] = self._spans[index].of(output) if output.text is not None else []
        return fields

    def _sourced(self) -> Sequence[Request]:
        """The requests whose streams have the source of each token span."""
        return self.requests if self.request.return_token_sources and self.request.stream else ()

    def _count(self, index: int, delta: Delta):
        """Count a delta's tokens, and store its result if it has one.

        Raises:
          ApiError: its request failed or was aborted.
        """
        self._num_tokens += len(delta.token_ids)
        if delta.result is not None:
            require_sound(delta.result, self.request)
            self._results[index] = delta.result

    def has_text(self, index: int, delta: Delta) -> bool:
        """Whether a delta of a choice has text for the client; it may be held back."""
        del index
        return bool(delta.text)

    def _has_content(self, index: int, delta: Delta, options: StreamOptions) -> bool:
        """Whether a delta needs a chunk."""
        detailed = self.request.return_token_ids or self.request.return_token_sources or options.continuous_usage_stats
        return bool(self.has_text(index, delta) or delta.finished or detailed or delta.logprobs is not None)

    def _chunk(self, choices: list[Any], options: StreamOptions, delta: Delta | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "system_fingerprint": self._fingerprint, "choices": choices}
        if delta is not None and options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many completions it has."""
        prompt = sum(len(request.prompt) for request in self.requests[:: self.n])
        firsts = range(0, len(self.requests), self.n)
        cached = sum(self._results[index].num_cached_tokens for index in firsts if index in self._results)
        reasoning = self.num_reasoning_tokens()
        details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            **details,
        }


def require_sound(result: Result, request: GenerationRequest):
    """Raise an error for a completion that failed or was aborted.

    Args:
      result: of the completion.
      request: the fields that the client sent.

    Raises:
      ApiError: 400 if what the client asked for allows no text there, else 500 or 503.
    """
    if result.finish_reason == "abort":
        raise unavailable()
    if result.finish_reason == "error":
        kind, _, message = str(result.stop_reason).partition(": ")
        if kind == GrammarDeadEnd.__name__:
            raise ApiError(400, f"no text can go on there as the request wants it: {message}")
        if kind == NoTokenAllowed.__name__:
            raise of_value_error(ValueError(message), request)
        log.error("a request failed: %s", result.stop_reason)
        raise ApiError(500, "the request failed in the engine; the server's log says why", code="engine_error")


def as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a stream failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why")
