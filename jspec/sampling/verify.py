"""The verification rules: how many drafts are accepted, and which token follows them.

Every rule emits tokens with exactly the target's law, whatever was drafted. With drafts d_0 .. d_{K-1} drawn from q_0 ..
q_{K-1}, p_0 .. p_K the target's laws after 0 .. K of them, and k <= K valid drafts:

    match      accept while d_i equals the target's own draw from p_i; emit that draw at the first difference, or at k
    rejection  accept while u_i < p_i(d_i) / q_i(d_i); else emit a draw from max(p_i - q_i, 0), or from p_k after k
    block      accept the longest prefix that its own coin allows: joint over the block, so it looks past a rejection
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jspec.pallas.residual import Masses, Residual, residual_draw, residual_masses
from jspec.sampling.law import Law, Warp, leading, make_law
from jspec.sampling.streams import RoundNoise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Proposal:
    """What a drafter proposes.

    Attributes:
      tokens: int32 ``[B, K]``.
      count: int32 ``[B]``, k <= K valid drafts, known before any of them was drawn (or at a stop of the drafter that does
        not look at the token drawn last).
      law: the laws that the tokens were drawn from, K rows; None if every row is a point mass.
      point_mass: bool ``[B]``; q_i is 1 at d_i and 0 elsewhere (argmax and n-gram drafts).
    """

    tokens: jax.Array
    count: jax.Array
    law: Law | None
    point_mass: jax.Array


class Verdict(NamedTuple):
    """``accepted`` int32 [B] drafts stand; then comes ``token`` int32 [B], unless its law was no law: ``ok`` bool [B]."""

    accepted: jax.Array
    token: jax.Array
    ok: jax.Array


class Decide(Protocol):
    """The last word on how many drafts stand; see ``sampling.synthetic`` for one that is not the rule's own."""

    def __call__(self, accepted: jax.Array, count: jax.Array, noise: RoundNoise) -> jax.Array:
        """Of int32 ``[B]`` drafts accepted by the rule and ``[B]`` valid ones, those that stand, int32 ``[B]``."""
        ...


def by_rule(accepted: jax.Array, count: jax.Array, noise: RoundNoise) -> jax.Array:
    """The rule's own decision."""
    del count, noise
    return accepted


def match(logits, warp: Warp, proposal: Proposal, noise: RoundNoise, decide: Decide = by_rule) -> Verdict:
    """Accept drafts that equal the target's own seeded samples.

    With ``coupled`` drafts the acceptance is a(p, q) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri, Musco and Suresh,
    2024) if one group holds the vocabulary. Else it is that of the groups' masses, each term of its sum times a(p, q) within
    the group: the same for laws with most mass on a few tokens, some points less for flat ones.

    Args:
      logits: ``[B, T, V]`` of the target, as stored.
      warp: the requests' settings.
      proposal: the drafts; their laws do not matter here.
      noise: the round's noise.
      decide: how many drafts stand in the end; only the default is lossless.
    """
    B, T, _ = logits.shape
    offset = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    law, sampled = make_law(logits, warp, noise.sample_keys(offset))
    count = _count(law, proposal)
    K = proposal.tokens.shape[1]
    accepted = leading((proposal.tokens == sampled[:, :K]) & (offset[:, :K] < count[:, None]))
    accepted = decide(accepted, count, noise)
    return Verdict(accepted, _pick(sampled, accepted), _pick(law.finite, accepted))


def rejection(logits, warp: Warp, proposal: Proposal, noise: RoundNoise, decide: Decide = by_rule) -> Verdict:
    """Token-level speculative sampling (Leviathan et al., 2023; Chen et al., 2023). Arguments as for ``match``."""
    law, best = make_law(logits, warp)
    count = _count(law, proposal)
    log_p, log_q = _log_probs(law, best, proposal)
    K = proposal.tokens.shape[1]
    u = noise.accept_uniforms(K)
    accepted = leading((jnp.log(u) < log_p - log_q) & (jnp.arange(K, dtype=jnp.int32)[None] < count[:, None]))
    accepted = decide(accepted, count, noise)
    residual = _residual(law, proposal, count, accepted[:, None])
    return _finish(law, best, accepted, count, residual, residual_masses(residual), noise)


def block(logits, warp: Warp, proposal: Proposal, noise: RoundNoise, decide: Decide = by_rule) -> Verdict:
    """Block verification (Sun et al., 2024): accepts at least as much as ``rejection``. Arguments as for ``match``.

    With w_0 = 1, w_{i+1} = min(w_i p_i(d_i) / q_i(d_i), 1) and R_i the mass of max(w_i p_i - q_i, 0), the prefix of i
    drafts passes with probability R_i / (R_i + 1 - w_i), that of all k with w_k; the longest that passes is accepted.
    """
    law, best = make_law(logits, warp)
    count = _count(law, proposal)
    log_p, log_q = _log_probs(law, best, proposal)
    K = proposal.tokens.shape[1]
    log_w = [jnp.zeros(count.shape, jnp.float32)]
    for i in range(K):
        log_w.append(jnp.minimum(log_w[-1] + log_p[:, i] - log_q[:, i], 0.0))
    log_w = jnp.stack(log_w, axis=1)  # [B, K + 1]

    row = jnp.broadcast_to(jnp.arange(K + 1, dtype=jnp.int32), log_w.shape)
    residual = _residual(law, proposal, count, row, log_w)
    masses = residual_masses(residual)
    w, mass = jnp.exp(log_w[:, :K]), jnp.sum(masses.left, axis=-1)[:, :K]
    passes = jnp.where(w >= 1, 1.0, mass / (mass + 1 - w))  # h_0 .. h_{K-1}
    prefix = jnp.broadcast_to(jnp.arange(1, K + 1, dtype=jnp.int32), (count.shape[0], K))
    h = jnp.where(prefix < count[:, None], jnp.pad(passes, ((0, 0), (0, 1)))[:, 1:], jnp.exp(log_w[:, 1:]))
    stands = (noise.accept_uniforms(K) <= h) & (prefix <= count[:, None])
    accepted = decide(jnp.max(jnp.where(stands, prefix, 0), axis=1, initial=0), count, noise)
    return _finish(law, best, accepted, count, residual, masses, noise)


RULES: dict[str, Callable[..., Verdict]] = {
    "match": match,
    "rejection": rejection,
    "block": block,
}


def _residual(law: Law, proposal: Proposal, count, row, log_weight=None) -> Residual:
    """What is drawn from after ``row`` drafts, int32 ``[B, J]``: the residual if one was refused, else p_k."""
    K = proposal.tokens.shape[1]
    refused, point_mass = row < count[:, None], proposal.point_mass[:, None]
    draft = jnp.take_along_axis(proposal.tokens, jnp.minimum(row, K - 1), axis=1)
    return Residual(
        law.rows,
        law.rows if proposal.law is None else proposal.law.rows,
        row=row,
        log_weight=None if log_weight is None else jnp.where(refused, log_weight, 0.0),
        use_q=refused & ~point_mass,
        excluded=jnp.where(refused & point_mass, draft, -1),
    )


def _finish(law: Law, best, accepted, count, residual: Residual, masses: Masses, noise: RoundNoise) -> Verdict:
    """The token after the accepted drafts: from the residual if one was refused, else the bonus token from p_k."""
    place = accepted[:, None]
    key = jnp.where(place < count[:, None], noise.residual_keys(place)[:, 0], noise.sample_keys(place)[:, 0])
    known = jnp.where(law.greedy, _pick(best, accepted), -1)
    return Verdict(accepted, residual_draw(residual, masses, accepted, key, known), _pick(law.finite, accepted))


def _count(law: Law, proposal: Proposal):
    """Valid drafts, none of them past a target row that is no law: such a row may only end the request."""
    return jnp.minimum(proposal.count, leading(law.finite))


def _log_probs(law: Law, best, proposal: Proposal):
    """log p_i(d_i) and log q_i(d_i), float32 ``[B, K]``; greedy targets and point-mass drafts are point masses."""
    drafts, K = proposal.tokens, proposal.tokens.shape[1]
    point = jnp.where(drafts == best[:, :K], 0.0, -jnp.inf)
    log_p = jnp.where(law.greedy[:, None], point, law.log_prob(drafts))
    if proposal.law is None:
        return log_p, jnp.zeros_like(log_p)
    return log_p, jnp.where(proposal.point_mass[:, None], 0.0, proposal.law.log_prob(drafts))


def _pick(values, index):
    """``[B, J], [B] -> [B]``."""
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]
