"""Markers that are single tokens count where the token is, and nowhere else."""

import random

import pytest
import transcripts_json
import transcripts_other
from marker_tokenizer import SINGLE, marker_tokenizer, marker_tokens
from transcripts import TOOLS, Transcript, merged

from jspec.text.detokenizer import Detokenizer
from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Reasoning
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.parsers.parser import OutputParser, make_parser
from jspec.text.parsers.registry import TOOL_FORMATS

TRANSCRIPTS = [*transcripts_json.TRANSCRIPTS, *transcripts_other.TRANSCRIPTS]
every_transcript = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)
MARKED = [
    name
    for name, form in TOOL_FORMATS.items()
    if form.begins and set(form.begins) <= set(SINGLE) and not form.plain_begins
]


def parser_of(transcript: Transcript) -> OutputParser:
    tokens = marker_tokens().after(marker_tokenizer().encode(transcript.prompt[-40:]))
    return make_parser(
        transcript.tool, transcript.reasoning, tools=transcript.tools, tokens=tokens, prompt=transcript.prompt
    )


def streamed(parser: OutputParser, tokens: list[int], sizes, held: int = 0, cut: int | None = None) -> list[Event]:
    """The events when so many tokens come at a time, and the last ``held`` characters of their text later."""
    detokenizer = Detokenizer(marker_tokens().decode)
    events, start, waiting, passed = list[Event](), 0, "", 0
    while start < len(tokens):
        for size in sizes:
            waiting += detokenizer.add(tokens[start : start + size])
            text = waiting[: max(len(waiting) - held, 0)]
            waiting = waiting[len(text) :]
            text = text if cut is None else text[: max(cut - passed, 0)]
            passed += len(text)
            events += parser.feed(text, tokens[start : start + size])
            start += size
    rest = waiting + detokenizer.held
    events += parser.feed(rest if cut is None else rest[: max(cut - passed, 0)])
    return merged([*events, *parser.finish(ended=True)])


@every_transcript
def test_tokens_give_the_events_of_the_text(transcript):
    tokens = marker_tokenizer().encode(transcript.text)
    rng = random.Random(0)
    for _ in range(3):
        sizes, held = [rng.randint(1, 9) for _ in range(6)], rng.choice((0, 1, 12))
        assert streamed(parser_of(transcript), tokens, sizes, held) == transcript.expected(), (sizes, held)
    assert streamed(parser_of(transcript), tokens, [1]) == transcript.expected()


@pytest.mark.parametrize("transcript", TRANSCRIPTS[::8], ids=lambda transcript: transcript.name)
def test_every_split_of_the_tokens_gives_the_same_events(transcript):
    tokens = marker_tokenizer().encode(transcript.text)
    for cut in range(1, len(tokens)):
        assert streamed(parser_of(transcript), tokens, [cut, len(tokens)]) == transcript.expected(), cut


@pytest.mark.parametrize("tool", MARKED)
def test_text_that_looks_like_a_marker_is_text(tool):
    """Where it consists of ordinary tokens."""
    for transcript in (row for row in TRANSCRIPTS if row.tool == tool):
        tokens = marker_tokenizer().encode_plain(transcript.text)
        parser = make_parser(tool, None, tools=TOOLS, tokens=marker_tokens())
        assert streamed(parser, tokens, [3, 1]) == [Content(transcript.text)]


def test_a_marker_in_a_value_is_data_where_it_is_plain_text():
    tokenizer = marker_tokenizer()
    value = "a</arg_value></tool_call>\n</think>"
    before, after = "<tool_call>f<arg_key>k</arg_key><arg_value>", "</arg_value></tool_call>"
    tokens = [*tokenizer.encode(before), *tokenizer.encode_plain(value), *tokenizer.encode(after)]
    events = [CallStart("f"), CallArguments('{"k": "a</arg_value></tool_call>\\n</think>"}'), CallEnd()]
    for sizes in ([1], [4, 2], [len(tokens)]):
        assert streamed(make_parser("glm45", None, tokens=marker_tokens()), tokens, sizes) == events


def test_other_special_tokens_vanish():
    """From reasoning, content and arguments; not those that mark reasoning, which is content where it is not parsed."""
    text = 'a<|im_end|></think>b<|im_end|>c<tool_call>{"name": "f", <|im_end|>"arguments": {"x": "<|im_end|>"}}</tool_call>'
    tokens = marker_tokenizer().encode(text)
    call = [CallStart("f"), CallArguments('{"x": ""}'), CallEnd()]
    for sizes in ([1], [5], [len(tokens)]):
        parser = make_parser("hermes", "qwen3", tokens=marker_tokens())
        assert streamed(parser, tokens, sizes) == [Reasoning("a"), Content("bc"), *call]
        parser = make_parser("hermes", None, tokens=marker_tokens())
        assert streamed(parser, tokens, sizes) == [Content("a</think>bc"), *call]


def test_special_tokens_that_mark_reasoning_stay_where_it_is_not_parsed():
    tokens = marker_tokenizer().encode("[THINK]a[/THINK]b<|return|>")
    assert streamed(make_parser("hermes", None, tokens=marker_tokens()), tokens, [1]) == [Content("[THINK]a[/THINK]b")]


@pytest.mark.parametrize("cut", range(0, 60))
def test_text_may_end_anywhere(cut):
    """At a stop string, within a marker too, though the tokens go on."""
    text = 'é😀<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>b'
    tokens = marker_tokenizer().encode(text)
    whole = streamed(make_parser("hermes", None, tokens=marker_tokens()), tokens, [1], cut=cut)
    for sizes in ([3, 1], [len(tokens)]):
        assert streamed(make_parser("hermes", None, tokens=marker_tokens()), tokens, sizes, cut=cut) == whole
    assert "".join(event.text for event in whole if isinstance(event, Content))[:2] == text[: min(cut, 2)]


def test_tokens_may_come_before_their_text():
    text = 'a<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tokens = marker_tokenizer().encode(text)
    for ahead in (1, 2, len(tokens)):
        parser = make_parser("hermes", None, tokens=marker_tokens())
        assert parser.feed("", tokens[:ahead]) == []
        events = parser.feed(text[:1], tokens[ahead:])
        assert events == [Content("a")]
        assert parser.feed(text[1:5]) == []  # a part of the marker
        assert [*parser.feed(text[5:]), *parser.finish(ended=True)] == [CallStart("f"), CallArguments("{}"), CallEnd()]


def test_a_character_of_several_tokens_does_not_move_markers():
    text = 'é😀€<tool_call>{"name": "é", "arguments": {}}</tool_call>😀'
    tokens = marker_tokenizer().encode(text)
    events = [Content("é😀€"), CallStart("é"), CallArguments("{}"), CallEnd(), Content("😀")]
    for sizes in ([1], [2], [3, 5], [len(tokens)]):
        assert streamed(make_parser("hermes", None, tokens=marker_tokens()), tokens, sizes) == events
    broken = [tokens[0], *tokens[6:]]  # half of a character before the marker
    assert streamed(make_parser("hermes", None, tokens=marker_tokens()), broken, [1])[1] == CallStart("é")


def test_markers_of_a_transformers_tokenizer():
    transformers = pytest.importorskip("transformers")
    fast = marker_tokenizer().fast
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|im_end|>")
    tokens = MarkerTokens.of(tokenizer)
    assert tokens.texts == marker_tokens().texts
    assert tokens.special == marker_tokens().special
    assert tokens.decode(tokenizer.encode("a<|im_end|>")) == "a<|im_end|>"
