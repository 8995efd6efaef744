"""The end of a round: the emitted tokens join the texts, and the features of the verify pass are stored."""

import dataclasses

import jax.numpy as jnp

from jspec.engine.request import BROKEN, FULL, LIVE, STOPPED
from jspec.engine.round_log import RoundLog
from jspec.engine.runner.state import DecodeState
from jspec.sampling.stops import first_stop
from jspec.sampling.verify import Proposal, VerifyResult


def commit(state: DecodeState, proposal: Proposal, result: VerifyResult) -> tuple[DecodeState, RoundLog]:
    """Append each row's accepted drafts and the rule's token to its text, and decide the row's outcome.

    A row emits ``count`` tokens: the accepted drafts and the rule's token, up to and including the first stop token,
    and no more than its length limit allows. If the logits behind the rule's token are not finite, the accepted
    drafts are still emitted, that token is not, and the row ends as BROKEN.

    Args:
      state: of B rows.
      proposal: the drafts, int32 ``[B, K]``.
      result: of the rule, int32 ``[B]`` accepted drafts and tokens.

    Returns:
      the new state, with longer texts, and the log of the round.
    """
    request, live = state.request, state.live
    B, K = proposal.tokens.shape
    offset = jnp.arange(K + 1, dtype=jnp.int32)[None]
    accepted, room = result.accepted, request.limit - request.length
    emitted = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(offset == accepted[:, None], result.token[:, None], emitted)

    offered = accepted + result.ok  # logits that make no distribution emit no token
    stop = first_stop(jnp.where(offset < offered[:, None], emitted, -2), request.stop_tokens)
    count = jnp.where(live, jnp.minimum(jnp.minimum(offered, stop + 1), room), 0)
    outcome = jnp.where(stop < count, STOPPED, jnp.where(count == room, FULL, jnp.where(result.ok, LIVE, BROKEN)))
    outcome = jnp.where(live, outcome, state.outcome)

    position = jnp.where(offset < count[:, None], request.length[:, None] + offset, state.tokens.shape[1])
    tokens = state.tokens.at[jnp.arange(B)[:, None], position].set(emitted, mode="drop")
    state = dataclasses.replace(
        state,
        tokens=tokens,
        outcome=outcome,
        previous=jnp.where(live & (K > 0), request.length, state.previous),
        request=dataclasses.replace(request, length=request.length + count),
        recurrent=None if state.recurrent is None else state.recurrent.commit(count, live),
    )
    log = RoundLog(
        tokens=jnp.where(offset < count[:, None], emitted, -1),
        count=count,
        drafted=jnp.where(live, proposal.count, -1),
        accepted=jnp.where(live, accepted, -1),
        outcome=outcome,
        deepest=jnp.where(live, proposal.count, -1),
        rejects=jnp.where(live, accepted < proposal.count, -1),
    )
    return state, log


def next_features(state: DecodeState, features, K: int):
    """The features ``[B, n, E]`` that the drafter reads in its next round; None if it reads none.

    Entry j belongs to position previous - 1 + j. A round with drafts moves ``previous`` up to its ``length``, so its
    K + 1 features replace the old ones. A round without drafts leaves ``previous`` where it is, so its one feature,
    at position length - 1, is added as entry length - previous.

    Args:
      state: the batch before the commit.
      features: ``[B, width, E]``, those of the verify pass, or None.
      K: how many drafts the round had.
    """
    if features is None or state.features is None:
        return None
    if K:
        return jnp.concatenate([features[:, : K + 1], state.features[:, K + 1 :]], axis=1)
    place = state.request.length - state.previous
    return state.features.at[jnp.arange(len(place)), place].set(features[:, 0], mode="drop")
