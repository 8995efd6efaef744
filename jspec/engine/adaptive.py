"""How many drafts the next rounds make: the K that promises most tokens per second, from acceptance seen so far.

It looks at rounds that are over and at a table of costs, never at drafts whose tokens are still to be judged. Each
round is lossless for every K given the text before it, with noise of its own, so a K that depends on the past leaves
the distribution of the text as it is. (A K that looked at the drafts of its own round would not:
tests/lossless/test_adaptive.py.)"""

from collections.abc import Mapping, Sequence

import numpy as np

MEMORY = 64.0  # rounds in which what was seen loses weight by a factor of e
PRIOR_ACCEPTANCE = 0.7  # of a first draft, before anything was seen,
PRIOR_WEIGHT = 4.0  # and how many drafts that counts for
GAIN = 1.02  # what another K must promise, so that two that are as good do not alternate
FIRST_REST, LONGEST_REST = 4, 64  # calls without drafts before they are tried again


class Controller:
    """Chooses K before every call of the decode program, and learns from what the call did.

    Draft i + 1 is judged only where draft i was accepted. So each place in the block has an acceptance of its own:
    drafts accepted there over drafts judged there. Both counts fade with ``MEMORY``. To begin with, a place counts as
    if ``PRIOR_WEIGHT`` drafts had been judged there and passed as often as those of the place before it.

    While no drafts pay (K = 0) nothing is learnt. They are tried again for one call after a rest, which doubles each
    time that they still do not pay.

    Args:
      seconds: K -> seconds per round; 0 and at least one other.

    Attributes:
      seconds: the same, in ascending order of K.
      trying: whether the last choice was one call with drafts after a rest.
    """

    def __init__(self, seconds: Mapping[int, float]):
        self.seconds = dict(sorted(seconds.items()))
        places = max(self.seconds)
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

    def rates(self) -> dict[int, float]:
        """K -> how many tokens per second and row it promises."""
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(self.acceptance))])
        return {K: float(tokens[K]) / seconds for K, seconds in self.seconds.items()}

    def choose(self) -> int:
        """Choose K for the next call."""
        self.trying = self._resting == 1
        if self._resting:
            self._resting -= 1
            self._current = self._best(drafting=True) if self.trying else 0
            return self._current
        self._current = self._best()
        if self._current:
            self._rest = FIRST_REST
        else:
            self._resting, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        return self._current

    def observe(self, K: int, rounds: int, accepted: Sequence[int]):
        """Learn from a call.

        Args:
          K: the drafts of each of its rounds.
          rounds: how many rounds it made.
          accepted: how many drafts were accepted, one entry for each row and round that counts, in any order.
        """
        fade = np.exp(-rounds / MEMORY)
        reached = np.asarray(accepted, np.int64)[:, None] - np.arange(len(self._judged))
        drafted = np.arange(len(self._judged)) < K
        judged = fade * self._judged + np.sum((reached >= 0) & drafted, axis=0)
        passed = fade * self._accepted + np.sum((reached > 0) & drafted, axis=0)
        self._judged, self._accepted = judged, passed  # together, or an interrupt leaves more accepted than judged

    def _best(self, drafting: bool = False) -> int:
        rates = {K: rate for K, rate in self.rates().items() if K or not drafting}
        best = max(rates, key=lambda K: rates[K])
        stay = self._current in rates and rates[best] < GAIN * rates[self._current]
        return self._current if stay and self._current is not None else best
