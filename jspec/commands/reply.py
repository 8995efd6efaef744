"""A model's reply in a conversation: what of it is reasoning, text and calls, while it comes."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jspec.outputs import Delta
from jspec.text.parsers.blocks import Blocks, as_message
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.parsers.parser import make_parser
from jspec.text.parsers.registry import detect_of
from jspec.text.token_spans import Span, TokenSpans

if TYPE_CHECKING:
    from jspec.llm import LLM

PROMPT_END = 64  # tokens of the prompt that may say whether the model is reasoning when its text begins


class Piece(NamedTuple):
    """The next text to show.

    Attributes:
      kind: ``reasoning``, ``text`` or ``call``.
      span: the text, and where it comes from.
    """

    kind: str
    span: Span


class ReplyFormat:
    """How a model writes calls and reasoning, by its chat template and class.

    Args:
      llm: the model.
      template: the chat template in use, if it is not the checkpoint's.
      tools: of the conversation.

    Attributes:
      tokens: the tokens that may be markers; None if there is nothing to tell apart from text.
    """

    def __init__(self, llm: "LLM", template: str | None, tools: Sequence[dict[str, Any]] | None):
        architecture = getattr(llm.target.config, "architecture", "")
        tool, self.reasoning = detect_of(llm.tokenizer, template, architecture)
        self.tool, self.tools, self.tokenizer = tool if tools else None, tools, llm.tokenizer
        self.tokens = MarkerTokens.of(llm.tokenizer) if self.tool or self.reasoning else None


class Reply:
    """One reply, as its deltas come.

    Args:
      form: how the model writes it.
      prompt: the tokens before it.
    """

    def __init__(self, form: ReplyFormat, prompt: Sequence[int]):
        self._spans = TokenSpans(form.tokenizer, prompt, skip_special_tokens=form.tokens is None)
        self._blocks, self._parser = Blocks(), None
        if form.tokens is not None:
            end, tokens = form.tokens.decode(list(prompt[-PROMPT_END:])), form.tokens.after(prompt)
            self._parser = make_parser(form.tool, form.reasoning, tools=form.tools, tokens=tokens, prompt=end)
        self._text = ""

    def add(self, delta: Delta) -> Iterator[Piece]:
        """What a delta has to show."""
        self._text += delta.text or ""
        if self._parser is None:
            yield from (Piece("text", span) for span in self._spans.of(delta))
            return
        tokens: Sequence[int] = delta.token_ids
        source = ""
        for text, source in self._spans.of(delta):
            yield from self._pieces(self._parser.feed(text, tokens), source)
            tokens = ()
        ended = self._parser.finish(ended=not delta.result.was_cut) if delta.result else self._parser.feed("", tokens)
        yield from self._pieces(ended, source, delta.finished)

    def _pieces(self, events: Any, source: str, ended: bool = False) -> Iterator[Piece]:
        """What to show of events. Held-back text takes the source of the text that resolved it."""
        for step in self._blocks.add(events, ended):
            kind, index = step.block.kind, step.block.index
            before = self._blocks.done[index - 1].kind if index else ""
            if step.what == "begin" and kind == "call":
                yield Piece(kind, (f"{'' if before in ('', 'call') else chr(10)}call: {step.block.name} ", source))
            elif step.what == "begin" and before:
                yield Piece(before, ("" if before == "call" else "\n\n", source))
            elif step.what == "more":
                yield Piece(kind, (step.text, source))
            elif step.what == "end" and kind == "call":
                yield Piece(kind, ("\n", source))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing of it yet."""
        return not (self._text if self._parser is None else self._blocks.done)

    @property
    def message(self) -> dict[str, Any]:
        """The reply so far as a message of the conversation."""
        if self._parser is None:
            return {"role": "assistant", "content": self._text}
        return as_message(self._blocks.done, lambda block: block.id or f"call_{block.index}")
