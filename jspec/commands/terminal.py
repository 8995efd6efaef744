"""A completion on the screen while it grows, with accepted drafts in another colour than what the target drew."""

import os
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from jspec.outputs import DRAFT, Result
from jspec.text.token_spans import Piece

DRAWN, ACCEPTED, NOTE = Style(bold=True), Style(color="green"), Style(dim=True)
# A text may hold codes that clear the screen or rename the window. A terminal is shown their symbols instead.
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}")


class Screen:
    """Standard output for text, and what is said about the text beside it.

    Only text goes to standard output if that is no terminal, without colours, and byte for byte. Notes then go to standard
    error.

    Args:
      plain: no colours on a terminal either.

    Attributes:
      is_terminal: whether standard output is one.
      coloured: whether text has colours: on a terminal that has them, unless ``NO_COLOR`` is set.
    """

    def __init__(self, plain: bool = False):
        self._out = sys.stdout
        self._console = Console(file=self._out, highlight=False)
        self.is_terminal = self._out.isatty()
        wanted = not plain and not os.environ.get("NO_COLOR")
        self.coloured = self.is_terminal and wanted and self._console.color_system is not None
        self._last = "\n"  # the end of what was written

    def write(self, pieces: Iterable[Piece]):
        """Add to the text."""
        shown = [(self._printable(text), ACCEPTED if source == DRAFT else DRAWN) for text, source in pieces if text]
        if shown:
            self._put(shown)
            self._last = shown[-1][0]

    def end_text(self):
        """End the text with a new line. A terminal gets none if the text ended with one."""
        if not (self.is_terminal and self._last.endswith("\n")):
            self._put([("\n", Style())])
        self._last = "\n"

    def leave_prompt(self):
        """Begin a new line behind a prompt at which the user typed Ctrl-C or Ctrl-D."""
        print(file=self._out if self.is_terminal else sys.stderr, flush=True)

    def note(self, text: str):
        """Say something about the text, on a line of its own."""
        if self.is_terminal:
            if not self._last.endswith("\n"):
                self.end_text()
            self._put([(self._printable(text), NOTE), ("\n", Style())])
        else:
            print(text, file=sys.stderr, flush=True)

    def legend(self):
        """Say what the colours mean, if there are any."""
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
        """The text as standard output can take it: what its encoding lacks, in Latin-1 for example, is replaced."""
        encoding = self._out.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
        return text.translate(CONTROLS) if self.is_terminal else text


def summary(result: Result, seconds: float) -> str:
    """How an answer went, on one line: acceptance length, the share of the drafts that were accepted, and speed.

    Args:
      result: the answer.
      seconds: from the request to its last token, the reading of the prompt included.
    """
    stats, count = result.stats, len(result.token_ids)
    drafts = (
        f"{stats.acceptance_rate:.0%} of {stats.num_draft_tokens} drafts accepted"
        if stats.num_draft_tokens
        else "no drafts"
    )
    tokens = f"{count} token{'' if count == 1 else 's'}, {count / max(seconds, 1e-9):.1f} tokens/s"
    ended = {"length": ", ended by the length limit", "abort": ", given up"}.get(result.finish_reason, "")
    return f"acceptance length {stats.mean_acceptance_length:.2f}, {drafts}, {tokens}{ended}"
