"""Every kind of draft head, in rounds that accept as many drafts as a test tells them to.

After any pattern of acceptance, its cache and its proposals equal those of a fresh causal pass over the committed tokens.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import Drafts, causal_drafts, logits_of
from engines import CONFIG, MAX_LEN, TARGET, V, causal, entered, ragged_prompts, target
from heads import VARIANTS, before_serving, compile_fast, random_head, serving
from step_requests import never, request
from test_ngram import lookup

from jspec.config import Speculation
from jspec.config.heads import BlockConfig, PardConfig
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.state import init_state
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import PrefillInputs
from jspec.models import build_head, flat_params
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

        def scripted_round(leaves, state, accepted, token):
            captured = {}

            def verify(logits, warp, proposal, noise):
                captured.update(logits=logits, proposal=proposal)
                return VerifyResult(jnp.minimum(accepted, proposal.count), token, jnp.ones(3, bool))

            state, log = step(leaves, verify).round(state)
            return state, log, captured["logits"], captured["proposal"]

        def causal_pass(leaves, text, length):
            return causal_drafts(self.config, merge_unprepared(leaves), target(), text, length, K)

        self.drafter = make_drafter(target(), serving(self.config, self.head))
        self.prefill = compile_fast(lambda leaves, *args: step(leaves).prefill(*args))
        self.round, self.causal_pass = compile_fast(scripted_round), compile_fast(causal_pass)

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


bench = functools.cache(Bench)


def patterns(K: int) -> dict:
    """Patterns by name: for each round a list of how many drafts each of the three rows accepts."""
    rng = np.random.default_rng(0)
    mixed = [[K, 0, K // 2], [0, K, K], [K, 1, 0], [K - 1, K, 1], [K, 0, K - 1], [1, K // 2, K]]
    return {
        "all": itertools.repeat([K] * 3),
        "none": itertools.repeat([0] * 3, 8),
        "mixed": itertools.cycle(mixed),
        "random": iter(lambda: rng.integers(0, K + 1, size=3).tolist(), None),
    }


def most(name: str) -> int:
    """The largest K that this draft head has weights for, 12 if any."""
    return VARIANTS[name].max_drafts or 12


QUICK = [
    ("eagle", 4),
    ("eagle-short", 10),  # the later passes are a loop
    ("eagle3", 4),
    ("eagle3-final-feature", 2),
    ("eagle3-bare", 3),
    ("p-eagle", 4),
    ("p-eagle-short", 10),
    ("pard", 10),
    ("mlp", 4),
    ("mlp-tied", 10),
    ("medusa", 4),
    ("dflash", 3),  # fewer drafts than the block has
    ("dspark", 4),
    ("dflash2", 3),
    ("dflash2-causal", 8),
    ("jetspec", 8),
    ("dflash-short", 8),
    ("dspark-rnn", 3),
    ("dspark-vanilla", 4),
    ("eagle-small", 4),
    ("dflash-small", 3),
    ("pard-small", 4),
    ("mlp-small", 4),
    ("medusa-rows", 3),
    ("mtp-small", 4),
    ("mtp-plain-output-small", 3),
]
THOROUGH = [(name, K) for name in VARIANTS for K in (1, 3, 8) if most(name) >= K]


@pytest.mark.parametrize("pattern", ["all", "none", "mixed", "random"])
@pytest.mark.parametrize(("name", "K"), [*QUICK, *(pytest.param(*case, marks=long) for case in THOROUGH)])
def test_cache_and_proposals_after_any_acceptance(name, K, pattern):
    drafted, state = bench(name, K).play(patterns(K)[pattern])
    assert all(k == room for k, room in drafted)
    assert sum(k for k, _ in drafted) > 2 * K
    assert pattern == "none" or (state.request.length == MAX_LEN).all()


BESIDE = [("eagle", 4), ("p-eagle-short", 8), ("dspark", 4)]
MORE = [("eagle-short", 10), ("eagle3", 4), ("pard-short", 4), ("mlp", 4), ("medusa", 4), ("mtp-two", 4)]
MORE += [("mtp", 3), ("dflash-short", 8), ("dspark-rnn", 3), ("jetspec", 4)]


@pytest.mark.parametrize("pattern", ["mixed", "random"])
@pytest.mark.parametrize(("name", "K"), [*BESIDE, *(pytest.param(*case, marks=long) for case in MORE)])
def test_cache_and_proposals_beside_lookup(name, K, pattern):
    """A head reads drafts that were looked up in place of its own, and goes on from what became of them."""
    play = bench(name, K, lookup=True)
    drafted, state = play.play(patterns(K)[pattern])
    assert all(k == room for k, room in drafted)
    assert any(k for k, _ in drafted)
    assert (state.request.length == MAX_LEN).all()


@pytest.mark.parametrize(
    ("name", "K", "parameter", "at"),
    [
        (
            "eagle-short",
            10,
            "embedding",
            20,
        ),  # a draft, or a committed token, after which there is no distribution any more
        ("pard", 10, "embedding", 0),  # a token of the third prompt
        ("mlp", 4, "embeddings.2", slice(0, V, 3)),  # some tokens, if drafted second
        ("medusa", 4, "heads.2.head.weight", 0),  # the third draft, always
    ],
)
def test_drafts_end_before_the_first_without_a_distribution(name, K, parameter, at):
    """A NaN in one draft also leaves nothing behind that later rounds read, unless that token is committed."""
    play = bench(name, K)
    params = flat_params(play.head)
    params[parameter] = params[parameter].at[at].set(jnp.nan)
    drafted, state = play.play(patterns(K)["mixed"], build_head(play.config, params))
    assert (state.request.length == MAX_LEN).all()
    cut = [k for k, room in drafted if k < room]
    assert cut
    assert any(k for k, _ in drafted)
    if name == "medusa":
        assert set(cut) == {2}
