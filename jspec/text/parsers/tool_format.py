"""What a format of tool calls and one of reasoning say about themselves."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

from jspec.text.parsers.call_grammar import NEWLINES, CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.reader import Steps


class ToolFormat(ABC):
    """How a family of models writes tool calls.

    Attributes:
      markers: all markers that may be single tokens.
      begins: the markers that begin a call.
      plain_begins: plain text that begins a call in content.
      line_begins: plain text that begins a call at the start of a line.
      first_begins: plain text that begins a call where no content comes before.
      between: what stands between two calls in a grammar, as of ``CallGrammar.repeated``.
      is_whole: whether calls are all there is besides reasoning, so that nothing has to mark them.
    """

    markers: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    plain_begins: tuple[str, ...] = ()
    line_begins: tuple[str, ...] = ()
    first_begins: tuple[str, ...] = ()
    between: str = "\n"
    is_whole: bool = False

    @abstractmethod
    def read(self, calls: Calls, begin: str) -> Steps[None]:
        """Read one or more calls, after the marker that begins them.

        Raises:
          BrokenError: this is no call, or one that breaks off.
        """

    @abstractmethod
    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        """An expression for a call of this tool.

        Raises:
          UnheldError: the syntax cannot hold the schema of the tool.
        """

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        """An expression for a call of one of these tools, or for one or more if there may be several."""
        calls = [self.call_grammar(grammar, function) for function in functions]
        return grammar.repeated(calls, self.between, several)

    def new_id(self) -> str | None:
        """An id for a call, where the model's chat template takes only some; None for any id."""
        return None


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks the text in which it thinks.

    Attributes:
      start, end: around the reasoning.
      open: whether a completion begins with reasoning if the end of its prompt says nothing.
      markers: those that may be single tokens, if ``start`` and ``end`` are not.
      turns: what a chat template writes before the model's turn. The reasoning's start and end count behind the last.
      then: what the model writes behind ``end`` before anything else; empty if newlines may follow.
      answer: what it writes before its answer.
    """

    start: str = "<think>"
    end: str = "</think>"
    open: bool = True
    markers: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    then: str = ""
    answer: str = ""

    def opened_by(self, prompt: str, begun: str = "") -> bool:
        """Whether a completion of this prompt begins with reasoning; the arguments are those of ``said_by``."""
        said = self.said_by(prompt, begun)
        return self.open if said is None else said

    def grammar(self, grammar: CallGrammar, prompt: str, answers: bool, begun: str = "") -> str:
        """An expression for the reasoning that may come, or has to be ended, before a form; empty if none may.

        Args:
          prompt, begun: as of ``said_by``.
          answers: whether the form is that of the answer, not of calls.
        """
        if self.answer and prompt.rfind(self.answer) > prompt.rfind(self.end):
            return ""  # the answer is under way
        said, answer = self.said_by(prompt, begun), grammar.literal(self.answer) if answers else ""
        if said is False:
            return answer
        ended = grammar.text_until(self.end)
        rest = f"{ended} {grammar.literal(self.then) if self.then else NEWLINES}"
        return f"{rest} {answer}" if said else f"({grammar.literal(self.start)} {rest})? {answer}"

    def said_by(self, prompt: str, begun: str = "") -> bool | None:
        """Whether a prompt says that the model is reasoning, or that it is not; None if it says nothing.

        Args:
          prompt: the text before the completion, or its end.
          begun: the text at its end with which the request has begun the model's message, empty if it has not. As in a
            completion, the reasoning's start counts where no answer comes before. Text without it is an answer, unless the
            template has opened the reasoning.
        """
        if begun := begun.strip():
            _, ended, rest = begun.rpartition(self.end.rstrip())
            opened = rest.strip().removeprefix(self.then).startswith(self.start.rstrip())
            return opened or (not ended and self.said_by(prompt.rpartition(begun)[0]) is True)
        turn = max((prompt.rfind(marker) + len(marker) for marker in self.turns if marker in prompt), default=-1)
        if turn < 0:  # another template's prompt, of which only the very end is the model's turn
            written = prompt.rstrip()
            start, end = self.start.rstrip(), self.end.rstrip()
            return True if written.endswith(start) else False if written.endswith(end) else None
        opened, closed = prompt.rfind(self.start.rstrip(), turn), prompt.rfind(self.end.rstrip(), turn)
        return None if opened == closed else opened > closed
