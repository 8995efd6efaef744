"""The tools of ``/v1/responses`` as functions of a chat, and calls of these in the form of the tools.

A tool of a namespace is the function ``<namespace>__<name>``. A custom tool, whose input is any text, is a function with one
argument, ``input``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.serving.generation.tool_choice import ALLOWED
from jspec.serving.http.errors import flag, shown, wrong
from jspec.text.parsers.schema_types import json_object

FORMS = '"none", "auto", "required", {"type": "function", "name": ".."} or {"type": "allowed_tools", "mode": .., ..}'
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclasses.dataclass(frozen=True)
class Tool:
    """Where a function comes from.

    Attributes:
      name: of the tool, without the namespace.
      namespace: empty if it is in none.
      custom: whether its input is any text.
    """

    name: str
    namespace: str = ""
    custom: bool = False


class Tools:
    """The tools of a request.

    Args:
      given: the field ``tools``.

    Attributes:
      functions: OpenAI's dictionaries of functions, for a chat.
      left_out: those that a server would carry out itself, which jspec does not.
      kinds: their types.

    Raises:
      ApiError: 400, with the path of what is wrong.
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]):
        self.functions: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.kinds = list[Any]()
        self._origins: dict[str, Tool] = {}
        for index, tool in enumerate(given):
            self._add(f"tools[{index}]", tool, "")

    def origin(self, function: str) -> Tool:
        """The tool of a function; one of this name if there is none."""
        return self._origins.get(function, Tool(function))

    def function(self, name: str, namespace: str = "") -> str:
        """The function of a tool."""
        return f"{namespace}__{name}" if namespace else name

    def _add(self, path: str, tool: Mapping[str, Any], namespace: str):
        kind, name = tool.get("type", "function"), tool.get("name")
        if kind == "namespace" and not namespace:
            inner = tool.get("tools")
            if not isinstance(name, str) or not name or not isinstance(inner, list):
                raise wrong(path, tool, '{"type": "namespace", "name": "..", "tools": [..]}')
            for index, other in enumerate(inner):
                where = f"{path}.tools[{index}]"
                if not isinstance(other, Mapping):
                    raise wrong(where, other, '{"type": "function", "name": "..", "parameters": {..}}')
                self._add(where, other, name)
            return
        if kind not in ("function", "custom"):
            self.left_out.append(f"{path}.type={shown(kind)}")
            self.kinds.append(kind)
            return
        if not isinstance(name, str) or not name:
            raise wrong(f"{path}.name", name, "the name of a function")
        parameters = INPUT if kind == "custom" else tool.get("parameters")
        if not (parameters is None or isinstance(parameters, Mapping)):
            raise wrong(f"{path}.parameters", parameters, "a JSON schema, which is an object")
        function = {"name": self.function(name, namespace), "description": _description(tool)}
        function |= {"parameters": parameters or {"type": "object", "properties": {}}}
        function |= {"strict": True} if flag(f"{path}.strict", tool.get("strict")) else {}
        self._origins[function["name"]] = Tool(name, namespace, kind == "custom")
        self.functions.append({"type": "function", "function": {k: v for k, v in function.items() if v is not None}})


def _description(tool: Mapping[str, Any]) -> Any:
    """The description of a tool, with the grammar of its input, which the model would not know else."""
    description, form = tool.get("description"), tool.get("format")
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        return description
    grammar = f"Its input has this {form.get('syntax')} grammar:\n{form.get('definition')}"
    return f"{description}\n{grammar}" if description else grammar


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments of its function."""
    text = (json_object(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


def choice_of(given: Any, tools: Tools) -> Any:
    """``tool_choice`` in the form of a chat.

    Raises:
      ApiError: 400; it is malformed, or names none of the tools.
    """
    if not isinstance(given, Mapping):
        return given
    kind, mode, listed = given.get("type"), given.get("mode"), given.get("tools")
    if kind in ("function", "custom"):
        return _function_of("tool_choice", given, tools)
    if kind == ALLOWED and isinstance(listed, list):
        functions = [
            _function_of(f"tool_choice.tools[{index}]", tool, tools)
            for index, tool in enumerate(listed)
            if not (isinstance(tool, Mapping) and tool.get("type") in tools.kinds)  # which nothing calls
        ]
        return {"type": ALLOWED, ALLOWED: {"mode": mode, "tools": functions}}
    raise wrong("tool_choice", given, FORMS)


def _function_of(path: str, given: Any, tools: Tools) -> dict[str, Any]:
    """The function of a chat that ``{"type": "function", "name": ..}`` names."""
    name = given.get("name") if isinstance(given, Mapping) and given.get("type") in ("function", "custom") else None
    if not isinstance(name, str):
        raise wrong(path, given, '{"type": "function", "name": ".."}')
    function = tools.function(name, str(given.get("namespace") or ""))
    names = [tool["function"]["name"] for tool in tools.functions]
    if function not in names:
        raise wrong(f"{path}.name", function, f"one of {', '.join(names)}")
    return {"type": "function", "function": {"name": function}}
