"""Chooses K and the verification budget of the next rounds: the most expected tokens per second, by acceptance so far.

The choice depends on rounds that are over and on a table of costs, and never on drafts that are not verified yet. Given
the text before it, each round is lossless for every K, and it has noise of its own. So the text has the target's
distribution although K depends on the past. It would not if K depended on the drafts of its own round, as
tests/lossless/test_adaptive.py shows.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.config import TreeShape
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


def acceptance_by_place(counts: Iterable[Iterable[tuple[Any, Any]]]) -> list[Any]:
    """The ``acceptance_rate`` of each place among the drafts of a round, from the counts of each place in their order.

    A place may have several counts of verified and accepted drafts, each of which is the prior of the next. The prior of a
    place is the estimate of the place before it, that of the first is ``PRIOR_ACCEPTANCE``."""
    estimates, before = [], PRIOR_ACCEPTANCE
    for of_place in counts:
        for verified, accepted in of_place:
            before = acceptance_rate(verified, accepted, before)
        estimates.append(before)
    return estimates


def kind_of(shape: RoundShape) -> TreeShape | None:
    """Which rounds accept alike: those of trees of one shape, and those of chains, for which it is None."""
    return shape if isinstance(shape, TreeShape) else None


def expected_tokens(acceptance: np.ndarray) -> np.ndarray:
    """The tokens of a round of 0, 1, .. drafts, float64 ``[K + 1]``, given the acceptance of each place, ``[K]``."""
    return 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(acceptance))])


class Controller:
    """Chooses a round shape before every call of the decode program, and learns from the call's logs.

    Draft i + 1 of a round counts as verified only if draft i was accepted. So each place 0 .. K - 1 among the drafts of a
    round has an acceptance of its own: drafts accepted there over drafts verified there. Both counts fade with ``MEMORY``.
    At first a place counts as if ``PRIOR_WEIGHT`` drafts had been verified there, and accepted as often as at the place
    before it.

    While drafts do not pay, K is 0 and nothing is learnt. Drafts are tried again for one call after ``FIRST_PAUSE`` calls of
    plain rounds. This pause doubles, up to ``LONGEST_PAUSE`` calls, each time that drafts still do not pay.

    A round shape is a ``TreeShape``, K, or (K, R) where the target reads R tokens of all rows together.

    Trees of each shape have counts of their own, where place i is the draft at depth i + 1 of a path. What chains accept
    does not say what trees would, nor the other way round. So each has the other as a prior, in its own favour: a place of a
    tree counts as if it had two tries at what chains accept there, and a place of a chain as if it did as well as trees.
    Counts also fade while their shape is not chosen. Then the prior has it tried again, and a call or two correct what that
    promised too much.

    The yield of R tokens depends on how the requests differ, so each request has estimates of its own as well, from its last
    ``MEMORY`` rounds, whose prior are the estimates over all requests.

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
        shapes = [shape for by_rows in self.seconds.values() for shape in by_rows]
        self._places = np.arange(max(map(drafts_of, shapes)))
        kinds: set[TreeShape | None] = {None, *(shape for shape in shapes if isinstance(shape, TreeShape))}
        # By shape of trees, and None for chains: how many drafts of each place were verified, and how many accepted.
        self._counts = {kind: np.zeros((2, len(self._places))) for kind in kinds}
        self._current: RoundShape | None = None
        self._pause, self._paused = FIRST_PAUSE, 0
        self.trying = False

    @property
    def acceptance(self) -> np.ndarray:
        """For each place of chains, the probability that its draft is accepted if those before it are, float64 ``[K]``."""
        chains, of_trees = self._counts[None], sum(self._counts.values()) - self._counts[None]
        return np.array(acceptance_by_place([tuple(of_trees[:, i]), tuple(chains[:, i])] for i in self._places))

    def acceptance_of(self, tree: TreeShape) -> np.ndarray:
        """The same of paths of trees, float64 ``[K]``."""
        verified, accepted = self._counts[tree]
        return acceptance_rate(verified, accepted, 1 - (1 - self.acceptance) ** 2)

    def rates(self, rows: int, requests: Histories = ()) -> dict[RoundShape, float]:
        """Round shape -> expected tokens per second of a row, in a program of so many rows.

        Args:
          rows: the size of the program.
          requests: of each request that it will decode, how many drafts were verified and how many accepted in each of its
            rounds so far. Without them all requests have the same estimates.
        """
        tokens: dict[TreeShape | None, np.ndarray] = {None: expected_tokens(self.acceptance)}
        rates: dict[RoundShape, float] = {}
        by_request = None
        for shape, seconds in self.seconds[rows].items():
            K, share, kind = drafts_of(shape), 1.0, kind_of(shape)
            if kind is not None:
                tokens[kind] = expected_tokens(self.acceptance_of(kind))
            if isinstance(shape, tuple):
                if by_request is None:
                    by_request = self._prefix_acceptance(requests or [((), ())] * rows)
                of_drafts = np.sort(by_request[:, :K], axis=None)[::-1]
                share = of_drafts[: shape[1] - len(by_request)].sum() / of_drafts.sum()
            rates[shape] = float(1 + (tokens[kind][K] - 1) * share) / seconds
        return rates

    def _prefix_acceptance(self, requests: Histories) -> np.ndarray:
        """Prefix acceptance probabilities: that the draft at a place and all before it are accepted, ``[n, K]``."""
        last, places = int(MEMORY), self._places
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
        fade, places = np.exp(-rounds / MEMORY), self._places
        reached = np.asarray(accepted, np.int64)[:, None]
        budgeted = isinstance(shape, tuple) and verified is not None
        drafted = places < (np.asarray(verified, np.int64)[:, None] if budgeted else drafts_of(shape))
        counts = {kind: fade * of_kind for kind, of_kind in self._counts.items()}
        counts[kind_of(shape)] += [np.sum(more & drafted, axis=0) for more in (reached >= places, reached > places)]
        self._counts = counts  # at once: an interrupt must not come between

    def _best(self, rows: int, requests: Histories = (), drafting: bool = False) -> RoundShape:
        rates = {shape: rate for shape, rate in self.rates(rows, requests).items() if drafts_of(shape) or not drafting}
        best = max(rates, key=lambda shape: rates[shape])
        stay = self._current in rates and rates[best] < GAIN * rates[self._current]
        return self._current if stay and self._current is not None else best
