"""Selects the drafts that the target verifies under a verification budget: those that are likeliest to be accepted.

A draft is worth verifying if it is accepted together with the drafts before it. That probability is its *prefix acceptance
probability*: the product of the acceptances of its row's drafts up to it. Acceptances are estimated, each from two numbers:

* how often drafts at its place have been accepted in the request so far;
* how *confident* the drafter is of it: the output of a DSpark head's confidence head, or else the largest probability in the
  distribution that the draft is drawn from. How often drafts of such a confidence were accepted is counted over all
  requests.

**Why the text keeps the target's distribution.** The rules are exact for any number of verified drafts, as long as whether
draft i is among them does not depend on draft i itself, nor on those drawn after it. A confidence of draft i is known before
draft i is drawn, and so are the counts of earlier rounds. The prefix acceptance probabilities of a row never rise with i,
and of equal ones the earlier draft comes first. So for every budget, the selection of draft i is decided by numbers that
are known before it is drawn: by probabilities up to its own, and by those of other rows, whose drafts have noise of their
own. A number that peeks, such as the probability of the token drawn, would let drafts that come easily be verified more
often, and tests/lossless/test_budget.py detects that.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jspec.engine.adaptive.controller import MEMORY, PRIOR_ACCEPTANCE, acceptance_by_place, acceptance_rate

BINS = 8  # of confidences, of equal width
LEAST = 0.01  # acceptances are estimated between this and 1 - LEAST
_FADE = math.exp(-1 / MEMORY)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AcceptanceStats:
    """Counts of verified and accepted drafts so far. They fade, by a factor of e in ``controller.MEMORY`` rounds.

    Attributes:
      of_request: float32 ``[B, 2, K]``, for each place among the drafts of a row's rounds, how many drafts were verified
        there, and how many of them were accepted. A draft counts as verified if those before it are accepted.
      of_confidence: float32 ``[2, BINS]``, the same for each bin of confidences, over all requests.
    """

    of_request: jax.Array
    of_confidence: jax.Array

    def acceptance(self, confidence) -> jax.Array:
        """The estimated probability that each draft is accepted if those before it are, float32 ``[B, K]``.

        At first a place counts as if ``PRIOR_WEIGHT`` drafts had been verified there, accepted as often as at the place
        before it; and a bin as if as many had been, accepted as often as its confidence says. Both kinds of odds are
        multiplied, and divided by those of all drafts together (naive Bayes).

        Args:
          confidence: float32 ``[B, K]``.
        """
        verified, accepted, K = self.of_request[:, 0], self.of_request[:, 1], range(confidence.shape[1])
        places = acceptance_by_place(((verified[:, i], accepted[:, i]),) for i in K)
        middle = (jnp.arange(BINS, dtype=jnp.float32) + 0.5) / BINS
        every = jnp.sum(self.of_confidence, axis=1)
        usual = acceptance_rate(every[0], every[1], jnp.float32(PRIOR_ACCEPTANCE))
        bins = _log_odds(acceptance_rate(self.of_confidence[0], self.of_confidence[1], middle)) - _log_odds(usual)
        of_bin = jnp.sum(jnp.where(_one_hot(confidence), bins[None, None], 0.0), axis=-1)
        return jnp.clip(jax.nn.sigmoid(_log_odds(jnp.stack(places, axis=1)) + of_bin), LEAST, 1 - LEAST)

    def with_round(self, confidence, count, accepted, live) -> "AcceptanceStats":
        """The statistics after a round.

        Args:
          confidence: float32 ``[B, K]``, of its drafts.
          count: int32 ``[B]``, how many of them were verified.
          accepted: int32 ``[B]``, how many of these were accepted.
          live: bool ``[B]``, which rows took part.
        """
        K = confidence.shape[1]
        place = jnp.arange(K, dtype=jnp.int32)[None]
        verified = (place < count[:, None]) & (place <= accepted[:, None]) & live[:, None]
        stands = verified & (place < accepted[:, None])
        new = jnp.stack([verified, stands], axis=1).astype(jnp.float32)  # [B, 2, K]
        fade = jnp.where(live, _FADE, 1.0)[:, None, None]
        of_request = self.of_request.at[:, :, :K].set(fade * self.of_request[:, :, :K] + new)
        hot = _one_hot(confidence)[:, None]  # [B, 1, K, BINS]
        of_bins = jnp.sum(jnp.where(hot, new[..., None], 0.0), axis=(0, 2))
        return AcceptanceStats(of_request, jnp.where(jnp.any(live), _FADE, 1.0) * self.of_confidence + of_bins)


def no_stats(rows: int, K: int) -> AcceptanceStats:
    """The statistics before the first round."""
    return AcceptanceStats(jnp.zeros((rows, 2, K), jnp.float32), jnp.zeros((2, BINS), jnp.float32))


def select_drafts(acceptance, count, spare) -> jax.Array:
    """How many drafts of each row are verified, int32 ``[B]``: its first ones, as many as are among the likeliest.

    Args:
      acceptance: float32 ``[B, K]``, estimates that a draft is accepted if those before it are, each from numbers that are
        known before the draft is drawn.
      count: int32 ``[B]``, how many drafts the row has.
      spare: int32 ``[]``, how many drafts can be verified.
    """
    B, K = acceptance.shape
    prefix_acceptance = [acceptance[:, 0]]
    for i in range(1, K):
        prefix_acceptance.append(prefix_acceptance[-1] * acceptance[:, i])
    exists = jnp.arange(K, dtype=jnp.int32)[:, None] < count[None]  # [K, B]
    worth = jnp.where(exists, jnp.stack(prefix_acceptance), -1.0).reshape(
        -1
    )  # [K B], of equal ones the first is the first draft
    index = jnp.arange(K * B, dtype=jnp.int32)
    ahead = (worth[None] > worth[:, None]) | ((worth[None] == worth[:, None]) & (index[None] < index[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32).reshape(K, B)
    return jnp.sum(exists & (rank < spare), axis=0, dtype=jnp.int32)


def _log_odds(probability):
    return jnp.log(probability) - jnp.log1p(-probability)


def _one_hot(confidence):
    """The bin of each confidence, bool ``[B, K, BINS]``. NaN is in the lowest."""
    place = jnp.clip(jnp.nan_to_num(confidence) * BINS, 0, BINS - 1).astype(jnp.int32)
    return place[..., None] == jnp.arange(BINS, dtype=jnp.int32)[None, None]
