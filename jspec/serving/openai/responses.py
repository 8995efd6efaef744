"""From deltas and results to OpenAI's answers: what completions and chat answers have in common."""

import abc
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

import jspec
from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.serving.async_engine import Group
from jspec.serving.openai.errors import ApiError
from jspec.serving.openai.protocol import GenerationRequest, StreamOptions
from jspec.serving.openai.service import unavailable
from jspec.serving.openai.streaming import DONE, event
from jspec.text.detokenizer import Tokenizer
from jspec.text.token_spans import TokenSpans

log = logging.getLogger("jspec.serve")


class Answer(abc.ABC):
    """The answer to one request, as a whole or as a stream of chunks.

    Args:
      asked: what the client sent.
      model: the name by which it asked for the model.
      requests: one for each choice, in the order of the choices: those of the first prompt first.
      tokenizer: of the model.
      n: how many of them are of one prompt.
    """

    prefix: ClassVar[str]  # of its id
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, asked: GenerationRequest, model: str, requests: Sequence[Request], tokenizer: Tokenizer | None, n: int
    ):
        self.asked, self.requests, self.n = asked, requests, n
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._fingerprint = f"jspec-{jspec.__version__}"
        self._results: dict[int, Result] = {}
        self._begun: set[int] = set()  # choices that a stream has had something of
        self._num_tokens = 0  # of all completions so far
        self._spans = [TokenSpans(tokenizer, r.prompt, r.params.skip_special_tokens) for r in self._sourced()]

    async def whole(self, group: Group) -> dict[str, Any]:
        """The answer, when all completions have ended.

        Raises:
          ApiError: 500 or 503; one of them did not end by itself.
        """
        async for index, delta in group:
            self._count(index, delta)
        choices = [self.choice(index, self._results[index]) for index in range(len(self.requests))]
        return {
            **self._head,
            "object": self.whole_object,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
            "usage": self._usage(),
            **self.extras(),
        }

    async def events(self, group: Group) -> AsyncGenerator[bytes, None]:
        """The answer in chunks, as events of a stream. An error is an event as well, the last before ``[DONE]``."""
        options = self.asked.stream_options or StreamOptions()
        try:
            async for index, delta in group:
                self._count(index, delta)
                choices = [] if index in self._begun else self.opening(index)
                self._begun.add(index)
                if self._worth_telling(delta, options):
                    choices = [*choices, self.piece(index, delta)]
                for choice in choices:
                    yield event(self._chunk([choice], options, delta))
            if options.include_usage:
                yield event({**self._chunk([], options), "usage": self._usage()})
        except Exception as error:
            yield event(_as_api_error(error).body)
        yield DONE

    @abc.abstractmethod
    def choice(self, index: int, result: Result) -> dict[str, Any]:
        """``choices[index]`` of a whole answer."""

    @abc.abstractmethod
    def opening(self, index: int) -> list[dict[str, Any]]:
        """What a stream has of a choice before its first delta."""

    @abc.abstractmethod
    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a stream has of a choice when it grows."""

    def extras(self) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    def ending(self, result: Result | None) -> dict[str, Any]:
        """Why a choice ended; both None while it has not."""
        if result is None:
            return {"finish_reason": None, "stop_reason": None}
        return {"finish_reason": result.finish_reason, "stop_reason": result.stop_reason}

    def details(self, told: Delta | Result, index: int) -> dict[str, Any]:
        """What a request may ask for beside the text of a choice: its tokens, and where they come from."""
        found: dict[str, Any] = {}
        if self.asked.return_token_ids:
            found["token_ids"] = told.token_ids
        if self.asked.return_token_sources:
            found["token_sources"] = told.sources
            if isinstance(told, Delta):
                found["text_sources"] = self._spans[index].of(told) if told.text is not None else []
        return found

    def _sourced(self) -> Sequence[Request]:
        """The requests whose streams say whose text is whose."""
        return self.requests if self.asked.return_token_sources and self.asked.stream else ()

    def _count(self, index: int, delta: Delta):
        """Take note of a delta.

        Raises:
          ApiError: its request did not end by itself.
        """
        self._num_tokens += len(delta.token_ids)
        if delta.result is not None:
            _require_sound(delta.result)
            self._results[index] = delta.result

    def _worth_telling(self, delta: Delta, options: StreamOptions) -> bool:
        """Whether a chunk of it would say anything: text may be held back."""
        detailed = self.asked.return_token_ids or self.asked.return_token_sources or options.continuous_usage_stats
        return bool(delta.text or delta.finished or detailed or delta.logprobs is not None)

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
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def _require_sound(result: Result):
    if result.finish_reason == "abort":
        raise unavailable()
    if result.finish_reason == "error":
        log.error("a request failed: %s", result.stop_reason)
        raise ApiError(500, "the request failed in the engine; the server's log says why", code="engine_error")


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    log.error("a stream failed", exc_info=error)
    return ApiError(500, "the server failed; its log says why")
