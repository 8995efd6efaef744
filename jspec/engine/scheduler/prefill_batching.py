"""Which segments of which prompts a prefill pass reads. Nothing here needs JAX."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest

# The most tokens of a pass while few prompts are read beside many texts, so that rounds do not wait for long. Far into a
# long prompt, attention costs as much as everything else, and a pass has half of that.
ALONGSIDE, FAR = 512, 16_384
CROWD = 4  # few: less than one prompt is read for so many texts
# The fewest tokens that a prompt waits for while another prompt that begins alike is read. A pass of fewer tokens takes
# hardly less time, because the weights are read all the same; so two small passes would take longer than one.
WORTH_WAITING = 256
FULL = 0.85  # the share of a program's segments with which it counts as filled
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


def _first(reading: Sequence[ActiveRequest], most: int, config: EngineConfig) -> list[Segment]:
    """The first segments that are left of these prompts, as many as a pass of ``most`` segments has room for."""
    every = itertools.chain(*(segments_of(active, config.chunk) for active in reading))
    segments = list(itertools.islice(every, most))
    while len(segments) > 1 and not _fit(segments, config):
        segments.pop()
    return segments


def _fit(segments: Sequence[Segment], config: EngineConfig) -> bool:
    """Whether the texts of a pass of these segments have no more pages than it may read."""
    most = config.pages_of_pass(next(n for n in config.segment_buckets if n >= len(segments)))
    ends = {id(active): start + length for active, start, length in segments}  # the last one of each text
    return most is None or sum(-(-end // config.page_size) for end in ends.values()) <= most


def crowded(num_reading: int, num_decoding: int) -> bool:
    """Whether so many prompts are read that the texts which decode meanwhile had better wait for them."""
    return num_reading * CROWD > num_decoding


def choose_pass(
    reading: Sequence[ActiveRequest], num_decoding: int, calls_waited: int, config: EngineConfig, num_held: int = 0
) -> list[Segment]:
    """The segments of the next pass, or none if those that are left had better wait for company.

    A pass costs as much as its program has room for, and large passes cost less per token. While requests decode, a pass
    fills its program well, and the segments that are left over wait for the next one. Those that do not even fill the
    smallest program wait for ``MOST_CALLS_WAITED`` calls. If all rows decode and some requests have been read ahead,
    nobody misses the others, and they wait until they fill the largest program.

    Args:
      reading: the requests whose prompts are to be read, in their order.
      num_decoding: how many requests have been read and decode, or wait for others to end.
      calls_waited: for how many calls segments have been left to wait.
      config: the sizes of the programs.
      num_held: how many more prompts are being read, which wait for what this pass reads.
    """
    if any(active.request.params.prompt_logprobs is not None for active in reading):
        # A program of its own, of one size.
        return _first(reading, config.logprob_segments, config)
    c, buckets, num_reading = config.chunk, config.segment_buckets, len(reading) + num_held
    most, ahead = buckets[-1], num_decoding - config.max_batch
    long = any(active.num_to_read - active.num_read > ALONGSIDE for active in reading)
    if not crowded(num_reading, num_decoding) and num_reading < CROWD and (long or ahead < 0):
        tokens = ALONGSIDE // 2 if any(active.num_read >= FAR for active in reading) else ALONGSIDE
        most = max((n for n in buckets if n * c <= tokens), default=buckets[0])
    segments = _first(reading, most, config)
    full = FULL * most <= len(segments)
    if full or not num_decoding:
        return segments
    if ahead > config.most_ahead // 4:
        return []
    if not segments or len(segments) >= FULL * next(n for n in buckets if n >= len(segments)):
        return segments
    down = max((n for n in buckets if n <= len(segments)), default=0)
    return segments[:down] if down or calls_waited < MOST_CALLS_WAITED else segments
