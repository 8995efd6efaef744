"""Forms that make a model call tools, and parsers of calls that no format marks."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.parsers.branches import UnheldError
from jspec.text.parsers.call_grammar import BLANKS, CallGrammar, Function, escaped, moved
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.events import Content, Event
from jspec.text.parsers.json_text import pass_call, pass_value
from jspec.text.parsers.lexer import Lexer
from jspec.text.parsers.output import Output
from jspec.text.parsers.parser import OutputParser
from jspec.text.parsers.reader import BrokenError, Reader, Steps
from jspec.text.parsers.tool_format import ReasoningFormat, ToolFormat


@dataclasses.dataclass(frozen=True)
class CallsForm:
    """The form of a text that calls tools.

    Attributes:
      params: the form, which the engine enforces.
      name: of the tool whose arguments are the whole text; None if there are names in the text.
      in_format: whether the calls are written in the model's own syntax; if not, they are JSON.
    """

    params: StructuredOutputsParams
    name: str | None
    in_format: bool


def calls_form(
    tools: Sequence[Mapping[str, Any]], tool: ToolFormat | None, tokens: Mapping[str, int], several: bool, named: bool
) -> CallsForm:
    """The form of one call, or of one or more.

    It has the model's own syntax if there is a grammar of it that holds the schemas. If not, it is vLLM's: a list of names
    and parameters in JSON, or the arguments alone of a tool that the request names.

    Args:
      tools: those that may be called, in OpenAI's form.
      tool: the format of the model's calls; None if it is not known.
      tokens: the ids of the tokenizer's added tokens by their text.
      several: whether there may be several calls.
      named: whether the request names the one tool.
    """
    functions, grammar = [Function.of(given) for given in tools], CallGrammar(tokens)
    if tool is not None:
        with contextlib.suppress(UnheldError):
            text = grammar.text(tool.grammar(grammar, functions, several))
            return CallsForm(StructuredOutputsParams(grammar=text), None, True)
    if named:
        [function] = functions
        return CallsForm(_as_json(function.parameters), function.name, False)
    return CallsForm(_as_json(list_schema(functions, several)), None, False)


def strict_form(
    tools: Sequence[Mapping[str, Any]], tool: ToolFormat | None, tokens: Mapping[str, int], several: bool
) -> StructuredOutputsParams | None:
    """The form of a text in which every call fits the schema of its tool, if that is strict; None if there is no such form.

    Text, reasoning among it, is free until a token comes that begins calls; so there has to be one. The grammar does not
    hold for end-of-text tokens, which may come wherever the text may end.

    Args:
      tools, tool, tokens, several: as of ``calls_form``.

    Raises:
      UnheldError: the format of calls cannot hold the schema of a strict tool.
    """
    if tool is None or tool.plain_begins or not tool.begins or tool.begins[0] not in tokens:
        return None
    functions, grammar = [_if_strict(given) for given in tools], CallGrammar(tokens)
    expression = tool.grammar(grammar, functions, several)
    return StructuredOutputsParams(grammar=grammar.text(grammar.among_text(expression, tool.markers)))


def or_calls(
    form: StructuredOutputsParams,
    tools: Sequence[Mapping[str, Any]],
    tool: ToolFormat | None,
    tokens: Mapping[str, int],
    several: bool,
) -> StructuredOutputsParams:
    """A form, in place of which there may be calls; the form alone if no format of calls is known.

    Args:
      form: of the answer.
      tools, tool, tokens, several: as of ``calls_form``.
    """
    if tool is None:
        return form
    grammar = CallGrammar(tokens)
    expression = tool.grammar(grammar, [_if_strict(given) for given in tools], several)
    return dataclasses.replace(form, alternative=grammar.text(expression))


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether a tool asks that its arguments fit its schema."""
    return tool.get("function", tool).get("strict") is True


def _if_strict(tool: Mapping[str, Any]) -> Function:
    """The function of a tool, with any arguments if it is not strict."""
    function = Function.of(tool)
    return function if is_strict(tool) else Function(function.name, {"type": "object"})


def _as_json(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(schema), whitespace_pattern=BLANKS)


def after_reasoning(
    form: StructuredOutputsParams,
    reasoning: ReasoningFormat | None,
    tokens: Mapping[str, int],
    prompt: str,
    answers: bool,
    begun: str = "",
) -> StructuredOutputsParams:
    """The form, before which the model may reason as its format of reasoning has it.

    Args:
      reasoning: the format; None if there is none.
      tokens: the ids of the tokenizer's added tokens by their text.
      prompt: the text before the completion, or its end.
      answers: whether the form is that of the answer, not of calls.
      begun: what of the prompt is the beginning of the model's message, by the request.
    """
    grammar = CallGrammar(tokens)
    before = "" if reasoning is None else reasoning.grammar(grammar, prompt, answers, begun)
    return dataclasses.replace(form, preamble=grammar.text(before)) if before.strip() else form


def list_schema(functions: Sequence[Function], several: bool) -> dict[str, Any]:
    """The schema of vLLM's list of calls: ``[{"name": .., "parameters": {..}}, ..]``.

    The schema of each tool's parameters is a definition, in which references to its own root are rewritten, since tools may
    have definitions of the same name."""
    places = {name: f"#/$defs/{escaped(name)}" for name, _ in functions}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, place in places.items()
    ]
    definitions = {name: moved(parameters, places[name]) for name, parameters in functions}
    one_call = {} if several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **one_call, "items": {"anyOf": calls}, "$defs": definitions}


class JsonCalls:
    """Parses a text that is JSON of calls, perhaps behind reasoning.

    Args:
      before: parses the reasoning; what it takes for content is the calls.
      name: of the tool whose arguments are the whole text; None if it is a list of calls.
    """

    def __init__(self, before: OutputParser, name: str | None):
        lexer = Lexer(())
        reader, output = Reader(lexer), Output(lexer.restore)
        steps = _read_calls(Calls(reader, output, None), output, name)
        self._before, self._calls = before, OutputParser(lexer, reader, output, steps)

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[Event]:
        """The events of the next piece, as of ``OutputParser``."""
        return self._called(self._before.feed(text, token_ids))

    def finish(self, *, ended: bool = False) -> list[Event]:
        """The rest of the events, after the last ``feed``, as of ``OutputParser``."""
        return [*self._called(self._before.finish(ended=ended)), *self._calls.finish(ended=ended)]

    def _called(self, events: list[Event]) -> list[Event]:
        called = list[Event]()
        for event in events:
            called += self._calls.feed(event.text) if isinstance(event, Content) else [event]
        return called


def _read_calls(calls: Calls, output: Output, name: str | None) -> Steps[None]:
    """Read the JSON of calls. What is left where it is cut goes to the content, which tells that something is missing."""
    calls.reader.keep()
    try:
        if name is None:
            yield from _read_list(calls)
        else:
            yield from calls.reader.blanks()
            calls.start(name)
            calls.end((yield from pass_value(calls.reader, calls.arguments, ())))
    except BrokenError:
        output.end(complete=False)
    output.content(calls.reader.forget())


def _read_list(calls: Calls) -> Steps[None]:
    reader, marker = calls.reader, None
    yield from reader.blanks()
    yield from reader.expect("[")
    while marker != "]":
        yield from reader.blanks()
        yield from pass_call(calls, ())
        yield from reader.blanks()
        marker = yield from reader.expect(",", "]")
    reader.forget()
