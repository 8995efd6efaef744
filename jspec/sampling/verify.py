"""The verification rules: how many drafts are accepted, and which token follows them.

Every rule emits tokens with exactly the target's distribution, whatever was drafted. With drafts d_0 .. d_{K-1} drawn
from q_0 .. q_{K-1}, p_0 .. p_K the target's distributions after 0 .. K of them, and k <= K valid drafts:

    match      accept while d_i equals the target's own draw from p_i; emit that draw at the first difference, or at k
    rejection  accept while u_i < p_i(d_i) / q_i(d_i); else emit a draw from max(p_i - q_i, 0), or from p_k after k
    block      accept the longest prefix whose own uniform allows it: joint over all drafts, so it looks past a rejection
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jspec.pallas.sampling.residual import Residual, residual_masses, residual_sample
from jspec.sampling.distribution import Distribution, Warp, leading, make_distribution
from jspec.sampling.streams import RoundNoise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """The drafts of a round.

    Attributes:
      tokens: int32 ``[B, K]``.
      count: int32 ``[B]``, k <= K valid drafts, known before any of them was drawn (or at a stop of the drafter that
        does not look at the token drawn last).
      distribution: the distributions that the tokens were drawn from, K of each row; None if all are point masses.
      point_mass: bool ``[B, K]``; q_i is 1 at d_i and 0 elsewhere (argmax and n-gram drafts, and jump-forward
        tokens).
      confidence: float32 ``[B, K]``, the drafter's own estimate that draft i is accepted where those before it are. It
        depends on nothing drawn at i or later. None if the drafter has none.

    Example::

        tokens = jnp.array([[5, 7]])  # one row, K = 2, drafts that were looked up
        proposal = Proposal(tokens, count=jnp.array([2]), distribution=None, point_mass=jnp.ones((1, 2), bool))
    """

    tokens: jax.Array
    count: jax.Array
    distribution: Distribution | None
    point_mass: jax.Array
    confidence: jax.Array | None = None

    def beginning_with(self, tokens, count, fixed) -> "Proposal":
        """The proposal with other ``tokens`` and ``count``. Those that are ``fixed``, bool ``[B, K]``, the first ones of
        their rows, were not drawn."""
        return dataclasses.replace(self, tokens=tokens, count=count, point_mass=self.point_mass | fixed)

    def by_row(self, change: Callable[[jax.Array], jax.Array]) -> "Proposal":
        """The proposal with ``change`` of every array that has an axis of rows; ``draft_ids`` has none."""
        if self.distribution is None or self.distribution.draft_ids is None:
            return jax.tree.map(change, self)
        rows = dataclasses.replace(self, distribution=dataclasses.replace(self.distribution, draft_ids=None))
        changed = jax.tree.map(change, rows)
        distribution = dataclasses.replace(changed.distribution, draft_ids=self.distribution.draft_ids)
        return dataclasses.replace(changed, distribution=distribution)


class VerifyResult(NamedTuple):
    """A rule's decision about the drafts of each row.

    Attributes:
      accepted: int32 ``[B]``, how many drafts stand.
      token: int32 ``[B]``, the recovered token or the bonus token that follows them.
      ok: bool ``[B]``, false where the logits behind ``token`` make no distribution; ``token`` then means nothing.

    Example::

        verdict = VerifyResult(accepted=jnp.array([2]), token=jnp.array([9]), ok=jnp.array([True]))
        emitted = verdict.accepted + 1  # drafts that stand, and the token behind them
    """

    accepted: jax.Array
    token: jax.Array
    ok: jax.Array


class Decide(Protocol):
    """The final decision on how many drafts stand; benchmarks overrule the rule."""

    def __call__(self, accepted: jax.Array, count: jax.Array, noise: RoundNoise) -> jax.Array:
        """How many drafts stand if the rule accepts ``accepted`` of ``count`` valid ones, all int32 ``[B]``."""
        ...


def by_rule(accepted: jax.Array, count: jax.Array, noise: RoundNoise) -> jax.Array:
    """The rule's own decision."""
    del count, noise
    return accepted


def match(logits, warp: Warp, proposal: Proposal, noise: RoundNoise, decide: Decide = by_rule) -> VerifyResult:
    """Accept drafts that equal the target's own seeded samples.

    With ``coupled`` drafts the acceptance is a(p, q) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco and
    Suresh, 2024) if one group holds the vocabulary. Else it is that of the groups' masses, each term of its sum times
    a(p, q) within the group: the same for distributions with most mass on a few tokens, some points less for flat ones.

    Args:
      logits: ``[B, T, V]`` of the target, as stored.
      warp: the requests' settings.
      proposal: the drafts; their distributions do not matter here.
      noise: the round's noise.
      decide: how many drafts stand in the end; only the default is lossless.

    Example::

        proposal = Proposal(jnp.array([[5, 7]]), jnp.array([2]), None, jnp.ones((1, 2), bool))  # K = 2 point masses
        noise = RoundNoise(jnp.array([[0, 7]], jnp.uint32), jnp.array([10]))
        warp = Warp(jnp.array([0.8]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))
        verdict = match(jnp.zeros((1, 3, 16)), warp, proposal, noise)
        assert 0 <= int(verdict.accepted[0]) <= 2
    """
    B, T, _ = logits.shape
    offset = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    distribution, sampled = make_distribution(logits, warp, noise.sample_keys(offset))
    valid = _valid(distribution, proposal)
    K = proposal.tokens.shape[1]
    same, accepted = (proposal.tokens == sampled[:, :K]) & valid, jnp.zeros(B, jnp.int32)
    for i in reversed(range(K)):  # ``leading`` and the rule's end in one kernel
        accepted = jnp.where(same[:, i], accepted + 1, 0)
    accepted = decide(accepted, leading(valid), noise)
    return VerifyResult(accepted, _pick(sampled, accepted), _pick(distribution.finite, accepted))


def rejection(logits, warp: Warp, proposal: Proposal, noise: RoundNoise, decide: Decide = by_rule) -> VerifyResult:
    """Token-level speculative sampling (Leviathan et al., 2023; Chen et al., 2023). Arguments as for ``match``.

    Example::

        proposal = Proposal(jnp.array([[5, 7]]), jnp.array([2]), None, jnp.ones((1, 2), bool))  # K = 2 point masses
        noise = RoundNoise(jnp.array([[0, 7]], jnp.uint32), jnp.array([10]))
        warp = Warp(jnp.array([0.8]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))
        result = rejection(jnp.zeros((1, 3, 16)), warp, proposal, noise)
        assert 0 <= int(result.accepted[0]) <= 2
    """
    distribution, best = make_distribution(logits, warp)
    valid = _valid(distribution, proposal)
    u = noise.accept_uniforms(proposal.tokens.shape[1])
    accepted = decide(leading((jnp.log(u) < _log_ratio(distribution, best, proposal)) & valid), leading(valid), noise)
    residual = _residual(distribution, proposal)
    token, ok = residual_sample(residual, residual_masses(residual, accepted), accepted, noise, best)
    return VerifyResult(accepted, token, ok)


def block(logits, warp: Warp, proposal: Proposal, noise: RoundNoise, decide: Decide = by_rule) -> VerifyResult:
    """Block verification (Sun et al., 2024): accepts at least as much as ``rejection``. Arguments as for ``match``.

    With w_0 = 1, w_{i+1} = min(w_i p_i(d_i) / q_i(d_i), 1) and R_i the mass of max(w_i p_i - q_i, 0), the prefix of i
    drafts passes with probability R_i / (R_i + 1 - w_i), that of all k with w_k; the longest that passes is accepted.

    Example::

        proposal = Proposal(jnp.array([[5, 7]]), jnp.array([2]), None, jnp.ones((1, 2), bool))  # K = 2 point masses
        noise = RoundNoise(jnp.array([[0, 7]], jnp.uint32), jnp.array([10]))
        warp = Warp(jnp.array([0.8]), jnp.array([0]), jnp.array([1.0]), jnp.array([0.0]))
        verdict = block(jnp.zeros((1, 3, 16)), warp, proposal, noise)
        assert 0 <= int(verdict.accepted[0]) <= 2
    """
    distribution, best = make_distribution(logits, warp)
    count, ratio = leading(_valid(distribution, proposal)), _log_ratio(distribution, best, proposal)
    K = proposal.tokens.shape[1]
    log_w = [jnp.zeros(count.shape, jnp.float32)]
    for i in range(K):
        log_w.append(jnp.minimum(log_w[-1] + ratio[:, i], 0.0))
    log_w = jnp.stack(log_w, axis=1)  # [B, K + 1]

    residual = _residual(distribution, proposal, log_w)
    masses = residual_masses(residual)
    # Without the barrier the sum is fused with its consumers, and a single lane adds up a row.
    mass = jax.lax.optimization_barrier(jnp.sum(masses, axis=-1))[:, :K]
    w = jnp.exp(log_w[:, :K])
    passes = jnp.where(w >= 1, 1.0, mass / (mass + 1 - w))  # h_0 .. h_{K-1}
    prefix = jnp.broadcast_to(jnp.arange(1, K + 1, dtype=jnp.int32), (count.shape[0], K))
    h = jnp.where(prefix < count[:, None], jnp.pad(passes, ((0, 0), (0, 1)))[:, 1:], jnp.exp(log_w[:, 1:]))
    stands = (noise.accept_uniforms(K) <= h) & (prefix <= count[:, None])
    longest = jax.lax.reduce(jnp.where(stands, prefix, 0), np.int32(0), jax.lax.max, (1,))
    accepted = decide(longest, count, noise)
    token, ok = residual_sample(residual, masses, accepted, noise, best)
    return VerifyResult(accepted, token, ok)


RULES: dict[str, Callable[..., VerifyResult]] = {
    "match": match,
    "rejection": rejection,
    "block": block,
}


def _valid(distribution: Distribution, proposal: Proposal):
    """Whether each draft may be accepted if those before it are, bool ``[B, K]``.

    It may not if the target's logits there make no distribution, which ends the request.
    """
    K = proposal.tokens.shape[1]
    return distribution.finite[:, :K] & (jnp.arange(K, dtype=jnp.int32)[None] < proposal.count[:, None])


def _log_ratio(distribution: Distribution, best, proposal: Proposal):
    """log p_i(d_i) - log q_i(d_i), float32 ``[B, K]``; greedy targets and point-mass drafts are point masses."""
    drafts, K = proposal.tokens, proposal.tokens.shape[1]
    point = jnp.where(drafts == best[:, :K], 0.0, -jnp.inf)
    log_p = jnp.where(best[:, :K] >= 0, point, distribution.log_prob(drafts))
    if proposal.distribution is None:
        return log_p
    return log_p - jnp.where(proposal.point_mass, 0.0, proposal.distribution.log_prob(drafts))


def _residual(distribution: Distribution, proposal: Proposal, log_weight=None) -> Residual:
    """The distribution of the token after the accepted drafts, for every number of them."""
    q = distribution if proposal.distribution is None else proposal.distribution
    drafts = proposal.tokens, proposal.point_mass, proposal.count
    return Residual(distribution.warped, q.warped, *drafts, log_weight, q.draft_ids)


def _pick(values, index):
    """One value of each row: ``values[b, index[b]]``, ``[B, J], [B] -> [B]``."""
    picked = values[:, 0]
    for i in range(1, values.shape[1]):  # fused with the index computation, unlike a gather
        picked = jnp.where(index == i, values[:, i], picked)
    return picked
