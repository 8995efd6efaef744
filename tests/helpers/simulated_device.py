"""A simulated device that executes schedules, and checks every read and write.

Every cache slot holds a mark, which is a digest of the text up to it, and so stands for keys and values that depend on
that text. Marks are separate for target and drafter. A slot that was not written for its present holder has
garbage. The device executes everything in the order in which it is sent.
"""

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jspec.config import EngineConfig
from jspec.engine.request import BROKEN, FULL, LIVE, STOPPED, ActiveRequest
from jspec.engine.scheduler.page_pool import PagePool
from jspec.engine.scheduler.prefill_batching import Chunk
from jspec.engine.scheduler.schedule import Schedule, Swap
from jspec.engine.scheduler.scheduler import Scheduler

GARBAGE = -1
PREFILLED, DECODED = 1, 2  # which program wrote a slot of the target
STOP = 0  # the token that ends a text
SALTS = ("", "a", "b")


class Habits(NamedTuple):
    """How likely things are in a round: that one more draft is accepted, a stop token, and logits that are not finite."""

    accept: float = 0.5
    stop: float = 0.05
    broken: float = 0.0


class Text:
    """The tokens of a request, and the mark of each."""

    def __init__(self, prompt: Sequence[int], salt: str, max_len: int):
        self.tokens: list[int] = []
        self.marks = np.full(max_len + 1, GARBAGE, np.int64)
        self._mark = SALTS.index(salt)
        for token in prompt:
            self.append(token)

    def append(self, token: int):
        self._mark = hash((self._mark, token)) & (2**62 - 1)
        self.marks[len(self.tokens)] = self._mark
        self.tokens.append(token)


@dataclasses.dataclass
class Row:
    """What the device knows of a request; the fields are those of ``DecodeState``."""

    active: ActiveRequest
    length: int
    previous: int
    outcome: int = LIVE


class RowLog(NamedTuple):
    tokens: list[list[int]]
    count: list[int]
    drafted: list[int]
    accepted: list[int]
    outcome: list[int]
    deepest: list[int]
    rejects: list[int]


class Logs(NamedTuple):
    """What ``Scheduler.update`` reads of ``RoundLog``, which would need JAX."""

    rows: list[RowLog]

    def by_row(self) -> list[RowLog]:
        return self.rows


class WatchedPages(PagePool):
    """Notes what pages were given out for new contents, and how many of the first slots of a page are final.

    A schedule registers the writes of its own prefill, so slots are final only after ``keep_promises``.
    """

    def clear(self):
        super().clear()
        self.renewed: set[int] = set()
        self.final: dict[int, int] = {}
        self._promised: dict[int, int] = {}

    def take(self, count):
        pages = super().take(count)
        self.renewed.update(pages)
        for page in pages:
            self.final.pop(page, None)
            self._promised.pop(page, None)
        return pages

    def register(self, tokens, pages, slots, salt=""):
        super().register(tokens, pages, slots, salt)
        for index, page in enumerate(pages):
            promised = min(max(slots - index * self.page_size, 0), self.page_size)
            self._promised[page] = max(promised, self.final.get(page, 0), self._promised.get(page, 0))

    def keep_promises(self):
        """Slots that were registered are final from now on."""
        self.final |= self._promised
        self._promised.clear()


class Device:
    """Executes schedules on marks, and fails an assertion at a forbidden read or write."""

    def __init__(
        self,
        config: EngineConfig,
        K: int,
        looks_ahead: bool,
        scheduler: Scheduler,
        pages: WatchedPages,
        rng: random.Random,
        habits: Habits,
        checks_contents: bool,
    ):
        self._config, self._K, self._ahead = config, K, int(looks_ahead)
        self._scheduler, self._pages = scheduler, pages
        self._rng, self._habits, self._checks_contents = rng, habits, checks_contents
        self._target = np.full(config.pool_pages * config.page_size, GARBAGE, np.int64)
        self._draft, self._origin = self._target.copy(), np.zeros(len(self._target), np.int8)
        self.rows: list[Row | None] = [None] * config.num_rows
        # Of each row the mark of the last token that its recurrent state has read, GARBAGE if it begins anew.
        self._states = [GARBAGE] * config.num_rows
        self._features: list[ActiveRequest | None] = [None] * config.num_rows  # whose prompt has ended in which row
        self._texts: dict[ActiveRequest, Text] = {}
        # How many tokens of a prompt were read; each preemption begins a prefill anew.
        self._num_prefilled: collections.Counter[tuple[ActiveRequest, int]] = collections.Counter()
        self.holders: collections.Counter[int] = collections.Counter()
        self.num_prefilled = self.num_padding = self.num_rounds = 0

    def text(self, active: ActiveRequest) -> Text:
        """What the request has committed on the device."""
        request = active.request
        if active not in self._texts:
            self._texts[active] = Text(request.prompt, request.salt, self._config.max_len)
        return self._texts[active]

    def execute(self, schedule: Schedule, K: int) -> Logs | None:
        """Do what ``ModelRunner.execute`` sends, in its order, with rounds of up to K drafts."""
        for swap in schedule.swap_out:
            self._swap_out(swap)
        for page in self._pages.renewed:
            for array in (self._target, self._draft, self._origin):
                array[page * self._pages.page_size : (page + 1) * self._pages.page_size] = GARBAGE
        self._pages.renewed.clear()
        self.holders = collections.Counter(page for active in self._scheduler.under_way for page in active.pages)
        for restore in schedule.restores:
            self._states[restore.row] = restore.snapshot.saved
        if schedule.chunks:
            self._prefill_all(schedule.chunks)
        for snapshot in schedule.snapshots:
            snapshot.saved = self._states[snapshot.row]
            assert self._target[(snapshot.page + 1) * self._config.page_size - 1] == snapshot.saved
        self._pages.keep_promises()
        for active in schedule.admitted:
            self._admit(active)
        for swap in schedule.swap_in:
            self._swap_in(swap)
        return self._decode(schedule, K) if schedule.decoding else None

    def _places(self, pages: Sequence[int], start: int, end: int) -> np.ndarray:
        """Where slots ``start .. end - 1`` of a request with these pages are."""
        P, slots = self._config.page_size, np.arange(start, end)
        assert end <= len(pages) * P, "a slot behind the last page"
        return np.asarray(pages, np.int64)[slots // P] * P + slots % P

    def _check_reads(self, active: ActiveRequest, target: int, draft: int):
        """Check that the first slots hold what was written for the same text; the drafter's too, if there is one."""
        if not self._checks_contents:
            return
        draft = draft if self._K else 0
        text, places = self.text(active), self._places(active.pages, 0, target)
        np.testing.assert_array_equal(self._target[places], text.marks[:target])
        np.testing.assert_array_equal(self._draft[places[:draft]], text.marks[self._ahead : draft + self._ahead])
        if self._config.reproducible:
            assert (self._origin[places[: active.num_to_prefill]] == PREFILLED).all()

    def _may_write(self, active: ActiveRequest, start: int, end: int) -> np.ndarray:
        """Where slots ``start .. end - 1`` are, which must have no other holder, and not be final."""
        P, final = self._config.page_size, self._pages.final
        places = self._places(active.pages, start, end)
        for index in range(start // P, -(-end // P)):
            page = active.pages[index]
            assert page > 0
            assert self.holders[page] == 1, "a write to a page with another holder"
            assert max(start - index * P, 0) >= final.get(page, 0), "a write to a slot that was promised to be final"
        return places

    def _prefill_all(self, chunks: Sequence[Chunk]):
        bucket = min(n for n in self._config.chunk_buckets if n >= len(chunks))
        for chunk in chunks:
            self._prefill(chunk)
            self.num_prefilled += chunk.length
            self.num_padding += self._config.chunk - chunk.length
        self.num_padding += (bucket - len(chunks)) * self._config.chunk

    def _prefill(self, chunk: Chunk):
        active, start, count = chunk
        c, end, text = self._config.chunk, start + count, self.text(active)
        prefill = active, active.num_preemptions
        assert start == self._num_prefilled[prefill] + active.num_cached_tokens
        assert start % c == 0
        assert end == min(start + c, active.num_to_prefill) > start
        self._check_reads(active, start, start)
        self._prefill_state(active, start, end)
        places = self._may_write(active, start, end)
        self._target[places], self._origin[places] = text.marks[start:end], PREFILLED
        self._draft[places] = text.marks[start + self._ahead : end + self._ahead]
        self._num_prefilled[prefill] += count
        if end == active.num_to_prefill:
            assert active.row is not None
            self._features[active.row] = active

    def _prefill_state(self, active: ActiveRequest, start: int, end: int):
        """Have the recurrent state of a row read tokens, which must be those behind what it has read; none if there are no
        snapshots, as of other targets."""
        if self._config.snapshot_every is None:
            return
        assert active.row is not None
        marks = self.text(active).marks
        assert start == 0 or self._states[active.row] == marks[start - 1], "a state that has not read what comes before"
        self._states[active.row] = int(marks[end - 1])

    def _may_have(self, row: int, active: ActiveRequest):
        """Check that the row's previous request is done with it."""
        old = self.rows[row]
        assert active.row == row
        given_up = old is None or old.active.outcome != LIVE
        assert given_up or old.outcome != LIVE, "the row of a request that still decodes"

    def _admit(self, active: ActiveRequest):
        row, length = active.row, len(active.request.prompt)
        assert row is not None
        assert self._num_prefilled[active, active.num_preemptions] + active.num_cached_tokens == active.num_to_prefill
        assert self._features[row] is active or active.num_to_prefill == 0
        self._may_have(row, active)
        self.rows[row] = Row(active, length, length - 1)

    def _swap_out(self, swap: Swap):
        active, row, pages = swap
        old = self.rows[row]
        assert old is not None
        assert old.active is active
        places = self._places(pages, 0, len(pages) * self._config.page_size)
        contents = [array[places] for array in (self._target, self._draft, self._origin)]
        active.saved, self.rows[row] = (old, contents, self._states[row]), None

    def _swap_in(self, swap: Swap):
        active, row, pages = swap
        assert len(pages) == active.num_saved_pages
        assert active.pages[: len(pages)] == pages
        self._may_have(row, active)
        saved, contents, self._states[row] = active.saved
        self.rows[row] = saved
        places = self._may_write(active, 0, len(pages) * self._config.page_size)
        for array, old in zip((self._target, self._draft, self._origin), contents, strict=True):
            array[places] = old
        active.saved, active.num_saved_pages = None, 0

    def _decode(self, schedule: Schedule, K: int) -> Logs:
        rows = []
        for active in schedule.decoding:
            assert active.row is not None
            row = self.rows[active.row]
            assert row is not None
            assert row.active is active
            self._check_room(row, schedule.rounds)
            rows.append(row)
        assert len({id(row) for row in rows}) == len(rows)
        nothing = [-1] * (self._K + 1), 0, -1, -1, STOPPED, -1, -1
        logs = [[nothing] * self._config.rounds for _ in rows]
        for i in range(schedule.rounds):
            for row, log in zip(rows, logs, strict=True):
                if row.outcome == LIVE:
                    log[i] = self._round(row, K)
        for row in rows:
            if K == 0 < self._K and row.outcome == LIVE:
                self._catch_up(row)
        return Logs([RowLog(*(list(field) for field in zip(*log, strict=True))) for log in logs])

    def _check_room(self, row: Row, rounds: int):
        config, K, request = self._config, self._K, row.active.request
        most = min(request.limit(config.max_len) + K, config.max_len)
        slots = min(row.length + rounds * (K + 1) + K, most)
        assert len(row.active.pages) * config.page_size >= slots

    def _round(self, row: Row, K: int) -> tuple:
        active, length, rng = row.active, row.length, self._rng
        text, room = self.text(active), max(min(self._config.max_len - 1 - length, K), 0)
        self._check_reads(active, length - 1, max(row.previous - 1, 0))
        if K:
            self._catch_up(row)
        places = self._may_write(active, length - 1, length + room)
        if self._config.snapshot_every is not None:
            assert active.row is not None
            assert length == 1 or self._states[active.row] == text.marks[length - 2], "a state of another text"

        accepted = 0
        while accepted < room and rng.random() < self._habits.accept:
            accepted += 1
        ok = rng.random() >= self._habits.broken
        limit = active.request.limit(self._config.max_len)
        stop = next((j for j in range(accepted + ok) if rng.random() < self._habits.stop), self._K + 1)
        count = min(accepted + ok, stop + 1, limit - length)
        tokens = [STOP if j == stop else rng.randrange(1, 3) for j in range(count)]
        row.outcome = STOPPED if stop < count else FULL if length + count == limit else LIVE if ok else BROKEN

        for token in tokens:
            text.append(token)
        if active.row is not None and count:  # it stands before the newest token
            self._states[active.row] = int(text.marks[length + count - 2])
        right = min(accepted, count) + 1
        self._target[places], self._origin[places] = GARBAGE, DECODED
        self._target[places[:right]] = text.marks[length - 1 : length - 1 + right]
        self._draft[places] = GARBAGE
        row.length, row.previous = length + count, length if K else row.previous
        padded, rejects = [*tokens, *[-1] * (self._K + 1 - count)], int(accepted < room)
        return padded, count, room, accepted, row.outcome, room, rejects

    def _catch_up(self, row: Row):
        """Have the drafter read what it has not read yet, or only as its own drafts."""
        start, end = max(row.previous - 1, 0), row.length - 1
        places = self._may_write(row.active, start, end)
        self._draft[places] = self.text(row.active).marks[start + self._ahead : end + self._ahead]
        row.previous = row.length - 1
