"""Which tools a chat may, must or must not call: ``tool_choice`` of a request."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jspec.serving.generation.protocol import ChatRequest
from jspec.serving.http.errors import ApiError, wrong

ALLOWED = "allowed_tools"
FUNCTION = '{"type": "function", "function": {"name": ".."}}'
FORMS = f'"none", "auto", "required", {FUNCTION} or {{"type": "allowed_tools", ..}}'
ALLOWED_FORM = '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [{..}]}}'


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """What a request says of calls.

    Attributes:
      kind: ``none``, ``auto`` (the model decides), ``required`` (at least one call) or ``named`` (one call of ``name``).
      name: of the tool that has to be called, for ``named``.
      allowed: names of the tools that may be called, if not all of them; the prompt has the others, too.
      several: whether there may be several calls.
    """

    kind: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    several: bool = True
    allowed: frozenset[str] | None = None

    @property
    def is_forced(self) -> bool:
        """Whether a grammar makes the model call."""
        return self.kind in ("required", "named")

    def allows(self, name: str) -> bool:
        """Whether a tool may be called."""
        if self.kind in ("none", "named"):
            return self.kind == "named" and name == self.name
        return self.allowed is None or name in self.allowed


def choice_of(request: ChatRequest) -> ToolChoice:
    """The choice of a request, ``none`` where it has no tools.

    Raises:
      ApiError: 400; the field is malformed, or asks for a call of a tool that is not there.
    """
    wanted, tools, several = request.tool_choice, request.tools or [], request.parallel_tool_calls is not False
    if isinstance(wanted, Mapping) and wanted.get("type") == ALLOWED:
        return _allowed(wanted, [name_of(tool) for tool in tools], several)
    if isinstance(wanted, Mapping):
        return ToolChoice("named", _named(wanted, [name_of(tool) for tool in tools]), False)
    if wanted not in (None, "none", "auto", "required"):
        raise wrong("tool_choice", wanted, FORMS)
    if wanted == "required" and not tools:
        raise wrong("tool_choice", wanted, "tools beside it")
    if not tools or wanted == "none":
        return ToolChoice("none")
    return ToolChoice("required" if wanted == "required" else "auto", several=several)


def name_of(tool: Mapping[str, Any]) -> str:
    """The name of a tool's function; empty if it has none, which ``chat_prompt`` refuses with its place."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def _allowed(given: Mapping[str, Any], names: Sequence[str], several: bool) -> ToolChoice:
    field = given.get(ALLOWED)
    mode, listed = (field.get("mode"), field.get("tools")) if isinstance(field, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise wrong("tool_choice", given, ALLOWED_FORM)
    path = f"tool_choice.{ALLOWED}.tools"
    if mode == "required" and not listed:
        raise wrong(path, listed, "at least one of the tools, since a call is required")
    allowed = frozenset(_named(tool, names, f"{path}[{index}]") for index, tool in enumerate(listed))
    return ToolChoice(mode, several=several, allowed=allowed)


def _named(given: Any, names: Sequence[str], path: str = "tool_choice") -> str:
    is_function = isinstance(given, Mapping) and given.get("type", "function") == "function"
    function = given.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise wrong(path, given, FORMS if path == "tool_choice" else FUNCTION)
    if name not in names:
        among = f"one of {', '.join(names)}" if names else "tools beside it"
        raise ApiError(400, f"{path}.function.name={name[:64]!r}: expected {among}", "tool_choice")
    return name
