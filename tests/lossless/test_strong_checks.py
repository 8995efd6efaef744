"""Two cheap and strong checks: a target that drafts for itself, and the distribution of draft tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafting.base import Context
from jspec.engine.runner.state import processing_of
from jspec.sampling.streams import RoundNoise
from lossless.oracle import Oracle
from lossless.rounds import deal
from lossless.statistics import assert_follows
from lossless.steps import ASKS, CONFIG, K, Program, S, V, play, prefilled
from lossless.table_model import TABLES


@pytest.mark.parametrize(
    "program",
    [Program("rejection"), Program("block"), Program("match", draft_sampling="coupled")],
    ids=lambda program: program.verify,
)
def test_a_target_that_drafts_for_itself_is_always_accepted(program):
    """At any temperature, under any cut: K + 1 tokens a round wherever there is room for K drafts."""
    for ask, tally in zip(ASKS, play(program, (TABLES[0], TABLES[0]), 8_000, seed=51), strict=True):
        rounds = tally.rounds.sum(axis=0)  # [drafted, accepted]
        np.testing.assert_array_equal(rounds, np.diag(np.diag(rounds)), err_msg=str(ask))
        assert rounds[K, K] >= tally.texts.sum(), ask


@functools.partial(jax.jit, static_argnums=0)
def propose(program: Program, draft, state, key_data):
    """Draft tokens int32 ``[B, K]`` and count int32 ``[B]`` of a first round."""
    request = state.request
    context = Context(
        tokens=state.tokens,
        length=request.length,
        previous=state.previous,
        features=None,
        live=state.live,
        room=jnp.minimum(S - 1 - request.length, K),
        table=request.table,
        warp=request.warp,
        processing=processing_of(state),
        noise=RoundNoise(key_data, request.length),
    )
    _, proposal = program.drafter(None, draft).propose(state.draft, context)
    return proposal.tokens, proposal.count


@pytest.mark.parametrize(
    "program",
    [
        Program("rejection"),
        Program("match", draft_sampling="coupled"),
        Program("rejection", draft_sampling="auto", draft_temperature=1.4, draft_vocab=V - 1),
    ],
    ids=lambda program: program.draft_sampling,
)
def test_draft_tokens_follow_the_drafters_distribution(program):
    which, _ = deal(ASKS, CONFIG.max_batch)
    state = prefilled(program, [ASKS[i] for i in which], TABLES)
    counts = np.zeros((len(ASKS), V, V), int)
    for batch in range(100_000 // CONFIG.max_batch):
        key_data = jax.random.key_data(jax.random.split(jax.random.key(61 + batch), CONFIG.max_batch))
        tokens, count = propose(program, program.models(TABLES)[1], state, key_data)
        assert (count == K).all()
        np.add.at(counts, (which, *np.asarray(tokens).T), 1)
    for ask, drafted in zip(ASKS, counts, strict=True):
        q = Oracle(program, ask, TABLES).draft_model
        distribution = np.array([q(ask.prompt)[v] * q((*ask.prompt, v)) for v in range(V)])
        assert_follows(drafted.ravel(), distribution.ravel(), f"drafts of {ask}")
