"""OpenAI's responses of choices, complete or as chunks: the base of completions and chats."""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jspec
from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.serving.generation.protocol import GenerationRequest, StreamOptions
from jspec.serving.generation.response import GenerationResponse
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError
from jspec.serving.http.streaming import DONE, event
from jspec.text.token_spans import TokenSpans


class ChoiceResponse(GenerationResponse):
    """The response of ``/v1/completions`` or ``/v1/chat/completions``.

    Args:
      service, request, model, requests, request_id: as of ``GenerationResponse``, the first prompt's choices first.
      n: number of choices of each prompt.
    """

    prefix: ClassVar[str]  # of the response's id
    complete_object: ClassVar[str]
    chunk_object: ClassVar[str]
    content: ClassVar[str]  # the field with the content of a chunk's choice

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        model: str,
        requests: Sequence[Request],
        request_id: str,
        n: int,
    ):
        super().__init__(service, request, model, requests, request_id)
        self.n, self._options = n, request.stream_options or StreamOptions()
        self._begun: set[int] = set()  # choices that have had a chunk
        self._num_tokens = 0  # of all completions so far
        sourced = requests if request.return_token_sources and request.stream else ()
        self._spans = [TokenSpans(service.llm.tokenizer, r.prompt, r.params.skip_special_tokens) for r in sourced]

    def take(self, index: int, delta: Delta) -> Delta:
        self._num_tokens += len(delta.token_ids)
        return super().take(index, delta)

    def complete(self) -> dict[str, Any]:
        results = [self.results[index] for index in range(len(self.requests))]
        choices = [self._choice(index, self.whole(index, result), result) for index, result in enumerate(results)]
        return {**self.head(streamed=False), "choices": choices, "usage": self._usage(), **self.extras()}

    def told(self, index: int, delta: Delta) -> Iterable[bytes]:
        content, request = self.shown(index, delta), self.request
        choices = [] if index in self._begun else self.opening_choices(index, delta)
        self._begun.add(index)
        detailed = request.return_token_ids or request.return_token_sources or self._options.continuous_usage_stats
        if content or delta.finished or detailed or delta.logprobs is not None:
            choices = [*choices, self._choice(index, {self.content: content}, delta)]
        for choice in choices:
            yield event(self._chunk([choice], delta))

    def closing(self) -> Iterable[bytes]:
        if self._options.include_usage:
            yield event({**self._chunk([]), "usage": self._usage()})
        yield DONE

    def failing(self, error: ApiError) -> Iterable[bytes]:
        return event(error.body), DONE

    def _choice(self, index: int, content: dict[str, Any], output: Delta | Result) -> dict[str, Any]:
        result, logprobs = output.result if isinstance(output, Delta) else output, self.logprobs(index, output)
        ending, details = self.ending(index, result), self.details(index, output)
        return {"index": index, **content, "logprobs": logprobs, **ending, **details}

    def head(self, streamed: bool) -> dict[str, Any]:
        """The fields before the choices, of a complete response or a chunk."""
        kind = self.chunk_object if streamed else self.complete_object
        head = {"id": f"{self.prefix}-{self.request_id}", "created": self.created, "model": self.model}
        return {**head, "object": kind, "system_fingerprint": f"jspec-{jspec.__version__}"}

    @abc.abstractmethod
    def whole(self, index: int, result: Result) -> dict[str, Any]:
        """The field with the content of a complete choice."""

    @abc.abstractmethod
    def shown(self, index: int, delta: Delta) -> Any:
        """The content of a delta's chunk; empty if there is nothing to show yet."""

    @abc.abstractmethod
    def opening_choices(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """Choices of the chunk before a choice's first delta; none or one."""

    @abc.abstractmethod
    def logprobs(self, index: int, output: Delta | Result) -> dict[str, Any] | None:
        """The log-probabilities of a delta, or of a complete choice; None if the request asks for none."""

    def num_reasoning_tokens(self) -> int | None:
        """How many tokens of the completions that have ended are reasoning; None if they are not told apart."""
        return None

    def extras(self) -> dict[str, Any]:
        """Further fields of a complete response."""
        return {}

    def ending(self, index: int, result: Result | None) -> dict[str, Any]:
        """Finish reason and stop reason of a choice; both None before it has ended."""
        del index
        if result is None:
            return {"finish_reason": None, "stop_reason": None}
        return {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}

    def details(self, index: int, output: Delta | Result) -> dict[str, Any]:
        """The token ids and sources of a choice, where the request asks for them."""
        fields: dict[str, Any] = {}
        if self.request.return_token_ids:
            fields["token_ids"] = output.token_ids
        if self.request.return_token_sources:
            fields["token_sources"] = output.sources
            if isinstance(output, Delta):
                fields["text_sources"] = self._spans[index].of(output) if output.text is not None else []
        return fields

    def _chunk(self, choices: list[Any], delta: Delta | None = None) -> dict[str, Any]:
        chunk = {**self.head(streamed=True), "choices": choices}
        if delta is not None and self._options.continuous_usage_stats:
            chunk["usage"] = self._usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, however many completions it has."""
        prompt = sum(len(request.prompt) for request in self.requests[:: self.n])
        firsts = range(0, len(self.requests), self.n)
        cached = sum(self.results[index].num_cached_tokens for index in firsts if index in self.results)
        reasoning = self.num_reasoning_tokens()
        details = {} if reasoning is None else {"completion_tokens_details": {"reasoning_tokens": reasoning}}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            **details,
        }
