"""The response to one HTTP request, complete or as events: the base of all endpoints' responses."""

import abc
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from jspec.engine.contradictions import NoTokenAllowed
from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.serving.async_engine import Group
from jspec.serving.generation.protocol import GenerationRequest
from jspec.serving.generation.sampling import of_value_error
from jspec.serving.generation.service import Service, unavailable
from jspec.serving.http.errors import ApiError, as_api_error
from jspec.text.grammar.constraint import GrammarDeadEnd

log = logging.getLogger("jspec.serve")


class GenerationResponse(abc.ABC):
    """The response to one HTTP request, complete or as a stream of events.

    Args:
      service: the model and its settings.
      request: the fields that the client sent, or the chat that asks for the same.
      model: the model's name in the request.
      requests: the engine's requests, one for each choice.
      request_id: the id of the HTTP request.

    Attributes:
      results: those of the choices that have ended.
    """

    def __init__(
        self, service: Service, request: GenerationRequest, model: str, requests: Sequence[Request], request_id: str
    ):
        self.service, self.request, self.model, self.requests = service, request, model, requests
        self.request_id, self.created = request_id, int(time.time())
        self.results: dict[int, Result] = {}

    async def collect(self, group: Group):
        """Wait until all choices have ended; then ``complete`` has the response.

        Raises:
          ApiError: 400, 500 or 503; a choice failed or was aborted.
        """
        async for index, delta in group:
            self.take(index, delta)

    def take(self, index: int, delta: Delta) -> Delta:
        """A delta of a choice as the client gets it. Called once for each, in their order; stores the result of the last.

        Raises:
          ApiError: 400, 500 or 503; the choice failed or was aborted.
        """
        if delta.result is not None:
            _require_sound(delta.result, self.request)
            self.results[index] = delta.result
        return delta

    @property
    def num_entries(self) -> int:
        """How many tokens and log-probabilities the complete response has, about."""
        results = self.results.values()
        return sum(
            len(p or ()) for r in results for p in (r.token_ids, *(r.logprobs or ()), *(r.prompt_logprobs or ()))
        )

    @abc.abstractmethod
    def complete(self) -> dict[str, Any]:
        """The complete response. Called once."""

    async def events(self, group: Group) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error is an event as well."""
        try:
            for event in self.opening():
                yield event
            async for index, delta in group:
                for event in self.told(index, self.take(index, delta)):
                    yield event
            for event in self.closing():
                yield event
        except Exception as error:
            for event in self.failing(as_api_error(error, "a stream failed")):
                yield event

    def opening(self) -> Iterable[bytes]:
        """The events before any text."""
        return ()

    @abc.abstractmethod
    def told(self, index: int, delta: Delta) -> Iterable[bytes]:
        """The events of a delta of a choice."""

    @abc.abstractmethod
    def closing(self) -> Iterable[bytes]:
        """The events after all text."""

    @abc.abstractmethod
    def failing(self, error: ApiError) -> Iterable[bytes]:
        """The events of an error, the last ones."""


def _require_sound(result: Result, request: GenerationRequest):
    """Raise the error of a choice that failed or was aborted.

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
