"""Rounds of a draft head that accept as many drafts as a test says, compared with causal passes."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import Drafts, causal_drafts, logits_of
from engines import CONFIG, MAX_LEN, TARGET, V, causal, entered, ragged_prompts, target
from heads import VARIANTS, before_serving, compile_fast, random_head, serving
from looked_up import lookup
from step_requests import never, request

from jspec.config import Speculation
from jspec.config.heads import BlockConfig, PardConfig
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.state import init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models.flatten import flatten
from jspec.sampling.verify import VerifyResult

PROMPTS = ragged_prompts((1, 6, 24))  # the last is read in three chunks
CLOSE = {"rtol": 3e-5, "atol": 3e-5}
DEEP = {
    "rtol": 1e-4,
    "atol": 1e-4,
}  # for draft 4 and later: each pass reads the rounding errors of the passes before it
# A number half a step from two integers may be rounded either way, and then all that reads it differs a little.
ROUNDED = {"rtol": 0, "atol": 0.15}
long = pytest.mark.long


def scripted_round(step: Callable[..., DecodeStep], state, accepted, token, ok):
    """A round of ``step(verify)`` that accepts and emits by script: state, log, the target's logits, the proposal."""
    captured = {}

    def verify(logits, warp, proposal, noise):
        captured.update(logits=logits, proposal=proposal)
        return VerifyResult(jnp.minimum(accepted, proposal.count), token, ok)

    state, log = step(verify).round(state)
    return state, log, captured["logits"], captured["proposal"]


class Bench:
    """Three prompts, and rounds that accept and emit what a test says, for one kind of draft head and one K.

    With ``lookup``, every text whose newest token occurs earlier is looked up beside the head. What it drafts then stands in
    the causal passes as any other draft does.
    """

    def __init__(self, name: str, K: int, lookup: bool = False):
        self.config, self.K, self.lookup = VARIANTS[name], K, lookup
        self.head = random_head(self.config)
        _, merge = flatten(serving(self.config, self.head))
        _, merge_unprepared = flatten(before_serving(self.config, self.head))
        settings = Speculation(K, draft_sampling="sample", lookup=lookup, ngram_min=1 if lookup else None)
        make_drafter = drafter_for(self.config, TARGET, settings)

        def step(leaves, verify=never) -> DecodeStep:
            return DecodeStep(target(), make_drafter(target(), merge(leaves)), verify, width=K + 2)

        def a_round(leaves, state, accepted, token):
            return scripted_round(functools.partial(step, leaves), state, accepted, token, jnp.ones(3, bool))

        def causal_pass(leaves, text, length):
            return causal_drafts(self.config, merge_unprepared(leaves), target(), text, length, K)

        self.drafter = make_drafter(target(), serving(self.config, self.head))
        self.prefill = compile_fast(lambda leaves, *args: step(leaves).prefill(*args))
        self.round, self.causal_pass = compile_fast(a_round), compile_fast(causal_pass)

    def admitted(self, leaves):
        """The state with the three prompts, one in each row. Cache slots that the draft head has not written are NaN."""
        state, C = init_state(CONFIG, target(), self.drafter, jnp.float32), CONFIG.prefill_chunk
        empty = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), state.draft)
        state = dataclasses.replace(state, draft=empty)
        for row, prompt in enumerate(PROMPTS):
            entry, padded = request(row, len(prompt)), np.zeros(MAX_LEN + C, np.int32)
            padded[: len(prompt)] = prompt
            for start in range(0, len(prompt) - 1, C):
                count = min(C, len(prompt) - 1 - start)
                where = np.array([start]), np.array([count]), entry.table[None]
                state = self.prefill(
                    leaves, state, PrefillInputs(np.array([row]), padded[None, start : start + C + 1], *where)
                )
            state = entered(state, row, padded[:MAX_LEN], entry)
        return state

    def room(self, length: int) -> int:
        """How many drafts a row with this many tokens has room for."""
        slots = MAX_LEN - 1 - length
        if isinstance(self.config, PardConfig):
            return max(min(self.K, slots, self.config.model.max_position - length + 1), 0)
        if isinstance(self.config, BlockConfig):
            slots = min(slots, self.config.layers.max_position - length + self.config.anchor_first)
        elif self.config.decoder is not None:
            slots = min(slots, self.config.decoder.max_position - (length - 2))
        return max(min(self.K, slots), 0) if length > 1 else 0

    def looked_up(self, text) -> list[int]:
        """The looked-up drafts after a text, if any."""
        found = lookup(text, 1, 8, self.K) if self.lookup else None
        return (found or [])[: MAX_LEN - 1 - len(text)]

    def play(self, pattern, head=None):
        """Play rounds until no row is live or the pattern ends, and compare each with causal passes.

        Args:
          pattern: for each round, how many drafts each of the three rows accepts.
          head: the draft head. None means that of the bench.

        Returns:
          a pair (number of drafts, room) for every live row in every round that was not looked up, and the last state.
        """
        head = before_serving(self.config, self.head if head is None else head)
        leaves, unprepared = flatten(serving(self.config, head)).leaves, flatten(head).leaves
        state, rng, drafted = self.admitted(leaves), np.random.default_rng(1), []
        for accepted in pattern:
            live, length, before = (np.asarray(x) for x in (state.live, state.request.length, state.tokens))
            if not live.any():
                break
            token = rng.integers(V, size=3)
            state, log, logits, proposal = self.round(leaves, state, np.array(accepted), token)
            text = np.pad(before, ((0, 0), (0, self.K)))
            for row, n in enumerate(length):
                text[row, n : n + self.K] = proposal.tokens[row]
            expected = self.causal_pass(unprepared, text, length)
            by_target = np.asarray(causal(target())(text[:, :MAX_LEN]))
            for row in np.flatnonzero(live):
                n, k = length[row], int(proposal.count[row])
                beside = self.looked_up(before[row, :n].tolist())
                if beside:
                    assert proposal.tokens[row, :k].tolist() == beside
                    assert proposal.point_mass[row, :k].all()
                else:
                    assert k == min(self.room(n), distributions(expected.logits[row]))
                    drafted.append((k, self.room(n)))
                np.testing.assert_allclose(logits[row, : k + 1], by_target[row, n - 1 : n + k], **CLOSE)
                own = min(k, self.room(n))
                self.compare(row, own, logits_of(proposal.distribution), state, expected)
                assert int(log.count[row]) == min(accepted[row], k) + 1
        for pool in jax.tree.leaves(state.draft):
            assert np.isnan(pool[:, 0]).all(), "the null page was written"
        return drafted, state

    def compare(self, row: int, k: int, logits, state, expected: Drafts):
        """Compare k drafts of a row, and its slots in the draft head's cache, with those of causal passes."""
        shallow, rounds = min(k, 4), self.config.quantization == "int8"
        close, deep = (ROUNDED, ROUNDED) if rounds else (CLOSE, DEEP)
        np.testing.assert_allclose(logits[row, :shallow], expected.logits[row, :shallow], **close)
        np.testing.assert_allclose(logits[row, shallow:k], expected.logits[row, shallow:k], **deep)
        real = min(int(expected.real[row]), self.reach)
        for pool, by_hand in zip(jax.tree.leaves(state.draft), jax.tree.leaves(expected.kv), strict=True):
            mine = slots(pool, state.request.table[row])
            np.testing.assert_allclose(mine[:, :real], by_hand[:, row, :real], **close)
            assert np.isnan(mine[:, self.reach :]).all(), "slots past the last position were written"

    @property
    def reach(self) -> int:
        """How many slots the draft head may write."""
        return min(MAX_LEN, MAX_LEN if self.config.decoder is None else self.config.decoder.max_position)


def distributions(logits) -> int:
    """How many of the K drafts come before the first whose logits ``[K, V]`` contain NaN."""
    return int(np.sum(np.cumprod(~np.isnan(np.asarray(logits)).any(axis=-1))))


def slots(pool, table) -> np.ndarray:
    """The cache slots of one row in the order of its text: ``[G, pages, P, H] -> [G, slots, H]``."""
    G, _, _, H = pool.shape
    return np.asarray(pool)[:, np.asarray(table)].reshape(G, -1, H)
