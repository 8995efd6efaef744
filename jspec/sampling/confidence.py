"""A drafter's confidence in its drafts, for verification budgets."""

import jax
import jax.numpy as jnp

from jspec.sampling.verify import Proposal


def confidence_of(proposal: Proposal) -> jax.Array:
    """The drafter's confidence in each draft, float32 ``[B, K]`` in 0..1, known before that draft is drawn.

    Looked-up drafts of a drafter without a model have 1/2.
    """
    if proposal.confidence is not None:
        return proposal.confidence
    if proposal.distribution is None:
        return jnp.full(proposal.tokens.shape, 0.5, jnp.float32)
    warped = proposal.distribution.warped
    peak = jnp.max(warped.logits, axis=-1).astype(jnp.float32)
    return jnp.exp(peak * warped.scale - warped.lse)
