"""Single rounds, with a rule that accepts a given number of drafts: caches after any pattern of acceptance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, MAX_LEN, V, causal, draft, entered, ragged_prompts, target
from head_bench import scripted_round
from heads import compile_fast
from step_requests import never, request

from jspec.config import Speculation
from jspec.drafting.draft_model import DraftModel
from jspec.engine.request import BROKEN, FULL, LIVE, STOPPED
from jspec.engine.round_log import RoundLog
from jspec.engine.runner.state import init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.sampling.verify import VerifyResult

K = 4
PROMPTS = ragged_prompts((1, 6, 24))


def stepping(verify=never) -> DecodeStep:
    return DecodeStep(target(), DraftModel(draft(), V, Speculation(K, draft_sampling="sample")), verify, width=K + 2)


@functools.cache
def programs():
    """prefill, and a round that accepts and emits by script: state, log, target's logits, the proposal."""

    return compile_fast(stepping().prefill), compile_fast(functools.partial(scripted_round, stepping))


def admitted(**settings):
    """The three prompts, each in its row."""
    state = init_state(CONFIG, target(), stepping().drafter, jnp.float32)
    for row, prompt in enumerate(PROMPTS):
        entry = request(row, len(prompt), **settings)
        padded = jnp.zeros(MAX_LEN, jnp.int32).at[: len(prompt)].set(jnp.array(prompt))
        chunk = padded[None, : max(map(len, PROMPTS))]
        first, count = jnp.zeros(1, jnp.int32), jnp.array([len(prompt) - 1])
        state = programs()[0](state, PrefillInputs(jnp.array([row]), chunk, first, count, entry.table[None]))
        state = entered(state, row, padded, entry)
    return state


def play(state, accepted, token, ok=(True, True, True)):
    return programs()[1](state, jnp.array(accepted, jnp.int32), jnp.array(token, jnp.int32), jnp.array(ok))


@pytest.mark.parametrize(
    "pattern",
    [
        [[4, 4, 4]] * 4,
        [[0, 0, 0]] * 6,
        [[4, 0, 2], [0, 4, 4], [4, 1, 0], [3, 4, 1], [4, 0, 3], [1, 2, 4]],
        np.random.default_rng(0).integers(0, K + 1, size=(8, 3)).tolist(),
    ],
)
def test_caches_are_right_after_any_acceptance(pattern):
    """In each round, target and draft compute what one causal pass over committed tokens and drafts does."""
    rng = np.random.default_rng(1)
    state, compared = admitted(), 0
    for accepted in pattern:
        live, length = np.asarray(state.live), np.asarray(state.request.length)
        before = np.asarray(state.tokens)
        state, log, logits, proposal = play(state, accepted, rng.integers(V, size=3))
        for row in np.flatnonzero(live):
            n, k = length[row], int(proposal.count[row])
            assert k == min(K, MAX_LEN - 1 - n)
            text = np.zeros((1, MAX_LEN), np.int32)
            text[0, :n], text[0, n : n + k] = before[row, :n], proposal.tokens[row, :k]
            by_target = np.asarray(causal(target())(text))[0, n - 1 : n + k]
            by_draft = np.asarray(causal(draft())(text))[0, n - 1 : n + k - 1]
            np.testing.assert_allclose(logits[row, : k + 1], by_target, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(proposal.distribution.warped.logits[row, :k], by_draft, rtol=1e-5, atol=1e-5)
            compared += k + 1
            count = int(log.count[row])
            assert count == min(accepted[row], k) + 1
            emitted = np.asarray(log.tokens[row])
            assert emitted[: count - 1].tolist() == proposal.tokens[row, : count - 1].tolist()
            assert np.asarray(state.tokens)[row, : n + count].tolist() == [*before[row, :n], *emitted[:count]]
    assert compared > 30


def test_the_last_slot_is_used_and_none_beyond():
    """A row that accepts everything ends with exactly max_len tokens and its last round drafts what fits."""
    state, drafted = admitted(), []
    while np.asarray(state.live)[2]:
        state, log, _, _ = play(state, [4, 4, 4], [1, 1, 1])
        drafted.append(int(log.drafted[2]))
    assert drafted == [4, 4, 4, 0]  # 24 -> 29 -> 34 -> 39, and one slot is left
    assert int(state.outcome[2]) == FULL
    assert int(state.request.length[2]) == MAX_LEN


def test_a_stop_token_ends_the_emitted_tokens():
    state = admitted(stop_tokens=(28,))
    state, log, _, proposal = play(state, [2, 2, 0], [28, 5, 28])
    drafts = np.asarray(proposal.tokens)
    assert 28 not in drafts[:, :2]  # else the case below would be another
    assert log.count.tolist() == [3, 3, 1]
    assert log.outcome.tolist() == [STOPPED, LIVE, STOPPED]
    again, log, _, _ = play(state, [4, 0, 4], [1, 1, 1])
    assert log.count.tolist() == [0, 1, 0]  # a row that has ended emits nothing, drafts nothing
    assert log.drafted.tolist() == [-1, K, -1]
    assert log.accepted.tolist() == [-1, 0, -1]
    assert again.request.length.tolist() == [
        state.request.length[0],
        state.request.length[1] + 1,
        state.request.length[2],
    ]


def test_an_accepted_draft_that_is_a_stop_token_discards_the_rest():
    first = np.asarray(play(admitted(), [0, 0, 0], [1, 1, 1])[3].tokens)
    state = admitted(stop_tokens=(int(first[1, 1]),))
    _, log, _, proposal = play(state, [4, 4, 4], [1, 1, 1])
    assert proposal.tokens[1].tolist() == first[1].tolist()
    at = first[1].tolist().index(first[1, 1])
    assert log.count[1] == at + 1
    assert log.tokens[1].tolist() == [*first[1, : at + 1], *[-1] * (K - at)]
    assert log.outcome[1] == STOPPED


def test_the_length_limit_cuts_the_emitted_tokens():
    lengths = [len(prompt) for prompt in PROMPTS]
    state = admitted(limit=max(lengths) + 3)
    _, log, _, _ = play(state, [4, 4, 4], [1, 1, 1])
    assert log.count.tolist() == [5, 5, 3]
    assert log.outcome.tolist() == [LIVE, LIVE, FULL]


def test_a_row_without_a_distribution_ends_with_its_accepted_drafts():
    state = admitted()
    state, log, _, proposal = play(state, [2, 0, 3], [1, 1, 1], ok=[False, False, True])
    assert log.count.tolist() == [2, 0, 4]
    assert log.outcome.tolist() == [BROKEN, BROKEN, LIVE]
    assert log.tokens[0].tolist() == [*proposal.tokens[0, :2].tolist(), -1, -1, -1]


def test_the_loop_on_the_device_ends_when_no_row_is_live():
    rounds = []

    def accept_nothing(logits, warp, proposal, noise):
        jax.debug.callback(lambda: rounds.append(1))
        return VerifyResult(jnp.zeros(3, jnp.int32), jnp.full(3, 7, jnp.int32), jnp.ones(3, bool))

    step = stepping(accept_nothing)
    state = admitted(limit=max(map(len, PROMPTS)) + 2)
    state = dataclasses.replace(state, outcome=jnp.array([STOPPED, STOPPED, LIVE]))
    state, packed = compile_fast(step.decode, static_argnums=1)(state, 5)
    logs = RoundLog.unpacked(packed)
    assert logs.tokens[:2].tolist() == [[[-1] * (K + 1)] * 2 + [[7, *[-1] * K]]] * 2
    assert (logs.tokens[2:] == -1).all()
    assert logs.drafted.tolist() == [[-1, -1, K], [-1, -1, K], [-1] * 3, [-1] * 3, [-1] * 3]
    assert logs.outcome.tolist() == [[STOPPED, STOPPED, LIVE], [STOPPED, STOPPED, FULL], [-1] * 3, [-1] * 3, [-1] * 3]
    assert logs.count.tolist() == [[0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert logs.accepted[:, 2].tolist() == [0, 0, -1, -1, -1]
    assert state.outcome.tolist() == [STOPPED, STOPPED, FULL]
    jax.effects_barrier()
    assert len(rounds) == 2
