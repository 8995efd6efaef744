"""Completions of models with tools and reasoning, and the events that a parser makes of them."""

import dataclasses
from collections.abc import Mapping, Sequence

from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from jspec.text.parsers.schema_types import json_object


def function(name: str, **types) -> dict:
    """A tool as in OpenAI's requests, whose parameters have these types or schemas."""
    properties = {key: {"type": kind} if isinstance(kind, str | list) else kind for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "$defs": {"Count": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (
    function(
        "weather",
        city="string",
        days="integer",
        exact="boolean",
        share="number",
        tags="array",
        more="object",
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
        count={"$ref": "#/$defs/Count"},
    ),
    function("now"),
    function("f"),
    function("a.b"),
)


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A completion, and what it consists of.

    Attributes:
      events: ``("r", text)``, ``("c", text)``, and ``("call", name, arguments)`` with an id behind them if it has one. A
        call whose arguments are no JSON is incomplete.
    """

    name: str
    tool: str | None
    reasoning: str | None
    text: str
    events: tuple[tuple, ...]
    prompt: str = ""
    tools: Sequence[Mapping] | None = TOOLS

    def expected(self) -> list[Event]:
        events = list[Event]()
        for kind, *rest in self.events:
            if kind == "call":
                name, arguments, *id = rest
                events.append(CallStart(name, *id))
                events += [CallArguments(arguments), CallEnd(complete=json_object(arguments) is not None)]
            else:
                events.append((Reasoning if kind == "r" else Content)(*rest))
        return events


def table(tool: str | None, reasoning: str | None, *rows: tuple, **options) -> list[Transcript]:
    """Transcripts of one family: each row has a name, a text, and events, and perhaps more options at its end."""
    made = []
    for name, text, *events in rows:
        more = events.pop() if events and isinstance(events[-1], dict) else {}
        made.append(Transcript(f"{tool}-{name}", tool, reasoning, text, tuple(events), **(options | more)))
    return made


def merged(events: list[Event]) -> list[Event]:
    """The events with neighbours of one kind joined, for texts that were fed in pieces."""
    groups = list[list[Event]]()
    for event in events:
        if groups and type(groups[-1][0]) is type(event) and isinstance(event, Reasoning | Content | CallArguments):
            groups[-1].append(event)
        else:
            groups.append([event])
    return [_joined(group) for group in groups]


def _joined(group: list[Event]) -> Event:
    first = group[0]
    if len(group) == 1 or not isinstance(first, Reasoning | Content | CallArguments):
        return first
    return type(first)("".join(event.text for event in group if isinstance(event, type(first))))
