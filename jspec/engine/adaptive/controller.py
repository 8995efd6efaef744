"""Chooses K and the verification budget of the next rounds: the most expected tokens per second, by acceptance so far.

The choice depends on rounds that are over and on a table of costs, and never on drafts that are not verified yet. Given
the text before it, each round is lossless for every K, and it has noise of its own. So the text has the target's
distribution although K depends on the past. It would not if K depended on the drafts of its own round, as
tests/lossless/test_adaptive.py shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.engine.adaptive.cost_table import RoundShape, budget_of, drafts_of

MEMORY = 64.0  # rounds in which a count loses weight by a factor of e
PRIOR_ACCEPTANCE = 0.7  # share of first drafts that are assumed to be accepted, before any statistics
PRIOR_WEIGHT = 4.0  # how many verified drafts that assumption counts for
GAIN = 1.02  # how much faster another K must be in expectation, so that two equally good ones do not alternate
FIRST_PAUSE, LONGEST_PAUSE = 4, 64  # calls of plain rounds before drafts are tried again

Histories = Sequence[tuple[Sequence[int], Sequence[int]]]  # of requests: drafts verified, and accepted, by round


def acceptance_rate(verified, accepted, prior):
    """The share of verified drafts that are accepted, as if ``PRIOR_WEIGHT`` more had been verified, of which the share
    ``prior`` was accepted; of NumPy or JAX arrays."""
    return (accepted + PRIOR_WEIGHT * prior) / (verified + PRIOR_WEIGHT)


def acceptance_by_place(verified: Iterable, accepted: Iterable) -> list[Any]:
    """The ``acceptance_rate`` of each place among the drafts of a round, from the counts of each place in their order.

    The prior of a place is the estimate of the place before it, that of the first is ``PRIOR_ACCEPTANCE``."""
    estimates, before = [], PRIOR_ACCEPTANCE
    for of_place in zip(verified, accepted, strict=True):
        before = acceptance_rate(*of_place, before)
        estimates.append(before)
    return estimates


class Controller:
    """Chooses a round shape before every call of the decode program, and learns from the call's logs.

    Draft i + 1 of a round counts as verified only if draft i was accepted. So each place 0 .. K - 1 among the drafts of a
    round has an acceptance of its own: drafts accepted there over drafts verified there. Both counts fade with ``MEMORY``.
    At first a place counts as if ``PRIOR_WEIGHT`` drafts had been verified there, and accepted as often as at the place
    before it.

    While drafts do not pay, K is 0 and nothing is learnt. Drafts are tried again for one call after ``FIRST_PAUSE`` calls of
    plain rounds. This pause doubles, up to ``LONGEST_PAUSE`` calls, each time that drafts still do not pay.

    A round shape is K, or (K, R) where the target reads R tokens of all rows together. The yield of R tokens depends on how
    the requests differ, so each request has estimates of its own as well, from its last ``MEMORY`` rounds, whose prior are
    the estimates over all requests.

    Args:
      seconds: for each size of a decode program in rows, round shape -> seconds per round; the same K for every size.

    Attributes:
      seconds: the argument, in ascending order of sizes, K and R.
      trying: whether the last choice was a single call with drafts after a rest.

    Example::

        controller = Controller({1: {0: 0.0040, 4: 0.0052}})  # seconds of a round of one row with K = 0 and K = 4
        K = controller.choose(rows=1)
        controller.observe(4, rounds=2, accepted=[3, 4])
    """

    def __init__(self, seconds: Mapping[int, Mapping[RoundShape, float]]):
        self.seconds: dict[int, dict[RoundShape, float]] = {
            rows: dict(sorted(shapes.items(), key=lambda item: (drafts_of(item[0]), budget_of(item[0]) or 0)))
            for rows, shapes in sorted(seconds.items())
        }
        places = max(drafts_of(shape) for shapes in self.seconds.values() for shape in shapes)
        self._verified, self._accepted = np.zeros(places), np.zeros(places)
        self._current: RoundShape | None = None
        self._pause, self._paused = FIRST_PAUSE, 0
        self.trying = False

    @property
    def acceptance(self) -> np.ndarray:
        """For each place, the probability that its draft is accepted if those before it are, float64 ``[K]``."""
        return np.array(acceptance_by_place(self._verified, self._accepted))

    def rates(self, rows: int, requests: Histories = ()) -> dict[RoundShape, float]:
        """Round shape -> expected tokens per second of a row, in a program of so many rows.

        Args:
          rows: the size of the program.
          requests: of each request that it will decode, how many drafts were verified and how many accepted in each of its
            rounds so far. Without them all requests have the same estimates.
        """
        prefix_acceptance = np.cumprod(self.acceptance)
        tokens = 1 + np.concatenate([[0.0], np.cumsum(prefix_acceptance)])
        rates: dict[RoundShape, float] = {}
        by_request = None
        for shape, seconds in self.seconds[rows].items():
            K, share = drafts_of(shape), 1.0
            if isinstance(shape, tuple):
                if by_request is None:
                    by_request = self._prefix_acceptance(requests or [((), ())] * rows)
                of_drafts = np.sort(by_request[:, :K], axis=None)[::-1]
                share = of_drafts[: shape[1] - len(by_request)].sum() / of_drafts.sum()
            rates[shape] = float(1 + (tokens[K] - 1) * share) / seconds
        return rates

    def _prefix_acceptance(self, requests: Histories) -> np.ndarray:
        """Prefix acceptance probabilities: that the draft at a place and all before it are accepted, ``[n, K]``."""
        last, places = int(MEMORY), np.arange(len(self._verified))
        verified, accepted = np.zeros((2, len(requests), len(places)))
        for i, history in enumerate(requests):
            counts, reached = (np.array(numbers[-last:], int)[:, None] for numbers in history)
            verified[i] = np.sum((places < counts) & (places <= reached), axis=0)
            accepted[i] = np.sum(places < reached, axis=0)
        return np.cumprod(acceptance_rate(verified, accepted, self.acceptance), axis=1)

    def choose(self, rows: int, requests: Histories = ()) -> RoundShape:
        """The round shape of the next call; arguments as for ``rates``."""
        self.trying = self._paused == 1
        if self._paused:
            self._paused -= 1
            self._current = self._best(rows, requests, drafting=True) if self.trying else 0
            return self._current
        self._current = self._best(rows, requests)
        if drafts_of(self._current):
            self._pause = FIRST_PAUSE
        else:
            self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return self._current

    def observe(self, shape: RoundShape, rounds: int, accepted: Sequence[int], verified: Sequence[int] | None = None):
        """Learn from a call.

        Args:
          shape: the shape of its rounds.
          rounds: how many rounds it made.
          accepted: how many drafts were accepted, one entry for each row and round that counts, in any order.
          verified: how many of the drafts were verified, in the same order, where the target did not read all of them. A
            row that had fewer than K for another reason counts as if the others had been rejected.
        """
        fade, places = np.exp(-rounds / MEMORY), np.arange(len(self._verified))
        reached = np.asarray(accepted, np.int64)[:, None]
        budgeted = isinstance(shape, tuple) and verified is not None
        drafted = places < (np.asarray(verified, np.int64)[:, None] if budgeted else drafts_of(shape))
        new = fade * self._verified + np.sum((reached >= places) & drafted, axis=0)
        new_accepted = fade * self._accepted + np.sum((reached > places) & drafted, axis=0)
        self._verified, self._accepted = new, new_accepted  # at once: an interrupt must not come between

    def _best(self, rows: int, requests: Histories = (), drafting: bool = False) -> RoundShape:
        rates = {shape: rate for shape, rate in self.rates(rows, requests).items() if drafts_of(shape) or not drafting}
        best = max(rates, key=lambda shape: rates[shape])
        stay = self._current in rates and rates[best] < GAIN * rates[self._current]
        return self._current if stay and self._current is not None else best
