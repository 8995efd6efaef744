"""Reads a whole completion: reasoning, content and calls in turn."""

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.code_spans import CodeSpans
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
    end alone, and a call in it is text, but for one that comes first where the prompt does not say that the model reasons.
    In content a call within backticks or a fence is text. The reasoning's start counts where no content comes before, and
    its end within reasoning; elsewhere they are text.

    Args:
      reader, output, calls: of the completion.
      tool, reasoning: the formats; None if markers of that kind are text.
      prompt: the text before the completion, or its end.
      begun: what of it is the beginning of the model's message, by the request. An answer there comes before as content.
    """
    starts = () if reasoning is None else (reasoning.start,)
    begins = () if tool is None else (*tool.begins, *tool.plain_begins, *tool.line_begins, *tool.first_begins)
    code, again = CodeSpans(), None

    def content(text: str):
        code.add(text)
        output.content(text)

    thinking = reasoning is not None and reasoning.opened_by(prompt, begun)
    first = tool.begins if tool and reasoning and reasoning.said_by(prompt, begun) is None else ()
    if not thinking:
        code.add(begun := begun.rpartition(reasoning.end)[2] if reasoning else begun)
    answers = not thinking and bool(begun.strip())
    if thinking and reasoning and prompt.endswith(reasoning.start):
        yield from reader.match("\n")
    while True:
        if tool and tool.is_whole and not thinking:
            if reasoning and reasoning.then:
                yield from reader.match(reasoning.then)
            content((yield from reader.blanks()))
            marker = None if answers else (yield from reader.match(*starts))
            if marker is None:
                yield from _read_calls(reader, output, calls, tool, "")
                content(reader.forget())
                yield from reader.until((), content)
        elif thinking and reasoning:
            marker = yield from _read_reasoning(reader, output, reasoning, first)
            if marker is None:
                thinking = False
                continue
            first = ()
        else:
            marker = again or (yield from reader.until((*starts, *begins), content))
            again = None
        if marker is None:
            return
        if reasoning and marker == reasoning.start and output.fresh and not answers:
            output.begin_reasoning()
            thinking, first = True, ()
            yield from reader.match("\n")
        elif tool and (thinking or _may_begin(tool, marker, code, output.fresh and not calls.count and not answers)):
            called = yield from _read_calls(reader, output, calls, tool, marker)
            if called:
                thinking, code = False, CodeSpans()
            text = reader.forget()
            again = None if thinking else _read_another(reader, tool, text)
            if again is not None:
                text = text.removesuffix(reader.spelled(again))
            (output.reasoning if thinking else content)(text)
        else:
            content(marker)


def _may_begin(tool: ToolFormat, marker: str, code: CodeSpans, is_first: bool) -> bool:
    """Whether a call may begin with a marker here."""
    if code.takes_marker():
        return False
    if marker in tool.line_begins:
        return code.at_line_start
    return marker in (*tool.begins, *tool.plain_begins) or (is_first and marker in tool.first_begins)


def _read_another(reader: Reader, tool: ToolFormat, text: str) -> str | None:
    """The marker of the next call, if a text that was no call ends with it and has more."""
    ends = (begin for begin in tool.begins if text.endswith(spelled := reader.spelled(begin)) and text != spelled)
    return next(ends, None)


def _read_reasoning(
    reader: Reader, output: Output, reasoning: ReasoningFormat, first: tuple[str, ...]
) -> Steps[str | None]:
    """Read reasoning through its end, or through one of the markers ``first`` where it comes first, which is returned."""
    while True:
        marker = yield from reader.until((reasoning.end, reasoning.start, *first), output.reasoning)
        if marker is None:
            return None
        if marker == reasoning.end:
            output.end_reasoning()
            while (yield from reader.match("\n")):
                pass
            return None
        if output.thought:
            output.reasoning(marker)
        elif marker in first:
            return marker
        else:
            output.begin_reasoning()
            yield from reader.match("\n")
        first = ()


def _read_calls(reader: Reader, output: Output, calls: Calls, tool: ToolFormat, begin: str) -> Steps[bool]:
    """Read calls, and leave to the reader what it keeps as text; returns whether there were any."""
    before = calls.count
    reader.keep(begin)
    try:
        yield from tool.read(calls, begin)
        reader.forget()
    except BrokenError:
        output.end(complete=False)
    return calls.count > before
