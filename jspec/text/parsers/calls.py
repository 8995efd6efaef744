"""What a format reads from and writes to while it reads calls."""

import re
from collections.abc import Mapping, Sequence

from jspec.text.parsers.output import Output
from jspec.text.parsers.reader import BrokenError, Reader
from jspec.text.parsers.schema_types import Types, functions_by_name, parameter_types

NAME = re.compile(r"""[^\s<>"'{}()\[\],;=\ud800-\udfff]{1,128}""")


def begins_name(text: str) -> bool:
    """Whether a name may begin so, perhaps in blanks."""
    return not text.strip() or bool(NAME.fullmatch(text.strip()))


class Calls:
    """The calls of a completion, with the tools that they may be of.

    Args:
      reader, output: of the completion.
      tools: as in OpenAI's requests; None if they are not known.

    Attributes:
      count: how many have arguments.
    """

    def __init__(self, reader: Reader, output: Output, tools: Sequence[Mapping] | None):
        self.reader, self.count = reader, 0
        self._output = output
        self._committed = False
        self._tools = None if tools is None else functions_by_name(tools)

    def may_begin(self, text: str) -> bool:
        """Whether the name of a tool may begin so, perhaps in blanks and quotes."""
        name = self.restore(text).strip(" \t\r\n\"'")
        if self._tools is None:
            return not name or bool(NAME.fullmatch(name))
        return any(tool.startswith(name) for tool in self._tools)

    def types(self, name: str) -> Mapping[str, Types]:
        """The types of the tool's parameters that its schema names."""
        function = (self._tools or {}).get(name)
        return {} if function is None else parameter_types(function)

    def start(self, name: str, id: str | None = None):
        """Name a call. What was kept of the text is kept until ``commit``.

        Raises:
          BrokenError: this is not the name of a tool.
        """
        if not NAME.fullmatch(name) or (self._tools is not None and self.restore(name) not in self._tools):
            raise BrokenError
        self._output.start(name, id)
        self._committed = False

    def commit(self):
        """From here on this is a call, and what was kept of the text is read."""
        if not self._committed:
            self._committed = True
            self.reader.forget()
            self.count += 1

    def restore(self, text: str) -> str:
        """The model's text for a piece of the reader's."""
        return self._output.restore(text)

    def arguments(self, text: str):
        if text:
            self.commit()
        self._output.arguments(text)

    def end(self, complete: bool = True):
        """End the call. What follows is kept, until it is known to be markup or the next call.

        Raises:
          BrokenError: it has no arguments, so that it was none.
        """
        if not self._committed:
            raise BrokenError
        self._output.end(complete)
        self.reader.keep()
