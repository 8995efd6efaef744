"""The response to a turn of a chat as blocks: the base of ``/v1/responses`` and ``/v1/messages``."""

import abc
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

from jspec.engine.request import Request
from jspec.outputs import Result
from jspec.serving.async_engine import Group
from jspec.serving.generation.chat_turn import ChatTurn
from jspec.serving.generation.choice_response import as_api_error, require_sound
from jspec.serving.http.errors import ApiError
from jspec.text.parsers.blocks import Step


class TurnResponse(abc.ABC):
    """The response to one turn, complete or as a stream of events.

    Args:
      turn: the prompt and the parsers.
      model: its name in the request.
      requests: the engine's, of which there is one.
      request_id: the id of the HTTP request.
      shows_reasoning: whether the client gets reasoning.
    """

    def __init__(
        self, turn: ChatTurn, model: str, requests: list[Request], request_id: str, shows_reasoning: bool = True
    ):
        self.turn, self.model, self.requests, self.request_id = turn, model, requests, request_id
        self.created = time.time()
        self.blocks = turn.blocks(shows_reasoning, self.holds)
        self.result: Result | None = None
        self._parser = turn.parser()

    async def collect(self, group: Group):
        """Wait until the completion has ended; then ``complete`` has the response.

        Raises:
          ApiError: 500 or 503; it failed or was aborted.
        """
        async for _, delta in group:
            list(self._steps(delta.text or "", delta.token_ids, delta.result))

    @property
    def num_entries(self) -> int:
        """How many tokens the complete response has."""
        return 0 if self.result is None else len(self.result.token_ids)

    @abc.abstractmethod
    def complete(self) -> dict[str, Any]:
        """The complete response."""

    async def events(self, group: Group) -> AsyncGenerator[bytes, None]:
        """The response as server-sent events. An error is an event as well."""
        try:
            for event in self.opening():
                yield event
            async for _, delta in group:
                told = False
                for step in self._steps(delta.text or "", delta.token_ids, delta.result):
                    for event in self.told(step):
                        told = True
                        yield event
                for event in () if told else self.waiting():
                    yield event
            for event in self.closing():
                yield event
        except Exception as error:
            for event in self.failing(as_api_error(error)):
                yield event

    @abc.abstractmethod
    def opening(self) -> Iterable[bytes]:
        """The events before any text."""

    @abc.abstractmethod
    def told(self, step: Step) -> Iterable[bytes]:
        """The events of a step."""

    def holds(self, tool: str) -> bool:
        """Whether calls of a tool are told as a whole, and left out if they are incomplete."""
        del tool
        return False

    def waiting(self) -> Iterable[bytes]:
        """Events where there is text, but nothing to tell of it yet."""
        return ()

    @abc.abstractmethod
    def closing(self) -> Iterable[bytes]:
        """The events after all text."""

    @abc.abstractmethod
    def failing(self, error: ApiError) -> Iterable[bytes]:
        """The events of an error, the last ones."""

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens: of the prompt, those of them that were cached, and new ones."""
        result = self.result
        prompt = len(self.requests[0].prompt)
        return (prompt, 0, 0) if result is None else (prompt, result.num_cached_tokens, len(result.token_ids))

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the new tokens are reasoning."""
        return 0 if self.result is None else self.turn.num_reasoning_tokens(self.blocks, self.result.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether the text ended because it was as long as it may be."""
        return self.result is not None and self.result.finish_reason == "length"

    @property
    def fills_context(self) -> bool:
        """Whether that was because of the model's context."""
        prompt, _, new = self.usage
        return self.is_full and prompt + new >= self.turn.service.max_len

    def _steps(self, text: str, token_ids: list[int], result: Result | None) -> Iterator[Step]:
        events = self._parser.feed(text, token_ids)
        if result is not None:
            require_sound(result, self.turn.request)
            self.result = result
            events = [*events, *self._parser.finish(ended=not result.was_cut)]
        yield from self.blocks.add(events, ended=result is not None, complete=not self.is_full)
