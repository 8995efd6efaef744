"""Examples, mentions, calls within reasoning and calls of other tools are text, exactly as they were written."""

import pytest
from every_transcript import TRANSCRIPTS, events_of
from transcripts import Transcript, function

from jspec.text.parsers.code_spans import CodeSpans
from jspec.text.parsers.events import CallStart, Content, Reasoning
from jspec.text.parsers.parser import make_parser
from jspec.text.parsers.reader import MOST_NAME
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from jspec.text.parsers.schema_types import json_object

OFF = {
    "qwen3": "<think>\n\n</think>",
    "glm45": "<think></think>",
    "kimi_k2": "<think></think>",
    "minimax_m2": "<think></think>",
}
OFF |= {"deepseek_r1": "<think></think>", "deepseek_v3": "</think>", "seed_oss": "<seed:think></seed:think>"}


def calls_alone() -> list[Transcript]:
    """The transcripts that have nothing but complete calls, without reasoning before them."""
    rows = []
    for row in TRANSCRIPTS:
        text = row.text.removeprefix("</think>").removeprefix("</seed:think>")
        alone = all(kind == "call" and json_object(rest[1]) is not None for kind, *rest in row.events)
        if row.tool and alone and "hink" not in text.replace("</think>\\n", ""):
            rows.append(Transcript(row.name, row.tool, row.reasoning, text, row.events, OFF.get(row.reasoning, "")))
    return rows


CALLS = calls_alone()
DOCUMENTS = [row for row in CALLS if row.tool != "openai"]  # in whose texts no call can stand
every_call = pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)
every_document = pytest.mark.parametrize("row", DOCUMENTS, ids=lambda row: row.name)


def read(row: Transcript, text: str, **changes):
    """The events of a text in the format of a transcript, which are the same for its characters one by one."""
    given = {"prompt": row.prompt, "tools": row.tools, **changes}
    changed = Transcript(
        row.name, row.tool, given.get("reasoning", row.reasoning), text, (), given["prompt"], given["tools"]
    )
    events = events_of(changed, text)
    assert events_of(changed, *text) == events
    return events


def test_every_format_has_transcripts_of_calls_alone():
    assert {row.tool for row in CALLS} == {row.tool for row in TRANSCRIPTS if row.tool}


@every_call
def test_alone_it_is_a_call(row):
    assert isinstance(read(row, row.text)[0], CallStart)


@every_call
def test_a_call_of_a_tool_that_the_request_does_not_have_is_text(row):
    events = read(row, row.text, tools=[function("other")])
    assert "".join(event.text for event in events if isinstance(event, Content)).strip() == row.text.strip()
    assert len(events) == 1


@every_document
def test_a_call_in_reasoning_is_text(row):
    reasoning = row.reasoning or "qwen3"
    form = REASONING_FORMATS[reasoning]
    for before in ("Hm. ", ""):
        events = read(row, f"{form.start}{before}{row.text}.{form.end}Hi.", reasoning=reasoning, prompt="")
        assert events == [Reasoning(f"{before}{row.text}.".lstrip("\n")), Content("Hi.")]


@every_document
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Write `", "` here."),
        ("Write ``", "`` here."),
        ("See:\n```xml\n", "\n```\nThat is it."),
        ("See:\n\n1. For `a`:\n   ````\n", "\n   ````\n"),
        ("~~~\n", "\n~~~"),
        ("```xml\n", ""),
    ],
)
def test_an_example_is_text(row, before, after):
    if row.tool == "json_fence" and "`" in row.text:  # of which no fence is left within another
        return
    text = f"{before}{row.text.strip()}{after}"
    assert read(row, text) == [Content(text)]


@every_document
def test_a_call_behind_code_is_a_call(row):
    before = "Run `ls`, then:\n```sh\nls `a` ~~~\n```\n\n~~~\n```\n~~~\nor ``` x ``` and a stray ` here.\n\n"
    if row.tool != "pythonic" or row.text[0] != "[":  # which have to come first
        assert read(row, before + row.text)[1:] == read(row, row.text)


@every_call
def test_a_mention_of_a_marker_is_text(row):
    """As far as the model has not written an argument, whatever follows."""
    for end in range(1, len(row.text)):
        parser = make_parser(row.tool, row.reasoning, tools=row.tools, prompt=row.prompt)
        begun = any(isinstance(event, CallStart) for event in parser.feed(row.text[:end]))
        if begun or row.text[:end].endswith(('"arguments": "', "=")):
            break
        text = f"{row.text[:end]} § and so on.\n"
        events = read(row, text)
        if row.tool != "openai":  # whose headers are no text
            assert events == [Content(text)], end
            parser = make_parser(row.tool, row.reasoning, tools=row.tools, prompt=row.prompt)
            if '"' not in text:  # else a name in quotes may go on
                text += "." * MOST_NAME  # which no name is longer than
                assert "".join(event.text for event in parser.feed(text)).strip() == text.strip()


@every_document
def test_a_call_behind_mentions_and_calls_of_other_tools_is_a_call(row):
    called = read(row, row.text)
    other = row.text.replace(called[0].name, "other")
    one = len({event.name for event in called if isinstance(event, CallStart)}) == 1
    if not one or row.name == "json_fence-open" or (row.tool == "pythonic" and row.text[0] == "["):  # which comes first
        return
    mentions = [f"The {marker} tag.\n" for marker in TOOL_FORMATS[row.tool].markers]
    for before in (*mentions, f"{other.strip()}\n\n"):
        events = read(row, before + row.text)
        assert events[0].text.strip() == before.strip()
        assert events[1:] == called


@every_document
def test_text_that_is_no_call_is_released_at_once(row):
    parser = make_parser(row.tool, row.reasoning, tools=[function("other")], prompt=row.prompt)
    text = row.text.strip() + "\nSo it goes on." * 20
    assert "".join(event.text for event in parser.feed(text)) == text


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("`", True),
        ("``a`", True),
        ("`a`", False),
        ("`a\n", False),
        ("```", True),
        ("  ```py\na", True),
        ("```\na\n``` ", False),
        ("```\na\n```py\n", True),
        ("```\na\n```</call> b", False),
        ("```a``` b\n", False),
        ("~~~a~~~ b\n", True),
        ("````\n```\n", True),
        ("```\n~~~\n", True),
        ("> - ~~~\n", True),
        ("a ```\n", False),
        ("a ~~~", False),
        ("```\n```\n`a", True),
    ],
)
def test_code_is_found_however_it_comes(text, inside):
    whole, pieces = CodeSpans(), CodeSpans()
    whole.add(text)
    for letter in text:
        pieces.add(letter)
    assert whole.takes_marker() == pieces.takes_marker() == inside


def test_many_mentions_take_no_longer_than_their_text():
    """Half of them in one line of code, in which nothing is read twice."""
    for text in (
        "`" + "<tool_call>" * 2_000,
        '<tool_call>{"arguments": {"' * 2_000,
        "```\n" + '{"name": "now", ' * 2_000,
    ):
        for tool in ("hermes", "json_fence", "qwen3_coder", "llama3_json"):
            parser = make_parser(tool, None, tools=[function("now")])
            for letter in text:
                parser.feed(letter)
            parser.finish(ended=True)
