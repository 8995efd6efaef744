"""Pages: who holds them, which text finds them, and which of them are evicted first."""

import hashlib
import sys
import types

import numpy as np
import pytest

from jspec.config import NULL_PAGE
from jspec.engine.scheduler import prefix_cache
from jspec.engine.scheduler.page_pool import PagePool

P = 4
TEXT = list(range(100, 130))


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.free, pool.cached, pool.used


def stored(pool: PagePool, tokens, slots: int | None = None, salt: str = "") -> list[int]:
    """The pages of a request that has written all slots but the last, and has ended."""
    slots = len(tokens) - 1 if slots is None else slots
    pages = pool.take(pool.pages(slots))
    pool.register(tokens, pages, slots, salt)
    pool.release(pages)
    return pages


def matched(pool: PagePool, *args, **kwargs) -> list[int]:
    """What ``match`` finds, held by nobody afterwards."""
    pages = pool.match(*args, **kwargs)
    pool.release(pages)
    return pages


def test_every_page_is_handed_out_once_and_never_the_null_page():
    pool = PagePool(10, page_size=10)
    assert [pool.pages(slots) for slots in (0, 1, 10, 11, 100)] == [0, 1, 1, 2, 10]
    first, second = pool.take(4), pool.take(6)
    assert sorted(first + second) == list(range(1, 11))
    assert NULL_PAGE not in first + second
    pool.release(first)
    assert counts(pool) == (4, 0, 6)
    assert sorted(pool.take(4)) == sorted(first)


def test_taking_too_many_pages_is_refused():
    pool = PagePool(5, P)
    stored(pool, TEXT[:9])
    pool.take(1)
    with pytest.raises(ValueError, match=r"take\(5\) of a pool of 5 pages: 2 are free and 2 cached, .* 1 are held"):
        pool.take(5)
    assert counts(pool) == (2, 2, 1)
    assert len(matched(pool, TEXT, 30)) == 2  # nothing was evicted
    assert len(pool.take(pool.available)) == 4


def test_releasing_an_unheld_page_is_refused():
    pool = PagePool(5, P)
    pages = pool.take(2)
    for wrong in ([pages[0], 5], [pages[0], pages[1], pages[0]], [NULL_PAGE]):
        with pytest.raises(ValueError, match=r"release: page \d has [01] holders, not [12]"):
            pool.release(wrong)
        assert counts(pool) == (3, 0, 2)
    pool.release(pages)
    with pytest.raises(ValueError, match="has 0 holders, not 1"):
        pool.release(pages[:1])


@pytest.mark.parametrize("as_tokens", [list, tuple, np.array, lambda tokens: np.repeat(np.array(tokens), 2)[::2]])
def test_a_text_finds_its_prefix(as_tokens):
    pool = PagePool(20, P)
    pages = stored(pool, TEXT[:15])
    assert len(pages) == 4
    assert counts(pool) == (17, 3, 0)  # the fourth page is not full
    assert pool.match(as_tokens(TEXT), 30) == pages[:3]
    assert counts(pool) == (17, 0, 3)
    assert matched(pool, as_tokens([*TEXT[:9], 1, *TEXT[10:]]), 30) == pages[:2]
    assert matched(pool, as_tokens([1, *TEXT[1:]]), 30) == []
    assert matched(pool, as_tokens(TEXT[4:]), 26) == []  # the same tokens in another place


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_page_is_found_only_behind_its_whole_prefix(looks_ahead):
    """Two texts agree in their second page alone."""
    pool = PagePool(20, P, looks_ahead=looks_ahead)
    one, two = [1, *TEXT[1:9]], [2, *TEXT[1:9]]
    first, second = stored(pool, one), stored(pool, two)
    assert matched(pool, one, 9) == first
    assert matched(pool, two, 9) == second
    assert pool.cached == 4


def test_salts_share_no_pages():
    """Any string is a salt. One that no page could have would end all requests of a step."""
    pool = PagePool(30, P)
    pages = {salt: stored(pool, TEXT[:9], salt=salt) for salt in ("", "a", "b", "\ud800", "\udfff")}
    assert pool.cached == 10
    for salt, own in pages.items():
        assert matched(pool, TEXT, 30, salt=salt) == own
    assert matched(pool, TEXT, 30, salt="c") == []


@pytest.mark.parametrize("grid", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_matched_slots_at_every_length(grid, looks_ahead):
    pool = PagePool(20, P, looks_ahead=looks_ahead)
    pages = stored(pool, TEXT)
    for length in range(len(TEXT) + 1):
        for most_slots in range(-1, length + 5):
            slots = min(length - looks_ahead, most_slots, 28)
            expected = max(size for size in range(0, 29, P) if size % grid == 0 and size <= max(slots, 0))
            assert matched(pool, TEXT[:length], most_slots, grid) == pages[: expected // P]
    assert counts(pool) == (13, 7, 0)
    for same in range(len(TEXT)):
        expected = max(size for size in range(0, 29, P) if size % grid == 0 and size <= max(same - looks_ahead, 0))
        assert matched(pool, [*TEXT[:same], *[1] * 30], 60, grid) == pages[: expected // P]


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("slots", range(0, 10))
def test_only_full_pages_are_registered(slots, looks_ahead):
    pool = PagePool(20, P, looks_ahead=looks_ahead)
    stored(pool, TEXT[:slots], slots)  # the token after the last slot is not known
    assert pool.cached == max(0, slots - looks_ahead) // P
    pool.clear()
    stored(pool, TEXT, slots)
    assert pool.cached == slots // P
    pool.clear()
    pages = pool.take(3)
    pool.register([], pages, 0)
    pool.release(pages)
    assert pool.cached == 0


def test_looks_ahead_excludes_only_the_page_before_another_token():
    pool = PagePool(20, P, looks_ahead=True)
    pages = stored(pool, TEXT[:13])
    for same, found in ((13, 3), (12, 2), (9, 2), (8, 1), (5, 1), (4, 0)):
        assert matched(pool, [*TEXT[:same], *[1] * 20], 30) == pages[:found]
    assert matched(pool, TEXT[:12], 30) == pages[:2]  # what follows the third page is not known


def test_without_looks_ahead_the_next_token_may_differ():
    pool = PagePool(20, P)
    pages = stored(pool, TEXT[:13])
    assert matched(pool, [*TEXT[:12], 1], 30) == pages[:3]
    assert matched(pool, TEXT[:12], 30) == pages[:3]


def test_without_prefix_cache_nothing_is_cached():
    pool = PagePool(20, P, prefix_cache=False)
    stored(pool, TEXT)
    assert counts(pool) == (20, 0, 0)
    assert pool.match(TEXT, 30) == []


def test_shared_pages_count_once_and_stay_until_the_last_release():
    pool = PagePool(3, P)
    pages = stored(pool, TEXT[:9])
    assert [pool.match(TEXT, 30) for _ in range(3)] == [pages] * 3
    for _ in range(2):
        pool.release(pages)
        assert counts(pool) == (1, 0, 2)
        assert pool.available == 1
    with pytest.raises(ValueError, match="take at most 1"):
        pool.take(2)
    pool.release(pages)
    assert counts(pool) == (1, 2, 0)


def test_a_running_request_shares_what_it_has_registered_so_far():
    pool = PagePool(20, P)
    pages = pool.take(4)
    for slots, found in ((3, 0), (4, 1), (7, 1), (8, 2), (8, 2), (4, 2), (14, 3)):
        pool.register(TEXT[: slots + 1], pages, slots)
        assert matched(pool, TEXT, 30) == pages[:found]
        assert counts(pool) == (16, 0, 4)


def test_a_request_goes_on_behind_what_it_shares():
    pool = PagePool(20, P)
    first = stored(pool, TEXT[:9])
    shared = pool.match(TEXT, 30)
    pages = shared + pool.take(2)
    pool.register(TEXT, pages, 14)
    pool.release(pages)
    assert shared == first
    assert matched(pool, TEXT, 30) == pages[:3]


def test_of_two_pages_with_the_same_text_the_first_is_found():
    pool = PagePool(20, P)
    first, second = pool.take(2), pool.take(3)
    pool.register(TEXT, first, 8)
    pool.register(TEXT, second, 12)
    assert matched(pool, TEXT, 30) == [*first, second[2]]
    pool.release(second)
    assert counts(pool) == (17, 1, 2)  # its first two pages are free again
    pool.release(first)
    assert counts(pool) == (17, 3, 0)
    stored(pool, [1, *TEXT[:18]], 17)
    stored(pool, [2, *TEXT[:18]], 17)  # on the pages that are free again, too
    assert len(matched(pool, [1, *TEXT], 30)) == len(matched(pool, [2, *TEXT], 30)) == 4
    assert matched(pool, TEXT, 30) == [*first, second[2]]


def test_the_second_page_takes_the_place_of_the_first_when_registered_after_its_eviction():
    pool = PagePool(4, P)
    first, second = pool.take(1), pool.take(1)
    pool.register(TEXT, first, 4)
    pool.register(TEXT, second, 4)
    pool.release(first)
    pool.take(3)
    assert matched(pool, TEXT, 30) == []
    pool.register(TEXT, second, 4)
    assert matched(pool, TEXT, 30) == second


@pytest.mark.parametrize(
    ("pages", "slots", "message"),
    [([1, 2], 9, r"9 slots need 3 pages of 4, not 2"), ([1, 3], 8, r"page 3 has no holder")],
)
def test_invalid_registration_is_refused(pages, slots, message):
    pool = PagePool(5, P)
    assert pool.take(2) == [1, 2]
    with pytest.raises(ValueError, match=message):
        pool.register(TEXT, pages, slots)
    pool.release([1, 2])
    assert counts(pool) == (5, 0, 0)


def test_least_recently_used_text_is_evicted_first():
    pool = PagePool(6, P)
    texts = [[first, *TEXT[:7]] for first in range(3)]
    pages = [stored(pool, text, 8) for text in texts]
    matched(pool, texts[0], 8)  # used again: the order is 1, 2, 0
    assert set(pool.take(2)) == set(pages[1])
    assert [len(matched(pool, text, 8)) for text in texts] == [2, 0, 2]  # used again, in this order
    assert set(pool.take(2)) == set(pages[0])
    assert matched(pool, texts[2], 8) == pages[2]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
@pytest.mark.parametrize("at_once", [False, True])
def test_within_a_text_the_last_page_is_evicted_first(order, at_once):
    pool = PagePool(4, P)
    pages = pool.take(4)
    pool.register(TEXT, pages, 16)
    for part in [order] if at_once else [[place] for place in order]:
        pool.release([pages[place] for place in part])
    for left in (3, 2, 1, 0):
        pool.take(1)
        assert pool.cached == left
        assert matched(pool, TEXT, 30) == pages[:left]


def test_a_page_outlives_those_found_through_it():
    """Whose request had written the first page again and so never held the one that is found."""
    pool = PagePool(5, P)
    first, second = pool.take(1), pool.take(2)
    pool.register(TEXT, first, 4)
    pool.register(TEXT, second, 8)
    pool.release(first)
    other = stored(pool, [1, 2, 3, 4], 4)
    pool.release(second)
    assert counts(pool) == (2, 3, 0)
    assert set(pool.take(3)) & {*first, second[1], *other} == set(other)
    assert pool.take(1) == second[1:]
    assert pool.take(1) == first


def test_held_pages_are_not_evicted():
    pool = PagePool(4, P)
    pages = stored(pool, TEXT, 16)
    assert pool.match(TEXT, 8) == pages[:2]
    assert set(pool.take(2)) == set(pages[2:])
    with pytest.raises(ValueError, match="take at most 0"):
        pool.take(1)
    pool.release(pages[:2])
    assert set(pool.take(2)) == set(pages[:2])


def test_forget_prefixes_frees_cached_pages():
    pool = PagePool(10, P)
    stored(pool, [1, 2, 3, 4], 4)
    old = pool.take(2)
    pool.register(TEXT, old, 8)
    pool.forget_prefixes()
    assert counts(pool) == (8, 0, 2)
    assert pool.match(TEXT, 30) == pool.match([1, 2, 3, 4], 4) == []
    pages = old + pool.take(1)
    pool.register(TEXT, pages, 12)  # what the third page holds depends on the first two
    assert pool.match(TEXT, 30) == []
    pool.release(pages)
    assert counts(pool) == (10, 0, 0)
    pages = stored(pool, TEXT)  # on the same pages, with the new weights
    assert {*old} < {*pages}
    assert matched(pool, TEXT, 30) == pages[:7]


def test_clear_resets_the_pool():
    pool = PagePool(10, P)
    stored(pool, [1, 2, 3, 4], 4)
    pages = pool.take(9)
    pool.forget_prefixes()
    pool.clear()
    assert counts(pool) == (10, 0, 0)
    assert pool.match([1, 2, 3, 4], 4) == []
    assert set(stored(pool, TEXT)) & set(pages)
    assert len(matched(pool, TEXT, 30)) == 7


def test_an_interrupted_clear_can_be_repeated():
    lines = 0

    def interrupt(frame, event, _):
        nonlocal lines
        if frame.f_code is PagePool.clear.__code__ and event == "line":
            lines += 1
            if lines == stop:
                raise KeyboardInterrupt
        return interrupt

    stop = 0
    while lines == stop:  # until it was not interrupted any more
        pool, lines, stop = PagePool(5, P), 0, stop + 1
        pool.take(2)
        stored(pool, TEXT[:9])
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            pool.clear()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        pool.clear()
        assert counts(pool) == (5, 0, 0)
        assert pool.match(TEXT, 30) == []
        assert sorted(pool.take(5)) == [1, 2, 3, 4, 5]
    assert stop > 3


def test_the_pages_of_a_request_are_hashed_once(monkeypatch):
    """Except the first unknown one, once by ``match`` and once by ``register``, and the salt."""
    hashed = []

    def sha256(data: bytes):
        hashed.append(len(data))
        return hashlib.sha256(data)

    pool, text = PagePool(100, P), list(range(40 * P + 1))
    stored(pool, text[: 20 * P + 1])
    monkeypatch.setattr(prefix_cache, "hashlib", types.SimpleNamespace(sha256=sha256))
    shared = pool.match(text, 40 * P)
    assert (len(shared), len(hashed)) == (20, 1 + 21)
    pages = shared + pool.take(20)
    for slots in range(20 * P, 40 * P + 1):
        pool.register(text, pages, slots)
    assert len(hashed) == 1 + 21 + 20
    assert len(pool.match(text, 40 * P)) == 40


def test_long_texts_are_hashed_in_groups_of_pages():
    """Of more pages than are converted at a time, and not a multiple of them."""
    for looks_ahead in (False, True):
        pool = PagePool(100, P, looks_ahead=looks_ahead)
        count = 2 * prefix_cache.PAGE_GROUP + 3
        text = list(np.random.default_rng(0).integers(0, 2**31, count * P + 1))
        pages = pool.take(count)
        for full in (5, count):  # the second time begins between two blocks
            pool.register(text, pages, full * P)
        assert matched(pool, text, len(text)) == pages
        for page in range(count):
            changed = [*text]
            changed[page * P] += 1
            assert matched(pool, changed, len(text)) == pages[: max(0, page - looks_ahead)]
