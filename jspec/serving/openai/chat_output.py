"""The output of a chat in OpenAI's form: content, reasoning and tool calls of a message, or of the deltas of a stream."""

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.serving.openai.tool_choice import ToolChoice
from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from jspec.text.parsers.forced import ListOfCalls, NamedCall
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.parsers.parser import OutputParser, make_parser

PROMPT_END = 64  # tokens of the prompt that may say whether the model is reasoning when its text begins


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How the text of a chat is parsed.

    Attributes:
      tokenizer: of the model.
      choice: of tools.
      tool, reasoning: names of the formats of calls and of reasoning; None where there are none.
      tools: of the request.
    """

    tokenizer: Any
    choice: ToolChoice
    tool: str | None
    reasoning: str | None
    tools: Sequence[Mapping[str, Any]]

    def parser(self, prompt: Sequence[int]) -> OutputParser:
        """The parser of a text behind a prompt."""
        if self.choice.is_forced:  # by a grammar, under which there is no other text
            return NamedCall(self.choice.name) if self.choice.kind == "named" else ListOfCalls()
        end = self.tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special_tokens=False)
        tokens = MarkerTokens(self.tokenizer, prompt)
        return make_parser(self.tool, self.reasoning, tools=self.tools, tokens=tokens, prompt=end)


class ChatOutput:
    """One choice of a chat, as its text comes.

    Args:
      parser: of the choice's text.
      several_calls: whether there may be several calls; if not, those after the first are left out.
      shows_reasoning: whether the client gets reasoning.

    Attributes:
      num_calls: how many calls there have been.
    """

    def __init__(self, parser: OutputParser, several_calls: bool = True, shows_reasoning: bool = True):
        self._parser, self._several, self._shows_reasoning = parser, several_calls, shows_reasoning
        self.num_calls = 0
        self._has_arguments = False

    def add(self, text: str, token_ids: Sequence[int], ended: bool) -> dict[str, Any]:
        """The fields of the next ``delta``; empty if there is nothing to show yet."""
        events = self._parser.feed(text, token_ids)
        return self._delta([*events, *self._parser.finish()] if ended else events)

    def message(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """The fields of the whole ``message``; there is no ``tool_calls`` without a call."""
        delta = self.add(text, token_ids, True)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in delta.pop("tool_calls", ())]
        content = delta.pop("content", None if calls else "")
        return {"content": content, **delta, **({"tool_calls": calls} if calls else {})}

    def _delta(self, events: Iterable[Event]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []

        def add_arguments(text: str):
            self._has_arguments = True
            if not calls or calls[-1]["index"] != self.num_calls - 1:
                calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += text

        for event in events:
            if isinstance(event, Content):
                delta["content"] = delta.get("content", "") + event.text
            elif isinstance(event, Reasoning):
                if self._shows_reasoning:
                    delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + event.text
            elif isinstance(event, CallStart):
                self.num_calls, self._has_arguments = self.num_calls + 1, False
                if self._is_shown:
                    function = {"name": event.name, "arguments": ""}
                    call = event.id or f"chatcmpl-tool-{uuid.uuid4().hex}"
                    calls.append({"index": self.num_calls - 1, "id": call, "type": "function", "function": function})
            elif isinstance(event, CallArguments):
                if self._is_shown:
                    add_arguments(event.text)
            elif isinstance(event, CallEnd) and self._is_shown and not self._has_arguments:
                add_arguments("{}")  # clients take an empty text for broken JSON
        return {**delta, "tool_calls": calls} if calls else delta

    @property
    def _is_shown(self) -> bool:
        return self._several or self.num_calls == 1
