"""Every transcript gives its events, however it is divided into pieces."""

import random

from every_transcript import events_of, every_transcript


@every_transcript
def test_events(transcript):
    assert events_of(transcript, transcript.text) == transcript.expected()


@every_transcript
def test_every_split_gives_the_same_events(transcript):
    text, expected = transcript.text, transcript.expected()
    for cut in range(len(text) + 1):
        assert events_of(transcript, text[:cut], text[cut:]) == expected, cut


@every_transcript
def test_pieces_give_the_same_events(transcript):
    text, expected = transcript.text, transcript.expected()
    assert events_of(transcript, *text) == expected
    rng = random.Random(0)
    for _ in range(10):
        cuts = sorted(rng.sample(range(len(text) + 1), rng.randint(1, min(8, len(text)))))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert events_of(transcript, *pieces) == expected, cuts
