"""Pages against a simple model of them: whatever requests do in whatever order, both say the same."""

import collections
import dataclasses
import math
from random import Random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jspec.config import NULL_PAGE
from jspec.engine.scheduler.page_pool import PagePool

Prefix = tuple[str, tuple[int, ...]]  # the salt, and all tokens that what a page holds depends on

ACTIONS = ["enter", "register", "register", "release"] * 10 + ["grow", "look again", "release a part"] * 4 + ["forget"]


def text(random: Random) -> list[int]:
    """Zeros, with a one in some place or none: such texts often begin alike."""
    length, one = random.randrange(10), random.randrange(20)
    return [int(index == one) for index in range(length)]


@dataclasses.dataclass(eq=False)
class Request:
    salt: str
    tokens: list[int]
    pages: list[int]
    whole: bool = True  # False when it has released some of its pages
    keyed: int = 0  # so many of its first pages were found or registered


class Requests(RuleBasedStateMachine):
    """Requests that begin, grow, register and end; beside the pool, a model that stores whole texts.

    Attributes:
      requests: those that have not ended.
      holders: of every held page, how many requests hold it.
      found: which page each known prefix is found on.
      used: when each cached page was used last, and minus its place in the text: the least is evicted first.
      outdated: pages that were held when prefixes were forgotten.
      keys: what each key stands for that ``look_again`` has returned.
    """

    @initialize(total=st.integers(6, 15), page_size=st.integers(2, 3), looks_ahead=st.booleans())
    def begin(self, total, page_size, looks_ahead):
        self.pool, self.ahead, self.clock = PagePool(total, page_size, looks_ahead=looks_ahead), int(looks_ahead), 0
        self.requests: list[Request] = []
        self.holders, self.found = collections.Counter[int](), dict[Prefix, int]()
        self.used, self.outdated = dict[int, tuple[int, int]](), set[int]()
        self.keys = dict[bytes, Prefix]()

    def prefix(self, request: Request, page: int) -> Prefix:
        """What the given page of a request holds, counted from 0."""
        return request.salt, tuple(request.tokens[: (page + 1) * self.pool.page_size + self.ahead])

    def before(self, prefix: Prefix) -> list[Prefix]:
        """This prefix and those of all pages before it, the last first."""
        salt, tokens = prefix
        ends = range(len(tokens), self.ahead, -self.pool.page_size)
        return [(salt, tokens[:end]) for end in ends]

    def touch(self, pages):
        prefixes = {page: prefix for prefix, page in self.found.items()}
        self.clock += 1
        for page in pages:
            for prefix in self.before(prefixes[page]):
                if prefix not in self.found:
                    break
                if self.found[prefix] in self.used:
                    self.used[self.found[prefix]] = (self.clock, -len(prefix[1]))

    def take(self, count: int) -> list[int]:
        """Take pages and check which ones they are."""
        cached, everything = sorted(self.used, key=self.used.__getitem__), set(range(1, self.pool.total + 1))
        free = everything - set(cached) - set(self.holders)
        if count > len(free) + len(cached):
            with pytest.raises(ValueError, match="take at most"):
                self.pool.take(count)
            return []
        taken = self.pool.take(count)
        evicted = cached[: max(0, count - len(free))]
        assert len(set(taken)) == count
        assert set(evicted) <= set(taken) <= set(evicted) | free
        gone = {prefix for prefix, page in self.found.items() if page in evicted}
        for page in evicted:
            del self.used[page]
        for prefix in gone:
            del self.found[prefix]
        for prefix, page in self.found.items():
            # Else no text could find it any more. (One further back may be gone: this page was held when that happened.)
            assert page not in self.used or not gone & set(self.before(prefix)[1:2])
        self.holders.update(taken)
        return taken

    @rule(random=st.randoms(use_true_random=True))
    def act(self, random):
        """Some actions, drawn evenly by one rule: Hypothesis leaves rules out, prefers small numbers and takes few steps,
        and then few runs have requests that register, end and are evicted."""
        for _ in range(8):
            action = random.choice(ACTIONS)
            if action == "forget":
                self.forget_prefixes()
            elif (action == "enter" and len(self.requests) < 4) or not self.requests:
                most = random.choice([30, 30, random.randrange(12)])
                self.enter(text(random), most, random.choice([1, 1, 1, 2, 3, 4]), random.choice(["", "", "", "salt"]))
            else:
                self.go_on(action, random.choice(self.requests), random)
            self.pages_are_where_the_model_has_them()

    def go_on(self, action, request, random):
        pages = random.sample(request.pages, len(request.pages))
        if action == "grow":
            self.grow(request, text(random))
        elif action == "register":
            self.register(request, random.randrange(3))
        elif action == "look again":
            slots, grid = random.randrange(len(request.tokens) + 1), random.choice([1, 1, 1, 2, 3, 4])
            self.look_again(request, slots, grid, random.choice([1, 1, 3, 6]))
        else:
            self.release(request, pages[: len(pages) // 2] if action == "release a part" else pages)

    def enter(self, tokens, most, grid, salt):
        """Have a new request hold what is found of its text, and new pages for the rest if there are as many."""
        request = Request(salt, tokens, [])
        expected = self.known(request, 0, most, grid)
        request.pages, request.keyed = self.pool.match(tokens, most, grid, salt), len(expected)
        assert request.pages == expected
        self.hold(expected)
        request.pages += self.take(self.pool.pages(len(tokens)) - len(expected))
        self.requests.append(request)

    def known(self, request, first, most, grid) -> list[int]:
        """The pages that are found of a text, from the given one on."""
        expected, P = [], self.pool.page_size
        for page in range(first, min(most, len(request.tokens) - self.ahead) // P):
            if (prefix := self.prefix(request, page)) not in self.found:
                break
            expected.append(self.found[prefix])
        while len(expected) * P % math.lcm(P, grid):
            expected.pop()
        return expected

    def hold(self, pages):
        self.holders.update(pages)
        for page in pages:
            self.used.pop(page, None)

    def look_again(self, request, slots, grid, span):
        """Have a request exchange pages that it has not filled for those that others have registered."""
        if not request.whole or len(request.pages) < self.pool.pages(len(request.tokens)):
            return
        P, tokens = self.pool.page_size, request.tokens
        step = math.lcm(P, grid) // P
        first = slots // (step * P) * step
        expected = self.known(request, first, len(tokens), grid) if first <= request.keyed else []
        before, end = request.pages, first + len(expected)
        request.pages, now, key = self.pool.look_again(tokens, before, slots, len(tokens), grid, span, request.salt)
        assert request.pages == [*before[:first], *expected, *before[end:]]
        assert now == (end * P if expected else slots)
        self.hold(expected)
        self.let_go(before[first:end])
        request.keyed = max(request.keyed, end if expected else 0)
        unknown = end + math.ceil(span / (step * P)) * step  # the end of what the key covers
        more = first <= request.keyed and unknown * P <= len(tokens) - self.ahead
        assert (key is not None) == more
        if key is not None:
            prefix = self.prefix(request, unknown - 1)
            assert self.keys.setdefault(key, prefix) == prefix
            assert list(self.keys.values()).count(prefix) == 1

    def grow(self, request, more):
        """Have a text and its pages grow, if there are as many."""
        count = self.pool.pages(len(request.tokens) + len(more)) - len(request.pages)
        if request.whole and len(taken := self.take(count)) == count:
            request.tokens += more
            request.pages += taken

    def register(self, request, pending):
        """Have a request be found, without its last slots."""
        if not request.whole:
            return
        slots = max(0, min(len(request.tokens), len(request.pages) * self.pool.page_size) - pending)
        self.pool.register(request.tokens, request.pages, slots, request.salt)
        added = []
        for page in range(min(slots, len(request.tokens) - self.ahead) // self.pool.page_size):
            if request.pages[page] in self.outdated:
                break
            request.keyed = max(request.keyed, page + 1)
            if (prefix := self.prefix(request, page)) not in self.found:
                self.found[prefix] = request.pages[page]
                added.append(request.pages[page])
        self.touch(added)

    def release(self, request, pages):
        """All pages of a request in any order, or some of them, and the others later."""
        self.pool.release(pages)
        self.let_go(pages)
        request.pages, request.whole = [page for page in request.pages if page not in pages], False
        if not request.pages:
            self.requests.remove(request)

    def let_go(self, pages):
        self.holders.subtract(pages)
        gone = [page for page in pages if not self.holders[page]]
        kept = [page for page in gone if page in self.found.values()]
        for page in gone:
            del self.holders[page]
            self.outdated.discard(page)
        self.used.update(dict.fromkeys(kept, (0, 0)))
        self.touch(kept)

    def forget_prefixes(self):
        self.pool.forget_prefixes()
        self.found.clear()
        self.used.clear()
        self.outdated = set(self.holders)
        for request in self.requests:
            request.keyed = 0

    @invariant()
    def pages_are_where_the_model_has_them(self):
        pool = self.pool
        assert (pool.cached, pool.used) == (len(self.used), len(self.holders))
        assert pool.free + pool.cached + pool.used == pool.total
        assert pool.available == pool.free + pool.cached
        assert not {NULL_PAGE, pool.total + 1} & set(self.holders)


# Without the phase that looks for a smaller example: evenly drawn numbers hardly become smaller, and it takes minutes.
Requests.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, derandomize=True, deadline=None, phases=[Phase.generate]
)
TestRequests = Requests.TestCase
