"""Collects the events of a completion, and leaves out the blanks that are markup."""

from collections.abc import Callable

from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Cut, Event, Reasoning


class Output:
    """The events since the last ``take``.

    A call begins with its first argument: one that is cut or breaks off before is none.

    Blanks before and between calls, and after the last, belong to the format: content that is blank up to a call or up to
    reasoning is dropped, and so is blank content behind a call at the end. Newlines at the end of reasoning are dropped,
    unless the text ends there.

    Args:
      restore: makes the model's text from the lexer's.

    Attributes:
      open: whether a call has been named and not ended.
      pending: its name and id, while it has no arguments.
      cut: whether the text has been cut, so that what is still to come was held back and cannot be told: it is left out.
      fresh: whether there is no content but blanks since the start, the last call or the last reasoning.
      thought: whether the current reasoning has any text but newlines.
    """

    def __init__(self, restore: Callable[[str], str]):
        self.open, self.fresh, self.thought, self.cut = False, True, False, False
        self.pending: CallStart | None = None
        self.restore = restore
        self._events = list[tuple[type, list[str]] | Event]()
        self._blank, self._newlines = list[str](), list[str]()
        self._called = False  # whether a call was the last event that is no content
        self._lacks = False  # whether anything was left out

    def content(self, text: str):
        if self._left_out(text):
            return
        if self.fresh and (not text or text.isspace()):
            self._blank.append(text)
            return
        self._add(Content, "".join([*self._blank, text]))
        self._blank, self.fresh = [], False

    def reasoning(self, text: str):
        thought = text.rstrip("\n")
        if self._left_out(text):
            return
        if thought:
            self._add(Reasoning, "".join([*self._newlines, thought]))
            self._newlines, self.thought = [], True
        self._newlines.append(text[len(thought) :])

    def begin_reasoning(self):
        """Drop blank content before the reasoning, and newlines at its start."""
        self._blank, self._newlines = [], []
        self.fresh, self.thought, self._called = True, False, False

    def end_reasoning(self):
        """Drop the newlines at its end."""
        self._newlines, self.fresh, self._called = [], True, False

    def start(self, name: str, id: str | None):
        self.pending = CallStart(self.restore(name), id if id is None else self.restore(id))
        self.open = True

    def arguments(self, text: str):
        if not text or self._left_out(text):
            return
        if self.pending:
            self._blank, self._newlines, self.fresh, self._called = [], [], True, True
            self._events.append(self.pending)
            self.pending = None
        self._add(CallArguments, text)

    def end(self, complete: bool = True):
        """End the call, if one is open."""
        if self.open and not self.pending:
            self._events.append(CallEnd(complete and not self._lacks))
        self.open, self.pending = False, None

    def finish(self, *, lacks: bool = False):
        """End what is open, after the last text, of which a part never came here if it ``lacks`` one."""
        self.end(complete=False)
        self.cut = False
        if self._newlines:
            self._add(Reasoning, "".join(self._newlines))
        if self._blank and not self._called:
            self._add(Content, "".join(self._blank))
        self._blank, self._newlines = [], []
        if lacks or self._lacks:
            self._events.append(Cut())

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return [event[0]("".join(event[1])) if isinstance(event, tuple) else event for event in events]

    def _add(self, kind: type, text: str):
        text, last = self.restore(text), self._events[-1] if self._events else None
        if isinstance(last, tuple) and last[0] is kind:
            last[1].append(text)
        else:
            self._events.append((kind, [text]))

    def _left_out(self, text: str) -> bool:
        """Whether a text comes too late to be told."""
        self._lacks = self._lacks or (self.cut and bool(text.strip()))
        return self.cut
