"""Forms that make a model call tools, and calls that are JSON alone."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.schema import escaped
from jspec.text.parsers.branches import UnheldError
from jspec.text.parsers.call_grammar import BLANKS, CallGrammar, Function, moved
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_call, pass_value
from jspec.text.parsers.reader import Steps
from jspec.text.parsers.tool_format import ReasoningFormat, ToolFormat


@dataclasses.dataclass(frozen=True)
class CallsForm:
    """The form of a text that calls tools.

    Attributes:
      params: the form, which the engine enforces.
      format: in which the calls are written: the model's own, or JSON.
    """

    params: StructuredOutputsParams
    format: ToolFormat


@dataclasses.dataclass(frozen=True)
class CallForms:
    """Makes the forms of texts that may, or have to, call the tools of a request.

    Attributes:
      tools: those that may be called, in OpenAI's form.
      format: of the model's calls; None if it is not known.
      tokens: the ids of the tokenizer's added tokens by their text.
      several: whether there may be several calls.
    """

    tools: Sequence[Mapping[str, Any]]
    format: ToolFormat | None
    tokens: Mapping[str, int]
    several: bool

    def calls(self, named: bool) -> CallsForm:
        """The form of one call, or of one or more.

        It has the model's own syntax if there is a grammar of it that holds the schemas. If not, it is vLLM's: a list of
        names and parameters in JSON, or the arguments alone of the one tool if the request has ``named`` it.
        """
        functions, grammar = [Function.of(tool) for tool in self.tools], CallGrammar(self.tokens)
        if self.format is not None:
            with contextlib.suppress(UnheldError):
                text = grammar.text(self.format.grammar(grammar, functions, self.several))
                return CallsForm(StructuredOutputsParams(grammar=text), self.format)
        if named:
            [function] = functions
            return CallsForm(_as_json(function.parameters), JsonCalls(function.name))
        return CallsForm(_as_json(list_schema(functions, self.several)), JsonCalls(None))

    def strict(self) -> StructuredOutputsParams | None:
        """The form of a text in which every call fits the schema of its tool, if that is strict; None if there is none.

        Text, reasoning among it, is free until a token comes that begins calls; so there has to be one. The grammar does
        not hold for end-of-text tokens, which may come wherever the text may end.

        Raises:
          UnheldError: the format of calls cannot hold the schema of a strict tool.
        """
        format = self.format
        if format is None or format.plain_begins or not format.begins or format.begins[0] not in self.tokens:
            return None
        grammar, calls = self._strict_calls(format)
        return StructuredOutputsParams(grammar=grammar.text(grammar.among_text(calls, format.markers)))

    def beside(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        """The form of an answer, in place of which there may be calls; that form alone if no format of calls is known."""
        if self.format is None:
            return form
        grammar, calls = self._strict_calls(self.format)
        return dataclasses.replace(form, alternative=grammar.text(calls))

    def _strict_calls(self, format: ToolFormat) -> tuple[CallGrammar, str]:
        """A grammar, and its expression of calls, whose arguments are any where the tool is not strict."""
        grammar, functions = CallGrammar(self.tokens), [Function.of(tool) for tool in self.tools]
        pairs = zip(self.tools, functions, strict=True)
        functions = [one if is_strict(tool) else Function(one.name, {"type": "object"}) for tool, one in pairs]
        return grammar, format.grammar(grammar, functions, self.several)


def is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether a tool asks that its arguments fit its schema."""
    return tool.get("function", tool).get("strict") is True


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


@dataclasses.dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """Calls that are JSON alone: a list as of ``list_schema``, or the arguments of one tool.

    Attributes:
      name: of the tool whose arguments are the whole text; None if it is a list of calls.
    """

    name: str | None
    is_whole = True

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, marker = calls.reader, ","
        if self.name is not None:
            calls.start(self.name)
            calls.end((yield from pass_value(reader, calls.arguments, ())))
            return
        yield from reader.expect("[")
        while marker == ",":
            yield from reader.blanks()
            yield from pass_call(calls, ())
            yield from reader.blanks()
            marker = yield from reader.expect(",", "]")

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        raise NotImplementedError("their form is a JSON schema, not a part of a grammar")
