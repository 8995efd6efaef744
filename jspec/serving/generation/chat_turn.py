"""A turn of a chat, from messages and tools to the engine's requests and the parsers of their texts.

All endpoints for chats have it in common; they differ in how a turn is asked for, and in how its events are told.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jspec._validation import LARGEST_INT
from jspec.engine.request import Request
from jspec.outputs import Delta, Result
from jspec.sampling.structured import StructuredOutputsParams
from jspec.sampling.thinking import ThinkingBudget
from jspec.serving.generation.chat_prompt import prompt_of
from jspec.serving.generation.protocol import ChatRequest
from jspec.serving.generation.respond import RequestSettings, respond
from jspec.serving.generation.response import GenerationResponse
from jspec.serving.generation.service import Service
from jspec.serving.generation.tool_choice import choice_of, name_of
from jspec.serving.http.auth import Tenant
from jspec.serving.http.errors import ApiError, require_that
from jspec.text.chat_messages import plain_messages
from jspec.text.parsers import forced
from jspec.text.parsers.blocks import Blocks, Step
from jspec.text.parsers.calls import NAME
from jspec.text.parsers.parser import OutputParser, make_parser
from jspec.text.parsers.registry import reasoning_format, tool_format

PROMPT_END = 256  # tokens of what the template writes before the model's text, at most


@dataclasses.dataclass(frozen=True)
class TurnOutput:
    """Parses one text of a turn and collects its blocks: reasoning, text and calls.

    Attributes:
      parser: of the text.
      blocks: those that have begun.
    """

    parser: OutputParser
    blocks: Blocks

    def add(self, new: Delta | Result) -> Iterator[Step]:
        """The steps of the next delta, or of a whole text; the last delta has the result."""
        result = new if isinstance(new, Result) else new.result
        events = self.parser.feed(new.text or "", new.token_ids)
        if result is None:
            return self.blocks.add(events)
        events = [*events, *self.parser.finish(ended=not result.was_cut)]
        return self.blocks.add(events, ended=True, complete=result.finish_reason != "length")


class ChatTurn:
    """One turn of a chat: a prompt, and what the model may answer.

    Args:
      service: the model and its settings.
      request: the fields of the request; ``tools`` and ``skip_special_tokens`` are set as the turn needs them.
      tenant: who has sent it.

    Attributes:
      choice: which tools may be called.
      prompt: the tokens of the prompt; empty before ``settings``.

    Raises:
      ApiError: 400; a field is wrong.
    """

    def __init__(self, service: Service, request: ChatRequest, tenant: Tenant):
        self.service, self.request, self.choice = service, request, choice_of(request)
        self.prompt: list[int] = []
        special = request.add_special_tokens
        require_that(
            not special, "add_special_tokens", special, "false; the chat template writes special tokens itself"
        )
        if self.choice.kind == "none":
            request.tools = None
        self._callable = [tool for tool in request.tools or [] if self.choice.allows(name_of(tool))]
        has_text = service.llm.tokenizer is not None
        self._tool = tool_format(service.tool_parser) if self._callable and has_text else None
        self._reasoning = reasoning_format(service.reasoning_parser) if has_text else None
        self._form: forced.CallsForm | None = None
        self._is_free = False  # whether the form leaves reasoning and text as they are
        self.is_parsed = bool(self._tool or self._reasoning or self.choice.is_forced)
        if self.is_parsed:
            request.skip_special_tokens = False  # markers of calls and reasoning may be special tokens
        count = request.thinking_token_budget
        ok = count is None or 0 <= count <= LARGEST_INT
        require_that(ok, "thinking_token_budget", count, "an integer of at least 0 and below 2^31")
        known = "nothing; no format of this model's reasoning is known (--reasoning-parser)"
        require_that(count is None or self._reasoning is not None, "thinking_token_budget", count, known)
        self._given = RequestSettings.of(service, request, 1, tenant)
        if (
            self.choice.is_forced
        ):  # instead of an answer, whose form clients send beside it; one of vLLM's is of all the text
            form = request.structured_outputs
            require_that(not form, "structured_outputs", form, "nothing beside a tool_choice that forces calls")
            request.response_format = None

    def settings(self) -> RequestSettings:
        """The settings of the engine's requests, once the prompt is known. This may take long."""
        self.prompt = prompt_of(self.service, self.request, self.request.truncate_prompt_tokens)
        settings, form = self._given, self._given.copies[0].structured_outputs
        if self.choice.is_forced:
            form = self._calls_form()
        elif self._tool is not None:
            form = self._form_beside_calls(form)
        budget = self._budget()
        if form is None and budget is None:
            return settings
        if form is not None and self._reasoning is not None and not self._is_free:
            markers, answers = self.service.marker_tokens.ids, not self.choice.is_forced
            form = forced.after_reasoning(form, self._reasoning, markers, self._prompt_end, answers, self._begun)
        fields = {"structured_outputs": form, "thinking_budget": budget}
        copies = [dataclasses.replace(params, **fields) for params in settings.copies]
        return dataclasses.replace(settings, copies=copies)

    async def respond(self, http: HttpRequest, make: Callable[[list[Request]], GenerationResponse]) -> Response:
        """The response to the turn, which ``make`` makes of the engine's requests, one for each choice.

        Raises:
          ApiError: the request cannot be served.
          ClientDisconnect: the client disconnected.
        """

        def prepare(settings: RequestSettings) -> GenerationResponse:
            return make(settings.requests(self.prompt, "messages"))

        return await respond(self.service, http, self.request, self.settings, prepare)

    def output(self, shows_reasoning: bool = True, holds: Callable[[str], bool] = lambda name: False) -> TurnOutput:
        """Collects one text; ``holds`` is as of ``Blocks``."""
        form = self._form
        has_form = form is not None or self._given.copies[0].structured_outputs is not None
        parser = make_parser(
            self._tool if form is None else form.format,
            self._reasoning,
            tools=self._callable,
            tokens=self.service.marker_tokens.after(self.prompt),
            prompt=self._prompt_end,
            begun=self._begun,
            begins_open=False if has_form else None,  # the form says where reasoning begins
        )
        new_id = (lambda: None) if self._tool is None else self._tool.new_id
        blocks = Blocks(self.choice.several, shows_reasoning, new_id, holds)
        return TurnOutput(parser, blocks)

    def num_reasoning_tokens(self, blocks: Blocks, token_ids: Sequence[int]) -> int:
        """How many tokens of a text are reasoning: those through the first marker that ends it."""
        thoughts = [block for block in blocks.done if block.kind == "reasoning"]
        if self._reasoning is None or not blocks.has_reasoning:
            return 0
        if (count := self._num_through(self._reasoning.end, token_ids)) is not None:
            return count
        if len(thoughts) == len(blocks.done):
            return len(token_ids)
        text = "".join(block.text for block in thoughts)
        return len(self.service.encoded(text, "reasoning", special=False))

    def _num_through(self, marker: str, token_ids: Sequence[int]) -> int | None:
        """How many tokens there are through the first of these markers; None if there is none."""
        if (id := self.service.marker_tokens.ids.get(marker)) is not None:
            return token_ids.index(id) + 1 if id in token_ids else None
        newest = b""
        for count, token in enumerate(token_ids, 1):
            newest = newest[-len(marker) :] + self.service.token_bytes(token, self.service.decoded([token]))
            if marker.encode() in newest:
                return count
        return None

    def _budget(self) -> ThinkingBudget | None:
        """The most tokens of reasoning, with the markers of the model's format."""
        count, reasoning = self.request.thinking_token_budget, self._reasoning
        if count is None or reasoning is None:
            return None
        begun = reasoning.said_by(self._prompt_end, self._begun)
        return ThinkingBudget(count, reasoning.start, reasoning.end, bool(begun))

    @functools.cached_property
    def _begun(self) -> str:
        """The beginning of the model's message, if the request has it."""
        begins = not self.request.continue_final_message
        return "" if begins else plain_messages(self.request.messages[-1:])[0].get("content", "")

    @functools.cached_property
    def _prompt_end(self) -> str:
        """The text of the prompt from the model's turn on, or more."""
        size = PROMPT_END + len(self._begun.encode(errors="replace"))  # a token has at least a byte
        return self.service.decoded(self.prompt[-size:])

    def _form_beside_calls(self, form: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The form of a text that may have calls: strict tools make one, and another one's place may be taken by calls."""
        if not all(NAME.fullmatch(name_of(tool)) for tool in self._callable):
            return form
        if form is not None and self._reasoning is not None and self._reasoning.answer:
            return form  # whose preamble leads to the answer alone
        if form is None and not any(map(forced.is_strict, self._callable)):
            return None
        with self._forms() as forms:
            if form is not None:
                return forms.beside(form)
            form = forms.strict()
        self._is_free = form is not None
        return form

    def _calls_form(self) -> StructuredOutputsParams:
        """The form that makes the model call a tool.

        Raises:
          ApiError: 400; the tools make no grammar, or one that is too large.
        """
        for index, tool in enumerate(self.request.tools or []):
            name, expected = name_of(tool), "a name without blanks, quotes and brackets"
            require_that(bool(NAME.fullmatch(name)), f"tools[{index}].function.name", name, expected)
        with self._forms() as forms:
            self._form = forms.calls(self.choice.kind == "named")
        return self._form.params

    @contextlib.contextmanager
    def _forms(self) -> Iterator[forced.CallForms]:
        """Makes forms of the tools. Errors of their grammars, whose schemas may be anything, are 400, as is their size."""
        most, size = self.service.limits.max_grammar_bytes, len(json.dumps(self._callable))
        if size > most:
            message = f"tools are {size} characters as a grammar: expected at most {most} (--max-grammar-bytes)"
            raise ApiError(400, message, "tools")
        markers = self.service.marker_tokens.ids
        try:
            yield forced.CallForms(self._callable, self._tool, markers, self.choice.several)
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise ApiError(400, f"tools have no grammar: {error}", "tools") from None
