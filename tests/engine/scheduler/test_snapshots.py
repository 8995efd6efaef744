"""Snapshots of recurrent states: which are kept, what they let a text find, and that prompts go on from them."""

import pytest
from simulated_engine import Simulation
from small_engine import ALL, finish, prompt

from jspec.config import EngineConfig
from jspec.engine.scheduler.page_pool import PagePool
from jspec.engine.scheduler.prefill_queue import PrefillQueue
from jspec.engine.scheduler.snapshots import Snapshot, Snapshots

P = 4
TEXT = list(range(100, 130))


def snapshots(most: int, *pages: int) -> Snapshots:
    kept = Snapshots(most)
    for page in pages:
        kept.add(page, Snapshot(0, page))
    return kept


class TestSnapshots:
    def test_the_snapshot_used_longest_ago_makes_room(self):
        kept = snapshots(3, 1, 2, 3)
        assert kept.use(1).page == 1
        kept.add(4, Snapshot(0, 4))
        assert [page for page in range(6) if page in kept] == [1, 3, 4]
        kept.add(5, Snapshot(0, 5))
        assert [page for page in range(6) if page in kept] == [1, 4, 5]
        assert len(kept) == 3

    def test_without_room_no_snapshot_is_kept(self):
        kept = snapshots(0, 1, 2)
        assert len(kept) == 0
        assert kept.known([1, 2], 1) == []

    def test_the_first_snapshot_of_a_page_stays(self):
        kept, first = Snapshots(2), Snapshot(0, 1)
        kept.add(1, first)
        kept.add(1, Snapshot(7, 1))
        assert kept.use(1) is first
        assert len(kept) == 1

    def test_forgotten_snapshots_are_gone(self):
        kept = snapshots(3, 1, 2, 3)
        kept.forget(2)
        kept.forget(2)  # a page without a snapshot may be overwritten too
        assert [page in kept for page in (1, 2, 3)] == [True, False, True]
        kept.clear()
        assert len(kept) == 0

    @pytest.mark.parametrize(
        ("pages", "step", "expected"),
        [
            ([5, 6, 7, 8, 9], 1, [5, 6, 7, 8]),
            ([5, 6, 7], 1, [5, 6]),
            ([5, 6, 7, 8, 9], 2, [5, 6, 7, 8]),
            ([5, 6, 7], 3, []),  # page 7 has none
            ([5, 6, 7, 8, 9, 6], 3, [5, 6, 7, 8, 9, 6]),
            ([5], 2, []),
            ([9, 7, 5], 1, []),
            ([], 1, []),
        ],
    )
    def test_known_pages_end_with_a_snapshot(self, pages, step, expected):
        """There are snapshots behind pages 6 and 8."""
        assert snapshots(9, 6, 8).known(pages, step) == expected


class TestPagePool:
    """The pool of a target with recurrent states."""

    def pool(self, total: int = 10, most: int = 9, **how) -> PagePool:
        return PagePool(total, P, snapshots=Snapshots(most), **how)

    def stored(self, pool: PagePool, tokens, *places: int) -> list[int]:
        """The pages of a request with snapshots behind so many of its pages each; the request has ended."""
        pages = pool.take(pool.pages(len(tokens)))
        pool.register(tokens, pages, len(tokens))
        for place in places:
            pool.keep(Snapshot(0, pages[place - 1]))
        pool.release(pages)
        return pages

    def matched(self, pool: PagePool, tokens, grid: int = 1) -> list[int]:
        pages = pool.match(tokens, len(tokens) - 1, grid)
        pool.release(pages)
        return pages

    @pytest.mark.parametrize(
        ("places", "grid", "expected"),
        [((), 1, 0), ((2,), 1, 2), ((2, 5), 1, 5), ((2, 5), 2 * P, 2), ((3,), 2 * P, 0), ((7,), 1, 7)],
    )
    def test_a_prefix_is_found_up_to_its_last_snapshot(self, places, grid, expected):
        pool = self.pool()
        pages = self.stored(pool, TEXT, *places)
        assert self.matched(pool, TEXT, grid) == pages[:expected]

    def test_a_snapshot_behind_the_common_part_serves_nobody_else(self):
        pool = self.pool()
        pages = self.stored(pool, TEXT, 2, 5)
        assert self.matched(pool, [*TEXT[:16], *range(14)]) == pages[:2]

    def test_an_evicted_page_takes_its_snapshot_along(self):
        pool = self.pool(total=8)
        pages = self.stored(pool, TEXT[: 4 * P + 1], 2, 4)
        evicting = pool.take(pool.free + 1)  # the last page of the text goes first
        assert self.matched(pool, TEXT) == pages[:2]
        pool.register(TEXT[::-1], evicting[-1:], P)
        assert pages[3] in evicting
        assert self.matched(pool, TEXT[::-1]) == []  # the page is found, but what its old contents led to is gone
        pool.release(evicting)

    def test_snapshots_go_with_the_prefixes(self):
        for forget in ("forget_prefixes", "clear"):
            pool = self.pool()
            pages = self.stored(pool, TEXT, 2)
            getattr(pool, forget)()
            assert self.stored(pool, TEXT) == pages
            assert self.matched(pool, TEXT) == []

    def test_a_snapshot_of_a_copy_is_kept_for_the_page_that_is_found(self):
        """Two requests have prefilled the same text. Pages of the first are found, and the second has made the snapshot."""
        pool = self.pool()
        first, second = pool.take(2), pool.take(2)
        for pages in (first, second):
            pool.register(TEXT, pages, 2 * P)
        pool.keep(Snapshot(1, second[1]))
        assert self.matched(pool, TEXT) == first
        assert pool.snapshot_behind(first[1]).row == 1

    def test_a_page_that_is_not_registered_keeps_none(self):
        pool = self.pool()
        [page] = pool.take(1)
        pool.keep(Snapshot(0, page))
        pool.register(TEXT, [page], P)
        assert self.matched(pool, TEXT) == []

    def test_pools_of_other_targets_have_none(self):
        pool = PagePool(10, P)
        pages = self.stored(pool, TEXT, 2)
        assert self.matched(pool, TEXT) == pages[:7]
        assert pool.snapshot_behind(pages[1]) is None

    @pytest.mark.parametrize("known", [0, 1, 2, 3, 4])
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_texts_that_go_on_alike_have_the_same_key(self, known, place):
        """A request waits for another one with the same key, which makes the next snapshot, however many pages behind the
        last snapshot are known already."""
        pool, other = self.pool(), self.pool()
        if known:
            self.stored(pool, TEXT[: known * P], *([place] if 0 < place <= known else []))
        begun = place if place <= known else 0
        if begun:
            self.stored(other, TEXT[: begun * P], begun)
        keys = []
        for one in (pool, other):
            pages = one.take(7)
            pages, slots, key = one.look_again(TEXT, pages, 0, 28, 1, 3 * P)
            assert slots == begun * P
            keys.append(key)
        assert keys[0] == keys[1] is not None


# A target whose chunks are as long as its pages, with a snapshot for every second of them.
STEP, EVERY = 8, 16
CONFIG = EngineConfig(
    max_batch=2, max_len=400, page_size=8, prefill_chunk=8, prefill_tokens=64, rounds=4, snapshot_every=EVERY
)


def hybrid(config: EngineConfig = CONFIG, most_snapshots: int = 100, **how) -> Simulation:
    return Simulation(config, 2, habits=ALL, most_snapshots=most_snapshots, **how)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_turns_of_a_session_find_the_prompt_before(looks_ahead):
    """Each prompt begins with the one before and its answer, as an agent's do: it is found up to the last place in it where
    a snapshot may be, though that is no multiple of ``snapshot_every``."""
    played, text, before = hybrid(looks_ahead=looks_ahead), prompt(37), 0
    for turn in range(10):
        active = played.arrive(text, 9)
        finish(played)
        assert active.num_cached_tokens >= (before - 2) // STEP * STEP
        assert active.num_cached_tokens > 0 or not turn
        before = len(text)
        text = [*text, *active.tokens, *[1 + turn % 2] * 13]


def test_a_prompt_goes_on_from_the_last_snapshot_that_there_is():
    played = hybrid(most_snapshots=1)
    played.arrive(prompt(60), 3)
    finish(played)  # snapshots were made behind 16, 32, 48 and 56 tokens, and the last one is kept
    again = played.arrive([*prompt(56), 2, 2, 2], 3)
    finish(played)
    other = played.arrive([*prompt(50), 2, 2, 2], 3)  # whose snapshot behind 48 tokens has made room
    finish(played)
    assert [again.num_cached_tokens, other.num_cached_tokens] == [56, 0]


@pytest.mark.parametrize("most_snapshots", [0, 100])
@pytest.mark.parametrize("prefill_tokens", [8, 24, 64])
def test_prompts_that_come_together_are_prefilled_once(most_snapshots, prefill_tokens):
    """The others wait for the first one's snapshots behind 256 tokens, though its batches end earlier, and behind its last
    place. Without room for snapshots there is nothing to wait for."""
    config = EngineConfig(
        max_batch=4, max_len=400, page_size=8, prefill_chunk=8, prefill_tokens=prefill_tokens, snapshot_every=256
    )
    played = hybrid(config, most_snapshots)
    for i in range(4):
        played.arrive([*prompt(300), 3 + i, 3 + i], 3)
    finish(played)
    first, *others = [active.num_cached_tokens for active in played.all]
    assert first == 0
    assert others == [296 if most_snapshots else 0] * 3


def test_dropped_restores_are_detected(monkeypatch):
    """A prompt with a hit goes on from a row that has read nothing of it."""
    monkeypatch.setattr(PrefillQueue, "take_restores", lambda queue: [])
    played = hybrid()
    played.arrive(prompt(60), 3)
    finish(played)
    played.arrive([*prompt(60), 2, 2], 3)
    with pytest.raises(AssertionError, match="a state that has not read what comes before"):
        finish(played)
