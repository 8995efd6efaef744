"""Which tools a chat may, must or must not call: ``tool_choice`` of a request, and the JSON schema that forces calls."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jspec.serving.openai.errors import ApiError, wrong
from jspec.serving.openai.protocol import ChatRequest

FORMS = '"none", "auto", "required" or {"type": "function", "function": {"name": ".."}}'


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """What a request says of calls.

    Attributes:
      kind: ``none``, ``auto`` (the model decides), ``required`` (at least one call) or ``named`` (one call of ``name``).
      name: of the tool that has to be called, for ``named``.
      several: whether there may be several calls.
    """

    kind: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    several: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether a grammar makes the model call."""
        return self.kind in ("required", "named")


def choice_of(request: ChatRequest) -> ToolChoice:
    """The choice of a request, ``none`` where it has no tools.

    Raises:
      ApiError: 400; the field is malformed, or asks for a call of a tool that is not there.
    """
    given, tools, several = request.tool_choice, request.tools or [], request.parallel_tool_calls is not False
    if isinstance(given, Mapping):
        return ToolChoice("named", _named(given, [_function(tool)["name"] for tool in tools]), False)
    if given not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", given, FORMS)
    if given == "required" and not tools:
        raise wrong("tool_choice", given, "tools beside it")
    if not tools or given == "none":
        return ToolChoice("none")
    return ToolChoice("required" if given == "required" else "auto", several=several)


def forced_schema(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> dict[str, Any]:
    """The JSON schema of a text that is a call: the arguments of the named tool, or, as in vLLM, a list of names and
    parameters.

    The schema of each tool's parameters is a definition, in which references to its own root are rewritten, since tools may
    have definitions of the same name."""
    functions = {function["name"]: function for function in map(_function, tools)}
    if choice.kind == "named":
        return dict(_parameters(functions[choice.name]))
    definitions = {name: _moved(_parameters(function), _place(name)) for name, function in functions.items()}
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": _place(name)}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name in functions
    ]
    one_call = {} if choice.several else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **one_call, "items": {"anyOf": calls}, "$defs": definitions}


def _named(given: Mapping[str, Any], names: Sequence[str]) -> str:
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type", "function") != "function" or not isinstance(name, str):
        raise wrong("tool_choice", given, FORMS)
    if name not in names:
        among = f"one of {', '.join(names)}" if names else "tools beside it"
        raise ApiError(400, f"tool_choice.function.name={name[:64]!r}: expected {among}", "tool_choice")
    return name


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool; ``chat_prompt`` refuses what is none, and names the place."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return {**function, "name": name} if isinstance(name, str) else {"name": ""}


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    given = function.get("parameters")
    return given if isinstance(given, Mapping) and given else {"type": "object", "properties": {}}


def _place(name: str) -> str:
    """The JSON pointer of a definition."""
    return f"#/$defs/{name.replace('~', '~0').replace('/', '~1')}"


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root, ``#..``, lead to ``place``."""
    text = json.dumps(schema)  # a copy, of values that came as JSON
    return _with_references(json.loads(text), place)


def _with_references(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_with_references(item, place) for item in value]
    if not isinstance(value, dict):
        return value
    moved = {name: _with_references(item, place) for name, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
