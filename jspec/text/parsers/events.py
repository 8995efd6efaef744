"""What a model's output consists of: reasoning, content and tool calls, each as the pieces that are known so far."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The next piece of the text in which the model thinks."""

    text: str


@dataclasses.dataclass(frozen=True)
class Content:
    """The next piece of the answer."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """The start of a tool call, which has been told no sooner than its arguments begin.

    Its ``CallEnd`` always follows, and ``CallArguments`` alone before.

    Attributes:
      name: of the tool, as the model wrote it.
      id: of the call, in the formats whose calls have one: ``functions.f:0`` of Kimi K2, ``[CALL_ID]`` of Mistral.
    """

    name: str
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments' JSON text. All pieces of a complete call, joined, are one JSON value."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallEnd:
    """The end of a tool call.

    Attributes:
      complete: whether the model ended it. If not, its arguments are the beginning of a JSON text.
    """

    complete: bool = True


@dataclasses.dataclass(frozen=True)
class Cut:
    """The text was cut within a marker or what may have become a call, which was left out. This is the last event."""


Event = Reasoning | Content | CallStart | CallArguments | CallEnd | Cut
