"""Rounds of changing K, plain rounds among them: caches and proposals equal those of causal passes over the text."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import Drafts, logits_of
from engines import DRAFT, MAX_LEN, TARGET, V, causal, target
from head_bench import CLOSE, Bench, distributions, long, scripted_round
from heads import VARIANTS, compile_fast, serving
from step_requests import never

from jspec.config import Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.step import DecodeStep
from jspec.models.flatten import flatten
from jspec.models.kv_cache import CausalView
from jspec.sampling.verify import RULES

K, ROUNDS = 4, 3  # the largest K, and rounds of a call without drafts
LENGTHS = (1, 2, 4)
# Calls: 0 for one without drafts, else K and how many drafts each row accepts.
RESTS = [(4, [4, 0, 2]), 0, (4, [4, 4, 1]), 0, 0, (4, [4, 2, 4]), (4, [4, 4, 4])]
SHRINKS = [
    (4, [4, 3, 4]),
    (1, [1, 0, 1]),
    (4, [4, 4, 4]),
    (2, [2, 2, 0]),
    (1, [1, 1, 1]),
    (4, [0, 4, 2]),
    (2, [2, 1, 0]),
]
MIXED = [
    (4, [4, 1, 1]),
    (4, [2, 0, 0]),
    0,
    (1, [1, 0, 1]),
    (4, [4, 4, 0]),
    (2, [0, 2, 1]),
    0,
    (2, [2, 1, 0]),
    (1, [0, 1, 1]),
]


class Switching(Bench):
    """A ``Bench`` whose rounds have any K of ``LENGTHS``, or no drafts."""

    def __init__(self, name: str):
        super().__init__("pard" if name == "draft_model" else name, K)
        self.is_model = name == "draft_model"
        how = Speculation("auto", max_draft_tokens=K, draft_sampling="sample")
        make = drafter_for(DRAFT if self.is_model else self.config, TARGET, how)
        self.leaves, merge = flatten(serving(self.config, self.head))

        def step(leaves, K=K, verify=never) -> DecodeStep:
            return DecodeStep(target(), make(target(), merge(leaves), K), verify, width=6)

        def a_round(leaves, state, accepted, token, K):
            return scripted_round(functools.partial(step, leaves, K), state, accepted, token, jnp.ones(3, bool))

        def model_pass(leaves, text, length):
            """As ``causal_drafts``, for a language model that reads its drafts."""
            positions = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32)[None], text.shape)
            model = merge(leaves)
            hidden, kv = model(text, positions, (None,) * DRAFT.num_layers, CausalView(positions))
            places = length[:, None] - 1 + jnp.arange(K, dtype=jnp.int32)[None]
            return Drafts(jnp.take_along_axis(model.logits(hidden), places[:, :, None], axis=1), kv, length)

        if self.is_model:
            self.causal_pass = compile_fast(model_pass)
        self.drafter = make(target(), serving(self.config, self.head))
        self.prefill = compile_fast(lambda leaves, *args: step(leaves).prefill(*args))
        self.rounds = {k: compile_fast(functools.partial(a_round, K=k)) for k in LENGTHS}
        self.plainly = compile_fast(lambda leaves, state: step(leaves, K, RULES["match"]).decode_plainly(state, ROUNDS))
        self.catch_up = compile_fast(lambda leaves, state: step(leaves).catch_up(state, K + 1))

    def run(self, schedule, catches_up=True) -> set[tuple[int, int]]:
        """Make the calls of ``schedule``; every round with drafts is compared with causal passes.

        Returns:
          K of the call before and K of the call, for all calls that were compared.
        """
        state, rng, last, compared = self.admitted(self.leaves), np.random.default_rng(1), K, set()
        for call in schedule:
            if call == 0:
                state, last = self.plainly(self.leaves, state)[0], 0
                continue
            now, accepted = call
            if now < last and catches_up:
                state = self.catch_up(self.leaves, state)
            live, length, before = (np.asarray(x) for x in (state.live, state.request.length, state.tokens))
            script = np.array(accepted), rng.integers(V, size=3)
            state, _, logits, proposal = self.rounds[now](self.leaves, state, *script)
            text = np.pad(before, ((0, 0), (0, K)))
            for row, n in enumerate(length):
                text[row, n : n + now] = proposal.tokens[row]
            expected = self.causal_pass(flatten(self.head).leaves, text, length)
            by_target = np.asarray(causal(target())(text[:, :MAX_LEN]))
            for row in np.flatnonzero(live):
                n, k = length[row], int(proposal.count[row])
                assert k == min(now, self.room(n), distributions(expected.logits[row]))
                np.testing.assert_allclose(logits[row, : k + 1], by_target[row, n - 1 : n + k], **CLOSE)
                if k:
                    self.compare(row, k, logits_of(proposal.distribution), state, expected)
                    compared.add((last, now))
            last = now
        return compared


switching = functools.cache(Switching)
QUICK = ["draft_model", "eagle"]
OTHERS = [name for name in VARIANTS if name not in (*QUICK, "mlp-tied")]  # which has fewer stages than K


@pytest.mark.parametrize(
    ("schedule", "switches"),
    [
        (MIXED, {(4, 4), (0, 1), (1, 4), (4, 2), (0, 2), (2, 1)}),
        pytest.param(RESTS, {(4, 4), (0, 4)}, marks=long),
        pytest.param(SHRINKS, {(4, 1), (1, 4), (4, 2), (2, 1)}, marks=long),
    ],
    ids=["mixed", "plain rounds", "shrinks"],
)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=long) for name in OTHERS)])
def test_cache_and_proposals_stay_right_when_K_changes(name, schedule, switches):
    assert switching(name).run(schedule) >= switches


@pytest.mark.parametrize("name", ["eagle", pytest.param("pard", marks=long)])
def test_missing_catch_up_before_a_smaller_K_is_detected(name):
    """The check above sees it: the program for K drafts reads K + 1 slots, and more of them changed."""
    with pytest.raises(AssertionError):
        switching(name).run(MIXED, catches_up=False)
