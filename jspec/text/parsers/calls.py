"""What a format reads from and writes to while it reads calls."""

import re
from collections.abc import Mapping, Sequence

from jspec.text.parsers.output import Output
from jspec.text.parsers.reader import BrokenError, Reader
from jspec.text.parsers.schema_types import Types, functions_by_name, parameter_types

NAME = re.compile(r"""[^\s<>"'{}()\[\],;=\ud800-\udfff]{1,128}""")


class Calls:
    """The calls of a completion, with the tools that they may be of.

    Args:
      reader, output: of the completion.
      tools: as in OpenAI's requests; None if they are not known.

    Attributes:
      count: how many have begun.
    """

    def __init__(self, reader: Reader, output: Output, tools: Sequence[Mapping] | None):
        self.reader, self.count = reader, 0
        self._output = output
        self._tools = None if tools is None else functions_by_name(tools)

    @property
    def open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._output.open

    def may_be(self, name: str) -> bool:
        """Whether there is such a tool, or the tools are not known."""
        return self._tools is None or name in self._tools

    def types(self, name: str) -> Mapping[str, Types]:
        """The types of the tool's parameters that its schema names."""
        function = (self._tools or {}).get(name)
        return {} if function is None else parameter_types(function)

    def start(self, name: str, id: str | None = None):
        """Begin a call. What was kept of the text is read.

        Raises:
          BrokenError: this is no name.
        """
        if not NAME.fullmatch(name):
            raise BrokenError
        self.reader.forget()
        self._output.start(name, id)
        self.count += 1

    def restore(self, text: str) -> str:
        """The model's text for a piece of the reader's."""
        return self._output.restore(text)

    def arguments(self, text: str):
        self._output.arguments(text)

    def end(self):
        """End the call. What follows is kept, until it is known to be markup or the next call."""
        self._output.end()
        self.reader.keep()
