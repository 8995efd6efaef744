"""Which segments of which prompts a prefill pass reads. Nothing here needs JAX."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest

ALONGSIDE = 512  # the most tokens of a pass while few prompts are read beside many texts: rounds wait for no more
CROWD = 4  # few: less than one prompt is read for so many texts
MOST_CALLS_WAITED = 2  # calls that segments wait for others to fill a pass with


class Segment(NamedTuple):
    """``length`` tokens of a prompt, from position ``start`` on."""

    active: ActiveRequest
    start: int
    length: int


def segments_of(active: ActiveRequest, c: int) -> Iterator[Segment]:
    """What is left to read of a prompt, cut at the multiples of c."""
    start = active.num_read
    while start < active.num_to_read:
        end = min(start - start % c + c, active.num_to_read)
        yield Segment(active, start, end - start)
        start = end


def crowded(num_reading: int, num_decoding: int) -> bool:
    """Whether so many prompts are read that the texts which decode meanwhile had better wait for them."""
    return num_reading * CROWD > num_decoding


def choose_pass(
    reading: Sequence[ActiveRequest], num_decoding: int, calls_waited: int, config: EngineConfig
) -> list[Segment]:
    """The segments of the next pass, or none if those that are left had better wait for company.

    A pass costs as much as its program has room for. While requests decode, a pass is sent only if it fills one of the
    programs well, or if its segments have waited ``MOST_CALLS_WAITED`` calls.

    Args:
      reading: the requests whose prompts are to be read, in their order.
      num_decoding: how many requests decode meanwhile.
      calls_waited: for how many calls segments have been left to wait.
      config: the sizes of the programs.
    """
    c, buckets = config.chunk, config.segment_buckets
    most = buckets[-1]
    if not crowded(len(reading), num_decoding):
        most = max((n for n in buckets if n * c <= ALONGSIDE), default=buckets[0])
    segments: list[Segment] = []
    for active in reading:
        for segment in segments_of(active, c):
            if len(segments) == most:
                return segments
            segments.append(segment)
    if not segments or not num_decoding or calls_waited >= MOST_CALLS_WAITED:
        return segments
    up = next(n for n in buckets if n >= len(segments))
    if len(segments) >= 0.85 * up:
        return segments
    down = max((n for n in buckets if n <= len(segments)), default=0)
    return segments[:down]
