"""How many drafts the next rounds make: the K that promises most tokens per second, by the acceptance seen so far.

The choice depends on rounds that are over and on a table of costs, and never on drafts that are still to be judged. Given
the text before it, each round is lossless for every K, and it has noise of its own. So the text keeps the target's
distribution although K depends on the past. It would not if K depended on the drafts of its own round, which
tests/lossless/test_adaptive.py shows.
"""

from collections.abc import Mapping, Sequence

import numpy as np

MEMORY = 64.0  # after so many rounds, what was seen has lost weight by a factor of e
PRIOR_ACCEPTANCE = 0.7  # share of first drafts that are taken to be accepted, before anything was seen
PRIOR_WEIGHT = 4.0  # how many judged drafts that assumption counts for
GAIN = 1.02  # how much faster another K must promise to be, so that two that are equally good do not alternate
FIRST_REST, LONGEST_REST = 4, 64  # calls without drafts before they are tried again


class Controller:
    """Chooses K before every call of the decode program, and learns from what the call did.

    Draft i + 1 of a round is judged only if draft i was accepted. So each place 0 .. K - 1 among the drafts of a round
    has an acceptance of its own: drafts accepted there over drafts judged there. Both counts fade with ``MEMORY``. At
    first a place counts as if ``PRIOR_WEIGHT`` drafts had been judged there, and accepted as often as at the place
    before it.

    While drafts do not pay, K is 0 and nothing is learnt. Drafts are tried again for one call after a rest of
    ``FIRST_REST`` calls. The rest doubles, up to ``LONGEST_REST`` calls, each time that drafts still do not pay.

    Args:
      seconds: for each size of a decode program in rows, K -> seconds per round, for K = 0 and at least one other; the
        same K for every size.

    Attributes:
      seconds: the argument, in ascending order of sizes and K.
      trying: whether the last choice was a single call with drafts after a rest.
    """

    def __init__(self, seconds: Mapping[int, Mapping[int, float]]):
        self.seconds = {rows: dict(sorted(by_drafts.items())) for rows, by_drafts in sorted(seconds.items())}
        places = max(map(max, self.seconds.values()))
        self._judged, self._accepted = np.zeros(places), np.zeros(places)
        self._current: int | None = None
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

    def rates(self, rows: int) -> dict[int, float]:
        """K -> the tokens per second that a row may expect of it in a program of so many rows."""
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(self.acceptance))])
        return {K: float(tokens[K]) / seconds for K, seconds in self.seconds[rows].items()}

    def choose(self, rows: int) -> int:
        """Choose K for the next call, whose program has so many rows."""
        self.trying = self._resting == 1
        if self._resting:
            self._resting -= 1
            self._current = self._best(rows, drafting=True) if self.trying else 0
            return self._current
        self._current = self._best(rows)
        if self._current:
            self._rest = FIRST_REST
        else:
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        return self._current

    def observe(self, K: int, rounds: int, accepted: Sequence[int]):
        """Learn from what a call did.

        Args:
          K: how many drafts each round of the call made.
          rounds: how many rounds the call made.
          accepted: how many drafts were accepted, one entry for each row and round that counts, in any order.
        """
        fade = np.exp(-rounds / MEMORY)
        reached = np.asarray(accepted, np.int64)[:, None] - np.arange(len(self._judged))
        drafted = np.arange(len(self._judged)) < K
        judged = fade * self._judged + np.sum((reached >= 0) & drafted, axis=0)
        passed = fade * self._accepted + np.sum((reached > 0) & drafted, axis=0)
        self._judged, self._accepted = judged, passed  # at once: an interrupt must not come between

    def _best(self, rows: int, drafting: bool = False) -> int:
        rates = {K: rate for K, rate in self.rates(rows).items() if K or not drafting}
        best = max(rates, key=lambda K: rates[K])
        stay = self._current in rates and rates[best] < GAIN * rates[self._current]
        return self._current if stay and self._current is not None else best
