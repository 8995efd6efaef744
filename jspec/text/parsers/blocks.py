"""The output of a chat as a row of blocks: reasoning, text and calls, each of which begins, grows and ends."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Cut, Event

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
      complete: False once the text was cut within it, or the call broke off.
    """

    kind: Kind
    index: int
    name: str = ""
    id: str | None = None
    text: str = ""
    complete: bool = True


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
      holds: whether the calls of a tool are told as a whole: those that are incomplete are left out.

    Attributes:
      done: the blocks that have begun.
      has_reasoning: whether there was any, shown or not.
      is_broken: whether a call is incomplete, or something was left out at the end because it may have become one.
    """

    def __init__(
        self,
        several_calls: bool = True,
        shows_reasoning: bool = True,
        new_id: Callable[[], str | None] = lambda: None,
        holds: Callable[[str], bool] = lambda name: False,
    ):
        self._several, self._shows_reasoning, self._new_id = several_calls, shows_reasoning, new_id
        self._holds = holds
        self.done: list[Block] = []
        self.has_reasoning = self.is_broken = False
        self._open: Block | None = None
        self._left_out = False  # whether the call that is under way is

    @property
    def has_call(self) -> bool:
        return any(block.kind == "call" for block in self.done)

    def add(self, events: Iterable[Event], ended: bool = False, complete: bool = True) -> Iterator[Step]:
        """The steps of the next events, and of the end, of a text that is complete or not, if they are the last."""
        for event in events:
            yield from self._of(event)
        if ended:
            yield from self._end(complete)

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
                self.is_broken = self.is_broken or not event.complete
                yield from self._end(event.complete)
            self._left_out = False
        elif isinstance(event, Cut):
            self.is_broken = True
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
        if not self._is_held:
            self.done.append(self._open)
            yield Step("begin", self._open)

    @property
    def _is_held(self) -> bool:
        return self._open is not None and self._open.kind == "call" and self._holds(self._open.name)

    def _more(self, text: str) -> Iterator[Step]:
        if self._open is None or not text:
            return
        self._open.text += text
        if not self._is_held:
            yield Step("more", self._open, text)

    def _end(self, complete: bool = True) -> Iterator[Step]:
        if self._open is None:
            return
        held, ended, self._open = self._is_held, self._open, None
        ended.complete = complete
        if held and not complete:
            return
        if held:
            self.done.append(ended)
            yield from (Step("begin", ended), Step("more", ended, ended.text))
        yield Step("end", ended)


def as_message(blocks: Sequence[Block], id_of: Callable[[Block], str]) -> dict[str, Any]:
    """The blocks as a message of a conversation, in OpenAI's form, without calls that are incomplete.

    Args:
      id_of: gives the id of a call.
    """
    texts = {kind: [block.text for block in blocks if block.kind == kind] for kind in ("text", "reasoning")}
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts["text"])}
    if texts["reasoning"]:
        message["reasoning_content"] = "\n".join(texts["reasoning"])
    calls = [block for block in blocks if block.kind == "call" and block.complete]
    if calls:
        message["tool_calls"] = [
            {"id": id_of(call), "type": "function", "function": {"name": call.name, "arguments": call.text}}
            for call in calls
        ]
    return message
