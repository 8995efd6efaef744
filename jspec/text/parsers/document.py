"""Reads a whole completion: reasoning, content and calls in turn."""

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.output import Output
from jspec.text.parsers.reader import BrokenError, Reader, Steps
from jspec.text.parsers.tool_format import ReasoningFormat, ToolFormat


def read_document(
    reader: Reader,
    output: Output,
    calls: Calls,
    tool: ToolFormat | None,
    reasoning: ReasoningFormat | None,
    prompt: str,
    begun: str = "",
) -> Steps[None]:
    """Read a completion.

    One newline behind the reasoning's start, and all newlines before and behind its end, are markup. Reasoning ends at its
    end, or at a call. The reasoning's start counts where no content comes before, and its end within reasoning; elsewhere
    they are text.

    Args:
      reader, output, calls: of the completion.
      tool, reasoning: the formats; None if markers of that kind are text.
      prompt: the text before the completion, or its end.
      begun: what of it is the beginning of the model's message, by the request. An answer there comes before as content.
    """
    begins = tool.begins if tool else ()
    in_content = (*begins, *(tool.plain_begins + tool.first_begins if tool else ()))
    starts = () if reasoning is None else (reasoning.start,)
    thinking = reasoning is not None and reasoning.opened_by(prompt, begun)
    answers = not thinking and bool((begun.rpartition(reasoning.end)[2] if reasoning else begun).strip())
    if thinking and reasoning and prompt.endswith(reasoning.start):
        yield from reader.match("\n")
    while True:
        if thinking and reasoning:
            marker = yield from reader.until((reasoning.end, *starts, *begins), output.reasoning)
            if marker == reasoning.start and not output.thought:
                output.begin_reasoning()
                yield from reader.match("\n")
                continue
            if marker == reasoning.end:
                output.end_reasoning()
                thinking = False
                while (yield from reader.match("\n")):
                    pass
                continue
        else:
            marker = yield from reader.until((*starts, *in_content), output.content)
            if reasoning and marker == reasoning.start and output.fresh and not answers:
                output.begin_reasoning()
                thinking = True
                yield from reader.match("\n")
                continue
        if marker is None:
            return
        plain = output.reasoning if thinking else output.content
        first = output.fresh and not calls.count and not answers
        if tool and (marker in begins or marker in tool.plain_begins or (first and marker in tool.first_begins)):
            reader.keep(marker)
            called = yield from _read_calls(reader, output, calls, tool, marker)
            thinking = thinking and not called
            if text := reader.forget():
                (output.content if called else plain)(text)
        else:
            plain(marker)


def _read_calls(reader: Reader, output: Output, calls: Calls, tool: ToolFormat, begin: str) -> Steps[bool]:
    """Read calls, and leave to the reader what it keeps as text; returns whether there were any."""
    before = calls.count
    try:
        yield from tool.read(calls, begin)
        reader.forget()
    except BrokenError:
        output.end()
    return calls.count > before
