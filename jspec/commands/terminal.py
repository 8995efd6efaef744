"""Prints a streamed completion on the terminal, with accepted drafts in colour, and its statistics."""

import os
import select
import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from jspec.outputs import DRAFT, Result
from jspec.text.token_spans import Span

DRAWN, ACCEPTED, NOTE = Style(bold=True), Style(color="green"), Style(dim=True)
DIMMED = Style(dim=True, bold=False)  # over the two of text
READER_LEFT = 141  # the exit code of a command whose standard output nobody reads any more: that of SIGPIPE
# A text may hold control codes that clear the screen or rename the window. A terminal gets their symbols instead.
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")


class Screen:
    """Writes streamed text to standard output, and notes about it.

    If standard output is not a terminal, it gets only the text, unchanged and without colours, and notes go to standard
    error.

    Args:
      plain: no colours, on a terminal too.

    Attributes:
      is_terminal: whether standard output is a terminal.
      coloured: whether text has colours: on a terminal that has them, unless ``NO_COLOR`` is set.
    """

    def __init__(self, plain: bool = False):
        self._out = opened(sys.stdout, "standard output")
        self._console = Console(file=self._out, highlight=False)
        self.is_terminal = self._out.isatty()
        wanted = not plain and not os.environ.get("NO_COLOR")
        self.coloured = self.is_terminal and wanted and self._console.color_system is not None
        self._last = "\n"  # the text written last

    def write(self, spans: Iterable[Span], dimmed: bool = False):
        """Append spans to the text, dimmed if they are no answer."""
        quiet = DIMMED if dimmed else Style()
        shown = [
            (self._printable(text), (ACCEPTED if source == DRAFT else DRAWN) + quiet) for text, source in spans if text
        ]
        if shown:
            self._put(shown)
            self._last = shown[-1][0]

    def end_text(self):
        """End the text with a newline. A terminal gets none if the text ended with one."""
        if not (self.is_terminal and self._last.endswith("\n")):
            self._put([("\n", Style())])
        self._last = "\n"

    def end_prompt_line(self):
        """Begin a new line after an input prompt at which the user typed Ctrl-C or Ctrl-D."""
        print(file=self._out if self.is_terminal else sys.stderr, flush=True)

    def note(self, text: str):
        """Print a note about the text on a line of its own."""
        if self.is_terminal:
            if not self._last.endswith("\n"):
                self.end_text()
            self._put([(self._printable(text), NOTE), ("\n", Style())])
        else:
            print(text, file=sys.stderr, flush=True)

    def legend(self):
        """Print what the colours mean, if there are any."""
        if self.coloured:
            words = [("drawn by the target", DRAWN), (", ", NOTE), ("drafted and accepted", ACCEPTED), ("\n", Style())]
            self._put(words)

    def _put(self, words: Sequence[tuple[str, Style]]):
        if self.coloured:  # a ``Segment`` is neither wrapped nor are its tabs replaced
            self._console.print(Segments([Segment(text, style) for text, style in words]), end="", soft_wrap=True)
        else:
            self._out.write("".join(text for text, _ in words))
        self._out.flush()

    def _printable(self, text: str) -> str:
        """The text with characters that the output's encoding lacks replaced, and control codes if it is a terminal."""
        encoding = self._out.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        return text.translate(CONTROLS) if self.is_terminal else text


def opened(stream: TextIO | None, name: str) -> TextIO:
    """A standard stream of the process, which Python has as None if the shell closed it, with ``<&-`` for example.

    Raises:
      ValueError: it is closed.
    """
    if stream is None or stream.closed:
        raise ValueError(f"{name} is closed: expected a terminal, a pipe or a file; /dev/null will do")
    return stream


def reader_left() -> bool:
    """Whether standard output is a pipe whose reader has gone, as ``head`` does. What is left to write then goes nowhere."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
        left = _is_broken(sys.stdout)
    except BrokenPipeError:
        left = True
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes the rest when it ends
    return left


def _is_broken(stream: TextIO) -> bool:
    """Whether a pipe has lost its reader, which an unbuffered stream has forgotten after its error."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # Windows has no poll, and a stream in memory has no number
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def summary(result: Result, seconds: float) -> str:
    """The statistics of a completion on one line: acceptance length, share of accepted drafts, and speed.

    Args:
      result: the completion.
      seconds: from the request to its last token, prefill included.
    """
    stats, count = result.stats, len(result.token_ids)
    drafts = (
        f"{stats.acceptance_rate:.0%} of {stats.num_draft_tokens} drafts accepted"
        if stats.num_draft_tokens
        else "no drafts"
    )
    tokens = f"{count} token{'' if count == 1 else 's'}, {count / max(seconds, 1e-9):.1f} tokens/s"
    ended = {"length": ", ended by the length limit", "abort": ", aborted"}.get(result.finish_reason, "")
    return f"acceptance length {stats.mean_acceptance_length:.2f}, {drafts}, {tokens}{ended}"
