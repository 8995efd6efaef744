"""Whatever a model writes: parsers never fail, calls are closed, and pieces do not matter."""

import itertools
import random
import string

import pytest
import transcripts_json
import transcripts_other
from marker_tokenizer import SINGLE, marker_tokenizer, marker_tokens
from transcripts import TOOLS, merged

from jspec.text.detokenizer import Detokenizer
from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Event
from jspec.text.parsers.parser import OutputParser, make_parser
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

TRANSCRIPTS = [*transcripts_json.TRANSCRIPTS, *transcripts_other.TRANSCRIPTS]
OTHERS = (
    "<function=",
    "</function>",
    "<parameter=x>",
    "</parameter>",
    '<invoke name="f">',
    "</invoke>",
    "[",
    "{",
    '{"name"',
)
OTHERS += (
    "}",
    "]",
    '"',
    "'",
    "\\",
    ",",
    ":",
    ";",
    "\n\n",
    "`" * 3,
    "call:f{",
    "f(",
    "a=",
    "[TOOL_",
    "<",
    "<|",
    "é",
    "\ud800",
)
OTHERS += (
    '{"name": "now", "arguments": ',
    "functions.f:0",
    "to=functions.f",
    "json",
    "assistant",
    "\\ud83d",
    "\x00",
    "😀",
)
LETTERS = string.ascii_letters + string.digits + " \n\"'{}[]()<>|=:,\\/"


def mutated(text: str, rng: random.Random) -> str:
    """The text with one to four changes: parts left out, repeated or moved, and markers or characters put in."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(text))
        end = min(len(text), start + rng.choice((1, 2, 8, 40)))
        part, kind = text[start:end], rng.randrange(6)
        if kind == 0:
            text = text[:start] + text[end:]
        elif kind == 1:
            text = text[:end] + part + text[end:]
        elif kind == 2:
            place = rng.randint(0, start)
            text = text[:place] + part + text[place:start] + text[end:]
        elif kind == 3:
            text = text[:start]
        else:
            new = rng.choice(SINGLE + OTHERS) if kind == 4 else "".join(rng.choices(LETTERS, k=rng.randint(1, 4)))
            text = text[:start] + new + text[start:]
    return text


def pieces(text: str, rng: random.Random) -> list[str]:
    most = rng.choice((1, 3, 30))
    cuts, place = [0], 0
    while place < len(text):
        place = min(len(text), place + rng.randint(1, most))
        cuts.append(place)
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def events_of(parser: OutputParser, fed: list[tuple[str, list[int]]]) -> list[Event]:
    events = [event for text, tokens in fed for event in parser.feed(text, tokens)]
    return merged([*events, *parser.finish(ended=True)])


def check_calls(events: list[Event]):
    """Every call has its end, and nothing but its arguments before."""
    is_open = False
    for event in events:
        assert is_open == isinstance(event, CallArguments | CallEnd), events
        is_open = isinstance(event, CallStart) or (is_open and not isinstance(event, CallEnd))
    assert not is_open


def check(rng: random.Random, with_tokens: bool):
    transcript = rng.choice(TRANSCRIPTS)
    text = mutated(transcript.text, rng)
    if rng.random() < 0.2:
        text += mutated(rng.choice(TRANSCRIPTS).text, rng)
    tool, reasoning, prompt, tools = transcript.tool, transcript.reasoning, transcript.prompt, rng.choice((TOOLS, None))
    if rng.random() < 0.2:
        tool, reasoning = rng.choice((*TOOL_FORMATS, None)), rng.choice((*REASONING_FORMATS, None))
    whole, divided = [(text, [])], [(piece, []) for piece in pieces(text, rng)]
    if with_tokens:
        tokens = marker_tokenizer().encode(text.replace("\ud800", ""))
        whole, divided = tokens_with_text(tokens, [len(tokens)]), tokens_with_text(tokens, [rng.randint(1, 9), 1])
    first, second = (
        events_of(make_parser(tool, reasoning, tools=tools, tokens=known, prompt=prompt), fed)
        for fed in (whole, divided)
        for known in [marker_tokens() if with_tokens else None]
    )
    assert first == second, (tool, reasoning, prompt, text)
    check_calls(first)


def tokens_with_text(tokens: list[int], sizes: list[int]) -> list[tuple[str, list[int]]]:
    detokenizer, start, fed = Detokenizer(marker_tokens().decode), 0, []
    while start < len(tokens):
        for size in sizes:
            part = tokens[start : start + size]
            fed.append((detokenizer.add(part), part))
            start += size
    return [*fed, (detokenizer.held, [])]


@pytest.mark.parametrize("with_tokens", [False, True])
def test_mutated_transcripts(with_tokens):
    rng = random.Random(1)
    for _ in range(1_000 if not with_tokens else 250):
        check(rng, with_tokens)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_many_mutated_transcripts(seed):
    rng = random.Random(100 + seed)
    for number in range(25_000):
        check(rng, number % 5 == 0)


@pytest.mark.parametrize("tool", TOOL_FORMATS)
def test_text_that_a_parser_holds_back_is_short(tool):
    """So that the time is linear: text that was read is not read again, and little is copied with each piece."""
    parts = [transcript.text for transcript in TRANSCRIPTS if TOOL_FORMATS.get(transcript.tool) is TOOL_FORMATS[tool]]
    begin = (TOOL_FORMATS[tool].begins or ("<|channel|>",))[0]
    for text in (begin * 300, begin + "[" * 3_000, begin + "\n" * 3_000, begin + '{"a": "' + "x" * 3_000, *parts):
        parser = make_parser(tool, None, tools=TOOLS)
        for piece in text:
            parser.feed(piece)
            assert len(parser._reader._text) - parser._reader._place <= 40
        check_calls(parser.finish(ended=True)[:0])


def test_text_that_may_become_a_call_is_held_within_bounds():
    for count in (100, 16_000, 100_000):
        text = '<tool_call>{"arguments": {"a": "' + "x" * count + '"}, "name": "f"}</tool_call>'
        events = [
            events_of(
                make_parser("hermes", None), [(text[start : start + size], []) for start in range(0, len(text), size)]
            )
            for size in (7, 5_000, len(text))
        ]
        assert events[0] == events[1] == events[2]
        assert isinstance(events[0][0], CallStart) == (count <= 16_000)
    assert merged(make_parser("qwen3_coder", None).feed("<function=" + "f" * 1_000)) != []
