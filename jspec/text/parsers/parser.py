"""Parses the output of a model while it comes."""

import dataclasses
from collections.abc import Mapping, Sequence

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.document import read_document
from jspec.text.parsers.events import Event
from jspec.text.parsers.formats.openai import OPENAI, read_harmony
from jspec.text.parsers.lexer import Lexer, MarkerTokens
from jspec.text.parsers.output import Output
from jspec.text.parsers.reader import Reader, Steps
from jspec.text.parsers.registry import OPENAI_GPTOSS, REASONING_FORMATS, reasoning_format, tool_format
from jspec.text.parsers.tool_format import ReasoningFormat, ToolFormat

THINK = tuple(
    marker for form in REASONING_FORMATS.values() if form is not OPENAI_GPTOSS for marker in (form.start, form.end)
)


class OutputParser:
    """Turns the text of one completion into events of reasoning, content and tool calls, as it comes.

    However the text and its tokens are divided into pieces, the events are the same, but for how the texts of neighbouring
    events of one kind are divided. No input is an error: what cannot be read as a call is content, with its markers. The
    time is linear in the length of the text. Not thread-safe.

    Args:
      lexer: of the completion.
      reader: of the completion.
      output: where ``steps`` puts the events.
      steps: reads the completion.
    """

    def __init__(self, lexer: Lexer, reader: Reader, output: Output, steps: Steps[None]):
        self._lexer, self._reader, self._output, self._steps = lexer, reader, output, steps

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """The events of the next piece.

        Args:
          text: the next piece of the completion, with its special tokens shown.
          token_ids: the next tokens. No text comes before its tokens, but it may be held back until later ones have come.
        """
        if self._reader.ended:
            return []
        if added := self._lexer.feed(text, token_ids):
            self._reader.add(added)
            next(self._steps, None)
        return self._output.take()

    def finish(self, *, ended: bool = False) -> list[Event]:
        """The rest of the events, after the last ``feed``. A call that is open ends.

        Args:
          ended: whether the model has ended there, so that what might have become a call or a marker is text. If not, it is
            left out, and the last event is ``Cut``.
        """
        if self._reader.ended:
            return []
        rest, part = self._lexer.finish()
        self._reader.add(rest + part if ended else rest)
        next(self._steps, None)
        self._reader.ended, self._output.cut = True, not ended
        next(self._steps, None)
        self._output.finish(lacks=not ended and bool(part))
        return self._output.take()


def make_parser(
    tool: str | ToolFormat | None,
    reasoning: str | ReasoningFormat | None,
    *,
    tools: Sequence[Mapping] | None = None,
    tokens: MarkerTokens | None = None,
    prompt: str = "",
    begun: str = "",
    begins_open: bool | None = None,
) -> OutputParser:
    """A parser for one completion.

    Args:
      tool: a format of calls, or a name of ``TOOL_FORMATS``; None leaves calls in the content.
      reasoning: a format of reasoning, or a name of ``REASONING_FORMATS``; None leaves reasoning in the content.
      tools: the request's, as OpenAI's dictionaries: ``{"type": "function", "function": {"name", "parameters"}}``.
      tokens: the tokenizer's markers, with this completion's prompt. Without them, markers are found in the text.
      prompt: the end of the prompt's text, from which follows whether the completion begins with reasoning.
      begun: what of it is the beginning of the model's message, by the request.
      begins_open: whether it does if the prompt does not say; None is as the format has it.

    Raises:
      ValueError: there is no such format.

    Example::

        parser = make_parser("hermes", "qwen3", prompt="<|im_start|>assistant\\n<think>\\n")
        parser.feed("The weather.</think>\\n\\n<tool_call>\\n{\\"name\\": \\"weather\\", ")
        # [Reasoning(text='The weather.')]
        parser.feed("\\"arguments\\": {}}\\n</tool_call>")
        # [CallStart(name='weather', id=None), CallArguments(text='{}'), CallEnd(complete=True)]
    """
    calls_as = tool_format(tool) if isinstance(tool, str) else tool
    thinks_as = reasoning_format(reasoning) if isinstance(reasoning, str) else reasoning
    is_whole = calls_as is not None and calls_as.is_whole
    harmony = calls_as is OPENAI or (thinks_as is OPENAI_GPTOSS and not is_whole)
    if harmony:
        markers = OPENAI.markers
    else:
        thoughts = () if thinks_as is None else thinks_as.markers or (thinks_as.start, thinks_as.end)
        markers = (*(calls_as.markers if calls_as else ()), *thoughts)
    if thinks_as is not None and begins_open is not None:
        thinks_as = dataclasses.replace(thinks_as, open=begins_open)
    lexer = Lexer(markers, THINK, tokens)
    reader, output = Reader(lexer), Output(lexer.restore)
    calls = Calls(reader, output, tools)
    if harmony:
        steps = read_harmony(calls, output, prompt, with_calls=calls_as is not None)
    else:
        steps = read_document(reader, output, calls, calls_as, thinks_as, prompt, begun)
    return OutputParser(lexer, reader, output, steps)
