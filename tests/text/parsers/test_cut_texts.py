"""A text that is cut at any character: what may have become a call or a marker is left out, and no call is made whole."""

import pytest
from every_transcript import TRANSCRIPTS, every_transcript
from marker_tokenizer import marker_tokenizer, marker_tokens
from transcripts import TOOLS, Transcript, merged

from jspec.text.detokenizer import Detokenizer
from jspec.text.parsers.blocks import Block, Blocks, as_message
from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Cut, Event, Reasoning
from jspec.text.parsers.forced import JsonCalls
from jspec.text.parsers.parser import OutputParser, make_parser
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from jspec.text.parsers.schema_types import json_object


def parser_of(row: Transcript, tokens=None) -> OutputParser:
    return make_parser(row.tool, row.reasoning, tools=row.tools, tokens=tokens, prompt=row.prompt)


def told(events: list[Event]) -> list[Block]:
    """The blocks, without the blanks that may be markup in the longer text."""
    blocks = Blocks()
    list(blocks.add(events, ended=True))
    assert blocks.is_broken == (Cut() in events or not all(block.complete for block in blocks.done))
    assert Cut() not in events[:-1]
    for block in blocks.done:
        block.text = block.text if block.kind == "call" else block.text.rstrip()
    return [block for block in blocks.done if block.text]


def check_beginning(beginning: list[Block], whole: list[Block]):
    """The blocks of a text that was cut are those of the whole text, of which the last one may be incomplete."""
    assert [block.name for block in beginning] == [block.name for block in whole[: len(beginning)]]
    for block, full in zip(beginning, whole, strict=False):
        assert (block.kind, block.id) == (full.kind, full.id)
        if block is beginning[-1] and not (block.kind == "call" and block.complete):
            assert full.text.startswith(block.text)
        else:
            assert block.text == full.text
        if block.kind == "call" and not block.complete:
            assert json_object(block.text) is None
            assert block.text


@every_transcript
def test_a_text_may_be_cut_anywhere(transcript):
    parser = parser_of(transcript)
    whole = told(parser.feed(transcript.text) + parser.finish(ended=True))
    for end in range(len(transcript.text)):
        text, parser, slow = transcript.text[:end], parser_of(transcript), parser_of(transcript)
        events = merged(parser.feed(text) + parser.finish())
        assert events == merged([event for letter in text for event in slow.feed(letter)] + slow.finish())
        check_beginning(told(events), whole)


@pytest.mark.parametrize("transcript", TRANSCRIPTS[::3], ids=lambda transcript: transcript.name)
def test_a_text_of_tokens_may_be_cut_anywhere(transcript):
    """At a stop string within a marker, too, whose token has come."""
    tokens = marker_tokenizer().encode(transcript.text)
    parser = parser_of(transcript, marker_tokens())
    whole = told(parser.feed(Detokenizer(marker_tokens().decode).add(tokens), tokens) + parser.finish(ended=True))
    for end in range(len(transcript.text)):
        parser = parser_of(transcript, marker_tokens())
        check_beginning(told(parser.feed(transcript.text[:end], tokens) + parser.finish()), whole)


MARKERS = [(name, None, begin) for name, form in TOOL_FORMATS.items() for begin in (*form.begins, *form.line_begins)]
MARKERS += [(None, name, form.start) for name, form in REASONING_FORMATS.items() if name != "openai_gptoss"]


@pytest.mark.parametrize(("tool", "reasoning", "marker"), MARKERS)
def test_half_a_marker_is_left_out_of_a_text_that_was_cut(tool, reasoning, marker):
    for end in range(1, len(marker) + (tool is not None)):
        text, cut, ended = (
            "Hi.\n" + marker[:end],
            *(make_parser(tool, reasoning, tools=TOOLS, begins_open=False) for _ in range(2)),
        )
        assert merged(cut.feed(text) + cut.finish()) == [Content("Hi.\n"), Cut()]
        assert merged(ended.feed(text) + ended.finish(ended=True)) == [Content(text)]


@pytest.mark.parametrize("reasoning", [name for name in REASONING_FORMATS if name != "openai_gptoss"])
def test_half_the_end_of_reasoning_is_left_out(reasoning):
    marker = REASONING_FORMATS[reasoning].end
    for end in range(1, len(marker)):
        parser = make_parser(None, reasoning, begins_open=True)
        assert merged(parser.feed("Hm." + marker[:end]) + parser.finish()) == [Reasoning("Hm."), Cut()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("f", ' {"a": {"b": "}"}, "c": [1]}'),
        (None, '[{"name": "f", "parameters": {"a": "}"}}, {"name": "now", "parameters": {}}]'),
    ],
)
def test_calls_that_are_json_alone_may_be_cut_anywhere(name, text):
    def read(text: str, cut: bool) -> list[Block]:
        parser = make_parser(JsonCalls(name), "qwen3", begins_open=True)
        return told(merged(parser.feed(f"Hm.</think>{text}") + parser.finish(ended=not cut)))

    whole = read(text, False)
    assert [json_object(block.text) is not None for block in whole] == [False, *[True] * (1 if name else 2)]
    for end in range(len(text)):
        check_beginning(read(text[:end], True), whole)


def test_blocks_hold_calls_until_they_are_complete():
    """So that nothing is told of one that is cut."""
    for complete in (True, False):
        held, live = Blocks(holds=lambda name: name == "f"), Blocks()
        events = [Content("a"), CallStart("f"), CallArguments('{"b":'), CallArguments(" 1}"), CallEnd(complete)]
        steps = [step for event in events for step in held.add([event])]
        assert [step.what for step in steps[2:]] == (["end", "begin", "more", "end"] if complete else ["end"])
        assert [step.what for event in events for step in live.add([event])][2:] == [
            "end",
            "begin",
            "more",
            "more",
            "end",
        ]
        assert held.is_broken == live.is_broken == (not complete)
        assert [block.text for block in live.done] == ["a", '{"b": 1}']
        assert [block.text for block in held.done] == ["a", '{"b": 1}'][: 1 + complete]
        assert ("tool_calls" in as_message(live.done, lambda block: "1")) == complete
