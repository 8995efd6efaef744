"""All transcripts, and the events that a parser makes of one."""

import pytest
import transcripts_json
import transcripts_other
from transcripts import Transcript, merged

from jspec.text.parsers.events import Event
from jspec.text.parsers.parser import make_parser

TRANSCRIPTS = [*transcripts_json.TRANSCRIPTS, *transcripts_other.TRANSCRIPTS]
every_transcript = pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.name)


def events_of(transcript: Transcript, *pieces: str) -> list[Event]:
    parser = make_parser(transcript.tool, transcript.reasoning, tools=transcript.tools, prompt=transcript.prompt)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish(ended=True)])
