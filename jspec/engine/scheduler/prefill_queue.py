"""Which prompts are read next, and what they need not read because others have read it. Nothing here needs JAX."""

from collections.abc import Sequence

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest
from jspec.engine.scheduler.page_pool import PagePool
from jspec.engine.scheduler.prefill_batching import WORTH_WAITING, Segment, choose_pass


class Reading:
    """The prompts that are being read, one pass after the other.

    Each full page of a prompt can be found from the moment in which the pass that reads it has been sent: by prompts that
    enter, and by those that are being read beside it. Of prompts that come together and begin alike, so, one reads what
    they share.

    Args:
      config: the sizes of passes and segments.
      pages: who holds which pages, and which text finds them.

    Attributes:
      pages: as given.
      num_cached_tokens: how many tokens of prompts were found in the prefix cache so far.
      num_prefill_tokens: how many tokens of prompts have been read so far.
      num_padding: how many tokens of padding the passes had that read them.
    """

    def __init__(self, config: EngineConfig, pages: PagePool):
        self.pages, self._config = pages, config
        self.num_cached_tokens = self.num_prefill_tokens = self.num_padding = 0
        pass_tokens = config.segment_buckets[-1] * config.chunk
        self._worth_waiting = max(min(WORTH_WAITING, pass_tokens // 2), 1)
        self.clear()

    def clear(self):
        """Begin anew, with nobody who waits for company."""
        self._calls_since_pass = 0

    def find(self, active: ActiveRequest) -> list[int]:
        """The pages that the prefix cache has of a prompt, which are held from now on."""
        request = active.request
        return self.pages.match(request.prompt, _most_found(active), self._config.chunk, request.salt)

    def begin(self, active: ActiveRequest, num_found: int):
        """A request has entered with so many pages that were found."""
        active.num_read = active.num_cached_tokens = 0
        self._found(active, num_found * self.pages.page_size)

    def choose(self, reading: Sequence[ActiveRequest], num_decoding: int) -> list[Segment]:
        """The segments of the next pass, which count as read; none if there is no pass now.

        Args:
          reading: the requests whose prompts are being read, the most senior first.
          num_decoding: how many requests decode, or wait for others to end.
        """
        if not reading:
            return []
        going = self._share(reading)
        held, waited = len(reading) - len(going), self._calls_since_pass
        segments = choose_pass(going, num_decoding, waited, self._config, held)
        self._calls_since_pass = 0 if segments else waited + 1
        if segments:
            bucket = next(n for n in self._config.segment_buckets if n >= len(segments))
            read = sum(segment.length for segment in segments)
            self.num_prefill_tokens += read
            self.num_padding += bucket * self._config.chunk - read
        for segment in segments:
            segment.active.num_read += segment.length
        return segments

    def sent(self, segments: Sequence[Segment]):
        """Let other prompts find what a pass reads, now that it has been sent: whatever is sent next finds it written."""
        for active in dict.fromkeys(segment.active for segment in segments):
            slots = min(active.num_read, _most_found(active))
            self.pages.register(active.request.prompt, active.pages, slots, active.request.salt)

    def _share(self, reading: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Let those whose prompts are being read have what others have read of the same text meanwhile.

        Returns:
          those who go on with reading. Each of the others waits for a more senior one, which reads next what it would
          read itself, and whose segments go before its own in any case. It has them as soon as that pass has been sent, so
          every pass that it waits for brings it on.
        """
        going, keys = [], set()
        for active in reading:
            request, most = active.request, _most_found(active)
            active.pages, slots, key = self.pages.look_again(
                request.prompt,
                active.pages,
                active.num_read,
                most,
                self._config.chunk,
                self._worth_waiting,
                request.salt,
            )
            self._found(active, slots)
            if key is None or key not in keys:
                going.append(active)
                keys.add(key)
        return going

    def _found(self, active: ActiveRequest, slots: int):
        """So many slots of a prompt need not be read any more."""
        active.num_cached_tokens += slots - active.num_read
        self.num_cached_tokens += slots - active.num_read
        active.num_read = slots


def _most_found(active: ActiveRequest) -> int:
    """How many slots of its prompt a request shares at most: it reads one token at least, and rounds write behind that.

    A prompt whose log-probabilities are wanted is read as a whole. Others do not share what it reads either, because another
    program wrote it.
    """
    if active.request.params.prompt_logprobs is not None:
        return 0
    return max(active.num_to_read - 1, 0)
