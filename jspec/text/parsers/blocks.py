"""The output of a chat as a row of blocks: reasoning, text and calls, each of which begins, grows and ends."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Event

Kind = Literal["reasoning", "text", "call"]


@dataclasses.dataclass
class Block:
    """A part of the output.

    Attributes:
      kind: what it is.
      index: its place among the blocks.
      name: of the tool that is called; empty for other kinds.
      id: of the call, where the model's format has one or wants one of a kind.
      text: so far: the reasoning, the text, or the JSON of the call's arguments.
    """

    kind: Kind
    index: int
    name: str = ""
    id: str | None = None
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Step:
    """What happens to a block: it begins, ``text`` is added, or it ends."""

    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""


class Blocks:
    """Collects the events of one text.

    Args:
      several_calls: whether there may be several calls; if not, those after the first are left out.
      shows_reasoning: whether there are blocks of reasoning.
      new_id: makes the ids of calls that the model gave none.

    Attributes:
      done: the blocks that have begun.
      has_reasoning: whether there was any, shown or not.
    """

    def __init__(
        self,
        several_calls: bool = True,
        shows_reasoning: bool = True,
        new_id: Callable[[], str | None] = lambda: None,
    ):
        self._several, self._shows_reasoning, self._new_id = several_calls, shows_reasoning, new_id
        self.done: list[Block] = []
        self.has_reasoning = False
        self._open: Block | None = None
        self._left_out = False  # whether the call that is under way is

    @property
    def has_call(self) -> bool:
        return any(block.kind == "call" for block in self.done)

    def add(self, events: Iterable[Event], ended: bool = False) -> Iterator[Step]:
        """The steps of the next events, and of the end if they are the last."""
        for event in events:
            yield from self._of(event)
        if ended:
            yield from self._end()

    def _of(self, event: Event) -> Iterator[Step]:
        if isinstance(event, CallStart):
            self._left_out = self.has_call and not self._several
            if not self._left_out:
                yield from self._begin("call", event.name, event.id or self._new_id())
        elif isinstance(event, CallArguments):
            if not self._left_out:
                yield from self._more(event.text)
        elif isinstance(event, CallEnd):
            if not self._left_out:
                yield from self._end()
            self._left_out = False
        elif event.text:
            kind: Kind = "text" if isinstance(event, Content) else "reasoning"
            if kind == "reasoning":
                self.has_reasoning = True
                if not self._shows_reasoning:
                    return
            if self._open is None or self._open.kind != kind:
                yield from self._begin(kind)
            yield from self._more(event.text)

    def _begin(self, kind: Kind, name: str = "", id: str | None = None) -> Iterator[Step]:
        yield from self._end()
        self._open = Block(kind, len(self.done), name, id)
        self.done.append(self._open)
        yield Step("begin", self._open)

    def _more(self, text: str) -> Iterator[Step]:
        if self._open is not None and text:
            self._open.text += text
            yield Step("more", self._open, text)

    def _end(self) -> Iterator[Step]:
        if self._open is None:
            return
        if self._open.kind == "call" and not self._open.text:
            yield from self._more("{}")  # clients take an empty text for broken JSON
        ended, self._open = self._open, None
        yield Step("end", ended)


def as_message(blocks: Sequence[Block], id_of: Callable[[Block], str]) -> dict[str, Any]:
    """The blocks as a message of a conversation, in OpenAI's form.

    Args:
      id_of: gives the id of a call.
    """
    texts = {kind: [block.text for block in blocks if block.kind == kind] for kind in ("text", "reasoning")}
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["text"])}
    if texts["reasoning"]:
        message["reasoning_content"] = "\n".join(texts["reasoning"])
    calls = [block for block in blocks if block.kind == "call"]
    if calls:
        message["tool_calls"] = [
            {"id": id_of(call), "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in calls
        ]
    return message
