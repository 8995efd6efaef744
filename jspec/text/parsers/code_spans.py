"""Finds what a text in Markdown shows as code, where a call is an example."""

import re

RUNS = re.compile(r"\n|`+|~+|[^\n`~]+")
BEFORE_FENCE = re.compile(r"[ \t>*+\-0-9.)]*")  # a fence may stand in a list or a quotation
TAG = re.compile("[<\ud800-\udfff]")  # what a model writes right behind a fence of its own, unlike Markdown's languages
FENCE = 3  # characters of one, at least


class CodeSpans:
    """Whether the end of a text that comes in pieces lies within backticks, or within a fence.

    Backticks that are not closed end with their line, so that stray ones hide no call; with a marker behind them in the
    line they go on to the next empty line.

    Attributes:
      at_line_start: whether the line has nothing but blanks so far.
    """

    def __init__(self):
        self._fence = self._ticks = ""  # that are open
        self._run = ""  # the last one, which the next piece may go on with
        self._opened = False  # whether the fence has begun in this line
        self._closes = False  # whether the line is the end of the fence, if nothing follows in it
        self._goes_on = False  # whether the backticks go on in the next line
        self._may_fence = self.at_line_start = True

    def add(self, text: str):
        """Read the next piece."""
        for part in RUNS.findall(text):
            if self._run and part[0] != self._run[0]:
                self._settle()
            if part[0] in "`~":
                self._run += part
            elif part == "\n":
                self._fence = "" if self._closes else self._fence
                self._goes_on = self._goes_on and not self.at_line_start
                self._ticks = self._ticks if self._goes_on else ""
                self._opened = self._closes = False
                self._may_fence = self.at_line_start = True
            elif not part.isspace():
                if self._closes and TAG.match(part):
                    self._fence = ""
                self._closes = self.at_line_start = False
                self._may_fence = self._may_fence and bool(BEFORE_FENCE.fullmatch(part))

    def takes_marker(self) -> bool:
        """Whether a marker that comes next is code."""
        self._settle()
        self._goes_on = bool(self._ticks)
        return self._goes_on or bool(self._fence and not self._closes)

    def _settle(self):
        """Take the last run for what it is, since it has ended."""
        run, self._run = self._run, ""
        if not run:
            return
        begins, self._may_fence, self.at_line_start = self._may_fence, False, False
        if self._opened and run == self._fence:  # which was no fence, since one has no more of them in its line
            self._fence = ""
        elif self._fence:
            self._closes = begins and run.startswith(self._fence)
        elif begins and len(run) >= FENCE and not self._ticks:
            self._fence, self._opened = run, run[0] == "`"
        elif run[0] == "`":
            self._ticks = "" if run == self._ticks else self._ticks or run
