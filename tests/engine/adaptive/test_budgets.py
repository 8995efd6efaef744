"""Engines with a verification budget: the tokens that the target reads, the texts, and the choice of R."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import calls_of_any_length, preempting, serve
from engines import GREEDY, TARGET, hybrid, latents, plain_greedy, requests_of, target, tokens_of
from requests_and_engines import CONFIG, PARAMS, PROMPTS, K, engine_of, passing
from tiny import tiny_checkpoint

import jspec
from jspec.config import Speculation, speculation
from jspec.engine.adaptive.controller import Controller
from jspec.engine.adaptive.cost_table import CostTable
from jspec.models.cache_pools import init_pool
from jspec.models.kv_cache import PagedView
from jspec.models.ragged_view import RaggedView

pytestmark = pytest.mark.usefixtures("states_in_chunks")
KINDS = ("draft_model", "eagle", "dspark", "ngram", "latents", "draft_model/2", "hybrid")
BUDGET = 2.0  # tokens for each of three rows, where drafts make it five
REQUESTS = requests_of(PROMPTS, dataclasses.replace(GREEDY, max_tokens=14))


def budgeted(kind: str, **how):
    return engine_of(kind, verify_budget=BUDGET, **how)


@pytest.fixture
def rounds_read(monkeypatch):
    """``watch(engine)`` has every call's logs noted in the list that it returns."""

    def watch(engine):
        logs, read = [], engine.runner.read
        monkeypatch.setattr(engine.runner, "read", lambda call: logs.append(read(call)) or logs[-1])
        return logs

    return watch


@pytest.mark.parametrize("kind", KINDS)
class TestGreedy:
    """Greedy text is the target's own, whatever is verified beside it."""

    def expected(self, kind):
        plain = plain_greedy({"latents": latents, "hybrid": hybrid}.get(kind, target)(), PROMPTS)
        return [tokens[:14] for tokens in plain]

    def test_text_is_the_targets_and_rounds_keep_to_the_budget(self, kind, rounds_read):
        engine = budgeted(kind)
        logs, most = rounds_read(engine), int(BUDGET * CONFIG.max_batch)
        assert tokens_of(serve(engine, REQUESTS)) == self.expected(kind)
        drafted = np.concatenate([log.drafted for log in logs])
        read = np.sum(drafted + 1, axis=1)  # -1 where a row took no part
        assert read.max() == most
        assert drafted.max() > BUDGET - 1, "one request may have more than its share"

    def test_text_is_the_same_under_disturbances(self, kind):
        engine = budgeted(kind)
        with calls_of_any_length(engine), preempting(engine):
            actives = serve(engine, REQUESTS, at_a_time=2, neighbour=passing)
        assert tokens_of(actives) == self.expected(kind)
        assert sum(map(sum, (active.accepted for active in actives))) > 0


def test_coupled_text_is_the_same_with_every_budget():
    """Under ``match`` with coupled drafts the text is the target's own sample, whoever else is there."""
    requests = requests_of(PROMPTS, PARAMS)
    how = {"verify": "match", "draft_sampling": "coupled"}
    whole = tokens_of(serve(engine_of("draft_model", **how), requests))
    assert tokens_of(serve(budgeted("draft_model", **how), requests)) == whole


def test_a_packed_pass_equals_a_pass_of_rows():
    """Hidden states of a target that reads 9 of 15 tokens side by side, and its cache afterwards."""
    model, B, T, M, P = target(), 3, 5, 4, 4
    rng = np.random.default_rng(0)
    start, count = jnp.array([3, 0, 7], jnp.int32), np.array([5, 1, 3])
    positions = start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]
    valid = jnp.asarray(np.arange(T)[None] < count[:, None])
    rows = PagedView(1 + jnp.arange(B * M, dtype=jnp.int32).reshape(B, M), positions, valid)
    tokens = jnp.asarray(rng.integers(TARGET.vocab_size, size=(B, T)), jnp.int32)
    pool = init_pool(model.cache_shape(), 1 + B * M, P, jnp.float32)
    pool = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), pool)
    wanted, features, wanted_pool = model.with_auxiliary(tokens, positions, pool, rows, (0, 2))
    for R in (9, 12):
        view = RaggedView.of(rows, R)
        hidden, packed, cache = model.with_auxiliary(view.from_rows(tokens), view.positions, pool, view, (0, 2))
        assert hidden.shape[:2] == (1, R)
        for got, expected in ((hidden, wanted), (packed, features)):
            np.testing.assert_allclose(view.to_rows(got)[valid], expected[valid], atol=1e-5)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[:, 1:], y[:, 1:], atol=1e-5), cache, wanted_pool)


class TestChoice:
    """Of K and R between calls."""

    def test_budgets_by_rows_and_K(self):
        settings = Speculation(4, verify_budget="auto")
        assert settings.budgets(64, 4) == (None, 96, 128, 192, 256)
        assert settings.budgets(64, 2) == (None, 96, 128)
        assert settings.budgets(16, 4) == (None,)  # so few tokens cost what reading the weights does
        assert settings.budgets(64, 0) == (None,)
        assert Speculation(4, verify_budget=2.5).budgets(3, 4) == (8,)
        assert Speculation(4, verify_budget=5).budgets(3, 4) == (None,)  # every token
        assert Speculation(4).budgets(64, 4) == (None,)

    @pytest.mark.parametrize("wrong", [0, 1, -2.0, True, "all", 1000, float("nan")], ids=str)
    def test_invalid_budget_is_refused(self, wrong):
        with pytest.raises(ValueError, match=r"verify_budget=.*expected None, 'auto', or a number of tokens"):
            Speculation(4, verify_budget=wrong)

    def test_a_budget_of_each_request_alone(self):
        assert Speculation(4, verify_budget=3).for_each_request() == Speculation(2)
        assert Speculation(4, verify_budget=9).for_each_request() == Speculation(4)
        assert Speculation(4).for_each_request() == Speculation(4)

    def test_requests_that_differ_get_a_budget(self):
        """Half of the requests accept everything, and the others nothing: the tokens of those need not be read."""
        seconds = {64: {2: 7.0, 4: 11.5, (4, 192): 8.5}}
        alike, apart = Controller(seconds), Controller(seconds)
        half, eager, idle = ([4] * 20, [2] * 20), ([4] * 20, [4] * 20), ([4] * 20, [0] * 20)
        for controller, accepted in ((alike, [2] * 64), (apart, [4, 0] * 32)):
            for _ in range(20):
                controller.observe(4, 8, accepted * 8)
        assert apart.choose(64, [eager, idle] * 32) == (4, 192)
        assert apart.rates(64, [eager, idle] * 32)[4, 192] > 1.2 * apart.rates(64, [eager, idle] * 32)[4]
        assert alike.choose(64, [half] * 64) == 2

    def test_unverified_drafts_do_not_count_as_rejected(self):
        controller = Controller({4: {4: 1.0, (4, 8): 0.9}})
        for _ in range(50):
            controller.observe((4, 8), 8, [1] * 32, [1] * 32)  # the only draft that was verified was accepted
        assert controller.acceptance.min() > 0.9
        for _ in range(50):
            controller.observe(4, 8, [1] * 32, [1] * 32)
        assert controller.acceptance[1] < 0.1

    @pytest.mark.parametrize("K_too", [False, True], ids=["R", "K and R"])
    def test_engine_chooses_among_budgets(self, monkeypatch, K_too):
        monkeypatch.setattr(speculation, "NEVER_CUT", 0)
        monkeypatch.setattr(speculation, "BUDGETS", (1.5, 2))
        how = {"num_draft_tokens": "auto", "max_draft_tokens": K} if K_too else {}
        engine = engine_of("draft_model", verify_budget="auto", **how)
        ways = engine.runner.batch.builder.round_shapes(CONFIG.max_batch)
        assert {(4, 5), (4, 6), 4} <= set(ways)
        engine.loop.controller = controller = Controller(
            {CONFIG.max_batch: {way: 1.0 if isinstance(way, tuple) else 1.6 for way in ways}}
        )
        chosen, choose = [], controller.choose
        monkeypatch.setattr(controller, "choose", lambda *what: chosen.append(choose(*what)) or chosen[-1])
        expected = [tokens[:14] for tokens in plain_greedy(target(), PROMPTS)]
        assert tokens_of(serve(engine, REQUESTS)) == expected
        assert any(isinstance(way, tuple) for way in chosen)
        assert (controller.acceptance != Controller(controller.seconds).acceptance).any()


@pytest.fixture
def small(tmp_path):
    return tiny_checkpoint(tmp_path / "target")


class TestLoading:
    """Arguments of ``jspec.load``."""

    def load(self, small, **options):
        return jspec.load(small, "ngram", max_len=32, compilation_cache=False, **options)

    def test_texts_depend_on_their_neighbours(self, small):
        assert not self.load(small, verify_budget=2).reproducible
        assert self.load(small).reproducible

    def test_reproducible_texts_have_the_budget_for_themselves(self, small):
        llm = self.load(small, verify_budget=3, reproducible=True)
        assert llm.reproducible
        assert llm.speculation == Speculation(2)

    @pytest.mark.parametrize("draft", [{"draft": None}, {"draft": "ngram", "num_draft_tokens": 0}], ids=str)
    def test_budget_without_drafts_is_refused(self, small, draft):
        with pytest.raises(
            ValueError, match="verify_budget=2: expected None without drafts, or draft= and num_draft_tok"
        ):
            jspec.load(small, max_len=32, compilation_cache=False, verify_budget=2, **draft)

    @pytest.mark.parametrize("budget", ["auto", 2.5])
    def test_reproducible_requires_a_whole_budget(self, small, budget):
        words = f"verify_budget={budget!r}: expected a whole number of tokens for each request under reproducible=True"
        with pytest.raises(ValueError, match=words):
            self.load(small, verify_budget=budget, reproducible=True)

    def test_given_costs_include_budgets(self, small, monkeypatch):
        monkeypatch.setattr(speculation, "NEVER_CUT", 0)
        monkeypatch.setattr(speculation, "BUDGETS", (2,))
        device = jax.devices()[0].device_kind
        table = CostTable(device, "ngram", {8: {4: 2.0, (4, 16): 1.5}})
        llm = self.load(small, verify_budget="auto", costs=table)
        assert llm.costs == table
        with pytest.raises(
            ValueError, match="costs has no rounds of batch 8 and 4 drafts of which the target reads 2 tok"
        ):
            self.load(small, verify_budget="auto", costs=CostTable(device, "ngram", {8: {4: 2.0}}))
        with pytest.raises(
            ValueError, match="costs has no place with num_draft_tokens=4, which leaves nothing to choose"
        ):
            self.load(small, verify_budget=2, costs=table)
