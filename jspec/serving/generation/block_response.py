"""The response to a turn of a chat as blocks: the base of ``/v1/responses`` and ``/v1/messages``."""

import abc
from collections.abc import Iterable
from typing import Any

from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.serving.generation.chat_turn import ChatTurn
from jspec.serving.generation.response import GenerationResponse
from jspec.text.parsers.blocks import Step


class BlockResponse(GenerationResponse):
    """The response to one turn, which has one text.

    Args:
      turn: the prompt and the parsers.
      model, requests, request_id: as of ``GenerationResponse``.
      shows_reasoning: whether the client gets reasoning.
    """

    def __init__(
        self, turn: ChatTurn, model: str, requests: list[Request], request_id: str, shows_reasoning: bool = True
    ):
        super().__init__(turn.service, turn.request, model, requests, request_id)
        self.turn, self.output = turn, turn.output(shows_reasoning, self.holds)
        self.blocks = self.output.blocks

    def complete(self) -> dict[str, Any]:
        list(self.output.add(self.results[0]))
        return self.whole()

    @abc.abstractmethod
    def whole(self) -> dict[str, Any]:
        """The complete response, from the blocks of the whole text."""

    def told(self, index: int, delta: Delta) -> Iterable[bytes]:
        told = False
        for step in self.output.add(delta):
            for event in self.step_events(step):
                told = True
                yield event
        yield from () if told else self.waiting()

    @abc.abstractmethod
    def step_events(self, step: Step) -> Iterable[bytes]:
        """The events of a step."""

    def holds(self, tool: str) -> bool:
        """Whether calls of a tool are told as a whole, and left out if they are incomplete."""
        del tool
        return False

    def waiting(self) -> Iterable[bytes]:
        """Events where there is text, but nothing to tell of it yet."""
        return ()

    @property
    def result(self) -> Result | None:
        """The result of the text, once it has ended."""
        return self.results.get(0)

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
