"""Collects the events of a completion, and leaves out the blanks that are markup."""

from collections.abc import Callable

from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning


class Output:
    """The events since the last ``take``.

    Blanks before and between calls, and after the last, belong to the format: content that is blank up to a call or up to
    reasoning is dropped, and so is blank content behind a call at the end. Newlines at the end of reasoning are dropped,
    unless the text ends there.

    Args:
      restore: makes the model's text from the lexer's.

    Attributes:
      open: whether a call has begun and not ended.
      fresh: whether there is no content but blanks since the start, the last call or the last reasoning.
      thought: whether the current reasoning has any text but newlines.
    """

    def __init__(self, restore: Callable[[str], str]):
        self.open, self.fresh, self.thought = False, True, False
        self.restore = restore
        self._events = list[tuple[type, list[str]] | Event]()
        self._blank, self._newlines = list[str](), list[str]()
        self._called = False  # whether a call was the last event that is no content

    def content(self, text: str):
        if self.fresh and (not text or text.isspace()):
            self._blank.append(text)
            return
        self._add(Content, "".join([*self._blank, text]))
        self._blank, self.fresh = [], False

    def reasoning(self, text: str):
        kept = text.rstrip("\n")
        if kept:
            self._add(Reasoning, "".join([*self._newlines, kept]))
            self._newlines, self.thought = [], True
        self._newlines.append(text[len(kept) :])

    def begin_reasoning(self):
        """Drop blank content before the reasoning, and newlines at its start."""
        self._blank, self._newlines = [], []
        self.fresh, self.thought, self._called = True, False, False

    def end_reasoning(self):
        """Drop the newlines at its end."""
        self._newlines, self.fresh, self._called = [], True, False

    def start(self, name: str, id: str | None):
        self._blank, self._newlines, self.fresh, self._called = [], [], True, True
        self._events.append(CallStart(self.restore(name), id if id is None else self.restore(id)))
        self.open = True

    def arguments(self, text: str):
        self._add(CallArguments, text)

    def end(self):
        """End the call, if one is open."""
        if self.open:
            self._events.append(CallEnd())
        self.open = False

    def finish(self):
        """End what is open, after the last text."""
        self.end()
        if self._newlines:
            self._add(Reasoning, "".join(self._newlines))
        if self._blank and not self._called:
            self._add(Content, "".join(self._blank))
        self._blank, self._newlines = [], []

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return [event[0]("".join(event[1])) if isinstance(event, tuple) else event for event in events]

    def _add(self, kind: type, text: str):
        if not text:
            return
        text, last = self.restore(text), self._events[-1] if self._events else None
        if isinstance(last, tuple) and last[0] is kind:
            last[1].append(text)
        else:
            self._events.append((kind, [text]))
