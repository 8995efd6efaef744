"""Reasoning, content and calls of gpt-oss: the messages of the harmony format."""

import re
from collections.abc import Sequence

from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_arguments
from jspec.text.parsers.output import Output
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps
from jspec.text.parsers.tool_format import ReasoningFormat, ToolFormat

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ENDS = (END, RETURN, CALL, START, CHANNEL)  # of a message; the last two where its end is missing
WORD = re.compile(r"[^\s<\ud800-\udfff]+")
HEADER_WORD = re.compile(r"assistant|analysis|commentary|final|json|code|to=\S*|functions\.\S*")
RECIPIENT = re.compile(r"to=([^\s<]+)")
WORDS_OF_CHANNELS = re.compile(r"\b(analysis|commentary|final)\b")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
PEOPLE = ("assistant", "user", "all")  # recipients that are no tools


class OpenAi(ToolFormat):
    """The harmony format, whose messages are read as a whole by ``read_harmony``."""

    markers = MARKERS

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        raise BrokenError
        yield

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        del several  # the model's turn ends with a call
        return grammar.any_of([self.call_grammar(grammar, function) for function in functions])

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        header = f"{CHANNEL}commentary to=functions.{function.name} {CONSTRAIN}json{MESSAGE}"
        return grammar.around(header, grammar.json(function.parameters), CALL)


OPENAI = OpenAi()
OPENAI_GPTOSS = ReasoningFormat(
    f"{CHANNEL}analysis{MESSAGE}",
    END,
    open=False,
    markers=MARKERS,
    then=f"{START}assistant",
    answer=f"{CHANNEL}final{MESSAGE}",
)


def read_harmony(calls: Calls, output: Output, prompt: str, *, with_calls: bool = True) -> Steps[None]:
    """Read a completion: messages of a header and a text, ``<|channel|>analysis<|message|>..<|end|>`` for example.

    ``analysis`` is reasoning; a message to a recipient, on any channel, is a call; any other message is content. The
    recipient may stand before the channel or behind it, ``<|channel|>`` and ``<|constrain|>`` may be missing, and so may
    the end of a message. Text without a header is content. A header that is cut at the end of the text is dropped.

    Args:
      calls, output: of the completion.
      prompt: the text before it, whose end may be the beginning of a message.
      with_calls: whether a message to a recipient is a call; else it is content.
    """
    reader, header = calls.reader, prompt[prompt.rfind(START) :] if START in prompt else ""
    in_text, begun = MESSAGE in header, ""
    while True:
        if not in_text:
            reader.keep(begun)
            try:
                header = yield from _header(reader, header)
            except BrokenError:
                output.content(reader.forget())
                header = f"{CHANNEL}final"
            if header is None:
                return
        ended = yield from _message(calls, output, header, with_calls)
        if ended is None:
            return
        header = begun = ended if ended in (START, CHANNEL) else ""
        in_text = False


def _header(reader: Reader, header: str) -> Steps[str | None]:
    """Read the rest of a header up to its text; None if the completion ends before.

    Raises:
      BrokenError: this is no header.
    """
    named = header.endswith((START, CHANNEL, CONSTRAIN))  # whether any word may come next
    while True:
        yield from reader.blanks()
        marker = yield from reader.match(*MARKERS)
        if marker == MESSAGE:
            return header
        if marker:
            if marker in (START, END, RETURN, CALL):
                header = ""
                reader.keep(marker if marker == START else "")
            header += "" if marker in (END, RETURN, CALL) else marker
            named = marker in (START, CHANNEL, CONSTRAIN)
            continue
        word = yield from reader.all(WORD)
        if not word and not (yield from reader.peek()):
            return None
        if not word or not (named or HEADER_WORD.fullmatch(word)):
            raise BrokenError
        header, named = f"{header} {word} ", False


def _message(calls: Calls, output: Output, header: str, with_calls: bool) -> Steps[str | None]:
    """Read the text of a message, through the marker that ends it; returns the marker, or None at the end of the text."""
    reader = calls.reader
    recipient = RECIPIENT.search(header)
    channel = CHANNEL_NAME.search(header) or WORDS_OF_CHANNELS.search(header)
    if with_calls and recipient and recipient[1] not in PEOPLE:
        try:
            return (yield from _call(calls, recipient[1].removeprefix("functions."), output.content))
        except BrokenError:
            output.end(complete=False)
            output.content(reader.forget())
            ended = yield from reader.until(ENDS, output.content)
            output.content(ended if ended in (END, RETURN, CALL) else "")
            return ended
    reader.forget()
    if channel and channel[1] == "analysis":
        output.begin_reasoning()
        ended = yield from reader.until(ENDS, output.reasoning)
        if ended:
            output.end_reasoning()
        return ended
    return (yield from reader.until(ENDS, output.content))


def _call(calls: Calls, name: str, content: Sink) -> Steps[str | None]:
    """Read a call's arguments, through the marker that ends them; returns the marker, or None at the end of the text."""
    reader = calls.reader
    calls.start(name)
    yield from reader.blanks()
    yield from reader.match("json")
    yield from reader.blanks()
    calls.end((yield from pass_arguments(calls, ENDS)))
    reader.forget()
    return (yield from reader.until(ENDS, content))
