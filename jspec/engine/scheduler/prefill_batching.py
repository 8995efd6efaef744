"""Chooses the chunks of a prefill batch. Nothing here needs JAX."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest

# The most tokens of a prefill batch while few prompts are prefilled beside many decoding requests, so that rounds do not
# wait for long. Behind ``FAR`` tokens of a prompt, attention costs as much as everything else, and a batch has half as many.
ALONGSIDE, FAR = 512, 16_384
FEW_PROMPTS = 4  # prompts are few if they are fewer, and fewer than one for so many decoding requests
# The fewest tokens that a prompt waits for while another prompt with the same prefix is prefilled. A batch of fewer tokens
# takes hardly less time, because the weights are read all the same; so two small batches would take longer than one.
WORTH_WAITING = 256
FULL = 0.85  # the share of a program's chunks with which it counts as filled
MOST_CALLS_WAITED = 2  # calls that chunks wait for others to fill a batch with


class Chunk(NamedTuple):
    """``length`` tokens of a prompt, from position ``start`` on."""

    active: ActiveRequest
    start: int
    length: int


def chunks_of(active: ActiveRequest, config: EngineConfig) -> Iterator[Chunk]:
    """The next chunks of a prompt, cut at the multiples of c; all that remain, or those up to the next snapshot."""
    start, c = active.num_prefilled, config.chunk
    stop = config.next_snapshot(start, most_cached(active)) or active.num_to_prefill
    while start < stop:
        end = min(start - start % c + c, stop)
        yield Chunk(active, start, end - start)
        start = end


def most_cached(active: ActiveRequest) -> int:
    """How many slots of its prompt a request shares at most: it prefills at least one token, and rounds write behind that.

    A prompt whose log-probabilities are wanted is prefilled completely, and its pages are not shared either, because another
    program wrote them.
    """
    if active.request.params.prompt_logprobs is not None:
        return 0
    return max(active.num_to_prefill - 1, 0)


def _first(prefilling: Sequence[ActiveRequest], most: int, config: EngineConfig) -> list[Chunk]:
    """The first remaining chunks of these prompts, as many as a batch of ``most`` chunks has room for."""
    remaining = itertools.chain(*(chunks_of(active, config) for active in prefilling))
    chunks = list(itertools.islice(remaining, most))
    while len(chunks) > 1 and not _fit(chunks, config):
        chunks.pop()
    return chunks


def _fit(chunks: Sequence[Chunk], config: EngineConfig) -> bool:
    """Whether the texts of a batch of these chunks have no more pages than it may read."""
    most = config.pages_of_prefill(next(n for n in config.chunk_buckets if n >= len(chunks)))
    ends = {id(active): start + length for active, start, length in chunks}  # the last one of each text
    return most is None or sum(-(-end // config.page_size) for end in ends.values()) <= most


def prefill_goes_first(num_prefilling: int, num_decoding: int) -> bool:
    """Whether so many prompts are prefilled that the requests which decode meanwhile should wait for them."""
    return num_prefilling * FEW_PROMPTS > num_decoding


def choose_prefill_batch(
    prefilling: Sequence[ActiveRequest], num_decoding: int, calls_waited: int, config: EngineConfig, num_held: int = 0
) -> list[Chunk]:
    """The chunks of the next prefill batch, or none if they should wait for others.

    A batch costs as much as its program has room for, and large batches cost less per token. While requests decode, a batch
    fills its program well, and the other chunks wait for the next one. Chunks that do not even fill the
    smallest program wait for ``MOST_CALLS_WAITED`` calls. If all rows decode and some requests have been read ahead,
    no row needs the other prompts yet, and they wait until they fill the largest program.

    Args:
      prefilling: the requests whose prompts are prefilled, in their order.
      num_decoding: how many requests are prefilled and decode, or wait for others to end.
      calls_waited: for how many calls chunks have waited.
      config: the sizes of the programs.
      num_held: how many more prompts are prefilled that wait for the pages of this batch.
    """
    if any(active.request.params.prompt_logprobs is not None for active in prefilling):
        # They have a program of their own, of one size.
        return _first(prefilling, config.logprob_chunks, config)
    c, buckets, num_prefilling = config.chunk, config.chunk_buckets, len(prefilling) + num_held
    most, ahead = buckets[-1], num_decoding - config.max_batch
    long = any(active.num_to_prefill - active.num_prefilled > ALONGSIDE for active in prefilling)
    if not prefill_goes_first(num_prefilling, num_decoding) and num_prefilling < FEW_PROMPTS and (long or ahead < 0):
        tokens = ALONGSIDE // 2 if any(active.num_prefilled >= FAR for active in prefilling) else ALONGSIDE
        most = max((n for n in buckets if n * c <= tokens), default=buckets[0])
    chunks = _first(prefilling, most, config)
    full = FULL * most <= len(chunks)
    if full or not num_decoding:
        return chunks
    if ahead > config.most_ahead // 4:
        return []
    if not chunks or len(chunks) >= FULL * next(n for n in buckets if n >= len(chunks)):
        return chunks
    down = max((n for n in buckets if n <= len(chunks)), default=0)
    return chunks[:down] if down or calls_waited < MOST_CALLS_WAITED else chunks
