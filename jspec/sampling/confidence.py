"""How sure a drafter is of its drafts, for whoever cannot have all of them verified."""

import jax
import jax.numpy as jnp

from jspec.sampling.verify import Proposal


def confidence_of(proposal: Proposal) -> jax.Array:
    """How confident the drafter is of each draft, float32 ``[B, K]`` in 0..1, known before that draft is drawn.

    Drafts that were looked up have none, and get 1/2.
    """
    if proposal.confidence is not None:
        return proposal.confidence
    if proposal.distribution is None:
        return jnp.full(proposal.tokens.shape, 0.5, jnp.float32)
    warped = proposal.distribution.warped
    peak = jnp.max(warped.logits, axis=-1).astype(jnp.float32)
    return jnp.exp(peak * warped.scale - warped.lse)
