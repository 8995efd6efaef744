"""How many drafts the next rounds make, and how many of them are verified: what promises most tokens per second, by the
acceptance seen so far.

The choice depends on rounds that are over and on a table of costs, and never on drafts that are still to be judged. Given
the text before it, each round is lossless for every K, and it has noise of its own. So the text keeps the target's
distribution although K depends on the past. It would not if K depended on the drafts of its own round, which
tests/lossless/test_adaptive.py shows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jspec.engine.adaptive.cost_table import Way, budget_of, drafts_of

MEMORY = 64.0  # after so many rounds, what was seen has lost weight by a factor of e
PRIOR_ACCEPTANCE = 0.7  # share of first drafts that are taken to be accepted, before anything was seen
PRIOR_WEIGHT = 4.0  # how many judged drafts that assumption counts for
GAIN = 1.02  # how much faster another K must promise to be, so that two that are equally good do not alternate
FIRST_REST, LONGEST_REST = 4, 64  # calls without drafts before they are tried again

Histories = Sequence[tuple[Sequence[int], Sequence[int]]]  # of requests: drafts verified, and accepted, by round


class Controller:
    """Chooses K before every call of the decode program, and learns from what the call did.

    Draft i + 1 of a round is judged only if draft i was accepted. So each place 0 .. K - 1 among the drafts of a round
    has an acceptance of its own: drafts accepted there over drafts judged there. Both counts fade with ``MEMORY``. At
    first a place counts as if ``PRIOR_WEIGHT`` drafts had been judged there, and accepted as often as at the place
    before it.

    While drafts do not pay, K is 0 and nothing is learnt. Drafts are tried again for one call after a rest of
    ``FIRST_REST`` calls. The rest doubles, up to ``LONGEST_REST`` calls, each time that drafts still do not pay.

    A way of making rounds is K, or (K, R) where the target reads R tokens of all rows together. What R tokens bring depends
    on how the requests differ, so each of these has estimates of its own as well, of its last ``MEMORY`` rounds, which begin
    with those of all.

    Args:
      seconds: for each size of a decode program in rows, way of making rounds -> seconds per round; the same K for every
        size.

    Attributes:
      seconds: the argument, in ascending order of sizes, K and R.
      trying: whether the last choice was a single call with drafts after a rest.

    Example::

        controller = Controller({1: {0: 0.0040, 4: 0.0052}})  # seconds of a round of one row with K = 0 and K = 4
        K = controller.choose(rows=1)
        controller.observe(4, rounds=2, accepted=[3, 4])
    """

    def __init__(self, seconds: Mapping[int, Mapping[Way, float]]):
        self.seconds: dict[int, dict[Way, float]] = {
            rows: dict(sorted(ways.items(), key=lambda item: (drafts_of(item[0]), budget_of(item[0]) or 0)))
            for rows, ways in sorted(seconds.items())
        }
        places = max(drafts_of(way) for ways in self.seconds.values() for way in ways)
        self._judged, self._accepted = np.zeros(places), np.zeros(places)
        self._current: Way | None = None
        self._rest, self._resting = FIRST_REST, 0
        self.trying = False

    @property
    def acceptance(self) -> np.ndarray:
        """For each place, the probability that its draft is accepted where those before it were, float64 ``[K]``."""
        estimates, before = [], PRIOR_ACCEPTANCE
        for judged, accepted in zip(self._judged, self._accepted, strict=True):
            before = (accepted + PRIOR_WEIGHT * before) / (judged + PRIOR_WEIGHT)
            estimates.append(before)
        return np.array(estimates)

    def rates(self, rows: int, requests: Histories = ()) -> dict[Way, float]:
        """Way -> the tokens per second that a row may expect of it in a program of so many rows.

        Args:
          rows: the size of the program.
          requests: of each request that it will decode, how many drafts were verified and how many accepted in each of its
            rounds so far. Without them all requests are taken to be alike.
        """
        by_place = np.cumprod(self.acceptance)
        tokens = 1 + np.concatenate([[0.0], np.cumsum(by_place)])
        rates: dict[Way, float] = {}
        worth = None
        for way, seconds in self.seconds[rows].items():
            K, share = drafts_of(way), 1.0
            if isinstance(way, tuple):
                worth = self._survival(requests or [((), ())] * rows) if worth is None else worth
                of_drafts = np.sort(worth[:, :K], axis=None)[::-1]
                share = of_drafts[: way[1] - len(worth)].sum() / of_drafts.sum()
            rates[way] = float(1 + (tokens[K] - 1) * share) / seconds
        return rates

    def _survival(self, requests: Histories) -> np.ndarray:
        """For each request and place, the probability that its draft there is accepted with all before it, ``[n, K]``."""
        last, places = int(MEMORY), np.arange(len(self._judged))
        judged, passed = np.zeros((2, len(requests), len(places)))
        for i, (verified, accepted) in enumerate(requests):
            counts, reached = np.array(verified[-last:], int)[:, None], np.array(accepted[-last:], int)[:, None]
            judged[i] = np.sum((places < counts) & (places <= reached), axis=0)
            passed[i] = np.sum(places < reached, axis=0)
        return np.cumprod((passed + PRIOR_WEIGHT * self.acceptance) / (judged + PRIOR_WEIGHT), axis=1)

    def choose(self, rows: int, requests: Histories = ()) -> Way:
        """Choose how the next call makes rounds; arguments as for ``rates``."""
        self.trying = self._resting == 1
        if self._resting:
            self._resting -= 1
            self._current = self._best(rows, requests, drafting=True) if self.trying else 0
            return self._current
        self._current = self._best(rows, requests)
        if drafts_of(self._current):
            self._rest = FIRST_REST
        else:
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        return self._current

    def observe(self, way: Way, rounds: int, accepted: Sequence[int], verified: Sequence[int] | None = None):
        """Learn from what a call did.

        Args:
          way: how the rounds of the call were made.
          rounds: how many rounds the call made.
          accepted: how many drafts were accepted, one entry for each row and round that counts, in any order.
          verified: how many of the drafts were verified, in the same order, where the target did not read all of them. A
            row that had fewer than K for another reason counts as if the others had been refused.
        """
        fade, places = np.exp(-rounds / MEMORY), np.arange(len(self._judged))
        reached = np.asarray(accepted, np.int64)[:, None]
        budgeted = isinstance(way, tuple) and verified is not None
        drafted = places < (np.asarray(verified, np.int64)[:, None] if budgeted else drafts_of(way))
        judged = fade * self._judged + np.sum((reached >= places) & drafted, axis=0)
        passed = fade * self._accepted + np.sum((reached > places) & drafted, axis=0)
        self._judged, self._accepted = judged, passed  # at once: an interrupt must not come between

    def _best(self, rows: int, requests: Histories = (), drafting: bool = False) -> Way:
        rates = {way: rate for way, rate in self.rates(rows, requests).items() if drafts_of(way) or not drafting}
        best = max(rates, key=lambda way: rates[way])
        stay = self._current in rates and rates[best] < GAIN * rates[self._current]
        return self._current if stay and self._current is not None else best
