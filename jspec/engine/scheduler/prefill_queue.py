"""The prefill queue: the next chunk of each prompt, and prefix-cache hits. Nothing here needs JAX."""

from collections.abc import Sequence

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest, row_of
from jspec.engine.scheduler.page_pool import PagePool
from jspec.engine.scheduler.prefill_batching import WORTH_WAITING, Chunk, choose_prefill_batch, most_cached
from jspec.engine.scheduler.snapshots import Restore, Snapshot


class PrefillQueue:
    """Prompts that are prefilled, one batch after the other.

    Each full page of a prompt can be found as soon as the batch that writes it has been sent: by prompts that are admitted,
    and by those that are prefilled beside it. So of prompts that arrive together and share a prefix, one prefills it.

    Args:
      config: the sizes of batches and chunks.
      pages: holders of pages, and the prefix cache.

    Attributes:
      pages: as given.
      num_cached_tokens: how many prompt tokens were found in the prefix cache so far.
      num_prefill_tokens: how many prompt tokens have been prefilled so far.
      num_padding: how many tokens of padding the batches had.
      restores: of targets with recurrent states, the snapshots from which prompts go on that have skipped a cached prefix;
        ``take_restores`` empties it.
    """

    def __init__(self, config: EngineConfig, pages: PagePool):
        self.pages, self._config = pages, config
        self.num_cached_tokens = self.num_prefill_tokens = self.num_padding = 0
        batch_tokens = config.chunk_buckets[-1] * config.chunk
        self._worth_waiting = max(min(WORTH_WAITING, batch_tokens // 2), 1)
        self.clear()

    def clear(self):
        """Forget how long chunks have waited, and what is to be restored."""
        self._calls_since_batch = 0
        self.restores: list[Restore] = []

    def find(self, active: ActiveRequest) -> list[int]:
        """The pages of a prompt in the prefix cache, which the request holds from now on."""
        return self.pages.match(active.prefix, most_cached(active), self._config.chunk, active.request.salt)

    def begin(self, active: ActiveRequest, num_pages: int):
        """Start the prefill of a request that was admitted with so many cached pages."""
        active.num_prefilled = active.num_cached_tokens = 0
        self._skip_cached(active, num_pages * self.pages.page_size)

    def choose(self, prefilling: Sequence[ActiveRequest], num_decoding: int) -> list[Chunk]:
        """The chunks of the next batch, which count as prefilled; none if there is no batch now.

        Args:
          prefilling: the requests whose prompts are prefilled, the most senior first.
          num_decoding: how many requests decode, or wait for others to end.
        """
        if not prefilling:
            return []
        going = self._share(prefilling)
        held, waited = len(prefilling) - len(going), self._calls_since_batch
        chunks = choose_prefill_batch(going, num_decoding, waited, self._config, held)
        self._calls_since_batch = 0 if chunks else waited + 1
        if chunks:
            bucket = next(n for n in self._config.chunk_buckets if n >= len(chunks))
            tokens = sum(chunk.length for chunk in chunks)
            self.num_prefill_tokens += tokens
            self.num_padding += bucket * self._config.chunk - tokens
        for chunk in chunks:
            chunk.active.num_prefilled += chunk.length
        return chunks

    def take_restores(self) -> list[Restore]:
        """The snapshots that are to be copied into rows before the next batch."""
        restores, self.restores = self.restores, []
        return restores

    def snapshots(self, chunks: Sequence[Chunk]) -> list[Snapshot]:
        """The snapshots to make behind a batch of these chunks."""
        made, config = [], self._config
        for active, start, length in chunks:
            end = start + length
            if end == config.next_snapshot(start, most_cached(active)):
                made.append(Snapshot(row_of(active), active.pages[end // config.page_size - 1]))
        return made

    def dispatched(self, chunks: Sequence[Chunk], snapshots: Sequence[Snapshot] = ()):
        """Register the pages of a dispatched prefill in the prefix cache, and keep the snapshots made behind it.

        Later programs run after it, so they see its writes.
        """
        for active in dict.fromkeys(chunk.active for chunk in chunks):
            slots = min(active.num_prefilled, most_cached(active))
            self.pages.register(active.prefix, active.pages, slots, active.request.salt)
        for snapshot in snapshots:
            self.pages.keep(snapshot)

    def _share(self, prefilling: Sequence[ActiveRequest]) -> list[ActiveRequest]:
        """Exchange pages of prompts for those that other requests have prefilled of the same text meanwhile.

        Returns:
          the requests to prefill now. Each of the others waits for a more senior one, which prefills next what it would
          prefill itself, and whose chunks go before its own in any case. It finds them as soon as that batch has been sent,
          so every batch that it waits for advances it.
        """
        going, keys = [], set()
        for active in prefilling:
            key = self._look_again(active)
            if key is None or key not in keys:
                going.append(active)
                keys.add(key)
        return going

    def _look_again(self, active: ActiveRequest) -> bytes | None:
        """Exchange pages of one prompt; returns the key of the text that it waits for if another request prefills that.

        Without recurrent states that is so much as is worth waiting for, and with them the text up to the next snapshot,
        which is another one once a snapshot was found.
        """
        prefix, most, config = active.prefix, most_cached(active), self._config
        while True:
            start = active.num_prefilled
            end = config.next_snapshot(start, most)
            span = self._worth_waiting if end is None else end - start
            active.pages, slots, key = self.pages.look_again(
                prefix, active.pages, start, most, config.chunk, span, active.request.salt
            )
            self._skip_cached(active, slots)
            if slots == start or config.snapshot_every is None:
                return key

    def _skip_cached(self, active: ActiveRequest, slots: int):
        """Skip the first slots of a prompt, which are cached."""
        if slots > active.num_prefilled:
            snapshot = self.pages.snapshot_behind(active.pages[slots // self.pages.page_size - 1])
            if snapshot is not None:
                self.restores.append(Restore(row_of(active), snapshot))
        active.num_cached_tokens += slots - active.num_prefilled
        self.num_cached_tokens += slots - active.num_prefilled
        active.num_prefilled = slots
