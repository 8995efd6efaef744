"""Which tools a chat may, must or must not call: ``tool_choice`` of a request."""

import dataclasses
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
        return ToolChoice("named", _named(given, [name_of(tool) for tool in tools]), False)
    if given not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", given, FORMS)
    if given == "required" and not tools:
        raise wrong("tool_choice", given, "tools beside it")
    if not tools or given == "none":
        return ToolChoice("none")
    return ToolChoice("required" if given == "required" else "auto", several=several)


def callable_tools(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Mapping[str, Any]]:
    """The tools that the model may call by a choice that forces it."""
    return [tool for tool in tools if choice.kind != "named" or name_of(tool) == choice.name]


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool's function; empty if it has none, which ``chat_prompt`` refuses with its place."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _named(given: Mapping[str, Any], names: Sequence[str]) -> str:
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if given.get("type", "function") != "function" or not isinstance(name, str):
        raise wrong("tool_choice", given, FORMS)
    if name not in names:
        among = f"one of {', '.join(names)}" if names else "tools beside it"
        raise ApiError(400, f"tool_choice.function.name={name[:64]!r}: expected {among}", "tool_choice")
    return name
