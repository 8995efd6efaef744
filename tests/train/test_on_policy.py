"""Draft heads that are trained on an engine's own texts, beside a target that changes."""

from typing import Any

import jax
import numpy as np
import pytest
from engines import CONFIG, TARGET, draft, drafting, in_shards, ragged_prompts, target
from heads import VARIANTS, random_head, serving, trained_head
from train_toys import V, head_params, objective
from train_toys import target as toy_target

from jspec.config import Speculation
from jspec.config.sharding import AXIS
from jspec.drafting.methods import drafter_for
from jspec.engine.runner.recompilation_guard import CompilationGuard
from jspec.llm import LLM
from jspec.models import build, flat_params
from jspec.models.flatten import flatten
from jspec.models.sharding import mesh_of, on_every_device
from jspec.outputs import Result, Stats, total_stats
from jspec.train import OnPolicyTrainer
from jspec.train.objectives import loss_of
from jspec.train.on_policy import windows_of

HEADS = "eagle", "eagle3", "p-eagle", "mlp", "dspark"
PROMPTS = ragged_prompts((1, 2, 5, 8, 9, 13))
T = 36
PLAN: dict[str, Any] = {"learning_rate": 1e-2, "tokens_per_step": len(PROMPTS) * T, "length": T}
COSTS = {
    CONFIG.max_batch: {0: 1.0, 1: 1.3, 2: 1.4, 3: 1.5}
}  # seconds of rounds: three in ten first drafts have to be accepted


def weights(change: float = 0.0) -> dict[str, np.ndarray]:
    """Those of the target, with so much noise added to its matrices in units of their own size."""
    rng = np.random.default_rng(0)
    held = {name: np.array(x) for name, x in flat_params(target()).items()}
    noise = {name: rng.standard_normal(x.shape, np.float32) * x.std() for name, x in held.items() if x.ndim > 1}
    return {name: x + change * noise[name] if name in noise else x for name, x in held.items()}


def llm_of(name: str, of: dict[str, np.ndarray] | None = None, K: Any = 3, costs: Any = None, **how) -> LLM:
    """A model of its own: its target is written over. It drafts by a head that was trained for the target's weights."""
    head, settings = VARIANTS[name], Speculation(K, **how)
    make, module = drafter_for(head, TARGET, settings), serving(head, trained_head(head))
    return LLM(build(TARGET, of or weights()), module, make, head.method, None, settings, CONFIG, costs)


def texts(llm: Any, temperature: float = 0.0) -> list[Result]:
    return llm.generate(PROMPTS, temperature=temperature, seed=5, max_tokens=20, ignore_eos=True)


def accepted(llm: LLM) -> float:
    """The share of drafts that greedy texts accept."""
    return total_stats(result.stats for result in texts(llm)).acceptance_rate


def drafts(llm: LLM) -> list[np.ndarray]:
    """The arrays that draft."""
    return [np.array(leaf) for leaf in llm.engine.runner.batch.leaves[1]]


@pytest.fixture(scope="module")
def mlp() -> LLM:
    return llm_of("mlp")


class TestLearning:
    @pytest.mark.parametrize(
        "name",
        [*HEADS, *("mtp", "medusa", "dflash", "eagle3-bare", "eagle3-norms", "medusa-borrowed-head", "dspark-vanilla")],
    )
    def test_the_loss_falls_and_acceptance_rises_on_a_target_that_has_changed(self, name):
        llm = llm_of(name)
        before = accepted(llm)
        trainer = OnPolicyTrainer(llm, **PLAN)
        llm.update_weights(weights(0.6), names="jspec")
        old, rollouts = accepted(llm), texts(llm)
        losses = [trainer.step(rollouts).loss for _ in range(50)]
        assert old < before / 2
        assert losses[-1] < 0.75 * losses[0]
        assert accepted(llm) > max(2 * old, before / 2)

    def test_nothing_is_compiled_behind_the_first_step(self, mlp):
        """Neither for other texts, nor where an update has put other arrays in the places of the target's."""
        trainer, guard = OnPolicyTrainer(mlp, **PLAN), CompilationGuard("count")
        few, many = texts(mlp)[:1], [texts(mlp), *texts(mlp, temperature=1.0)]
        trainer.step(few)
        guard.seal()
        with guard.watching():
            first = trainer.step(many)
        mlp.update_weights(weights(0.1), names="jspec")
        with guard.watching():
            second = trainer.step(few)
        assert guard.count == 0
        assert (first.num_tokens, second.num_tokens) == (20 * len(PROMPTS), 19)

    def test_texts_stay_and_come_sooner(self, mlp):
        """Greedy ones. The head that learns from them drafts nearly all of them."""
        before = texts(mlp)
        trainer = OnPolicyTrainer(mlp, **PLAN)
        for _ in range(60):
            trainer.step(before)
        after = texts(mlp)
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
        assert sum(one.stats.num_steps for one in after) < 0.8 * sum(one.stats.num_steps for one in before)

    @pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa-borrowed-head"])
    def test_what_a_head_borrows_is_the_targets_of_now(self, name):
        """Embedding, output head and features: a model that got its weights later learns and drafts like one that was made
        with them."""
        updated, made = llm_of(name), llm_of(name, weights(0.6))
        trainers = [OnPolicyTrainer(llm, **PLAN) for llm in (updated, made)]
        old = OnPolicyTrainer(updated, **PLAN).step(texts(made)).loss
        updated.engine.replace_draft(serving(VARIANTS[name], trained_head(VARIANTS[name])))
        updated.update_weights(weights(0.6), names="jspec")
        rollouts = texts(made, temperature=1.0)
        assert [(one.token_ids, one.stats) for one in texts(updated, temperature=1.0)] == [
            (one.token_ids, one.stats) for one in rollouts
        ]
        first, second = (trainer.step(rollouts).loss for trainer in trainers)
        assert first == pytest.approx(second, rel=1e-6) != pytest.approx(old, rel=1e-3)
        for ours, theirs in zip(drafts(updated), drafts(made), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)

    def test_a_target_in_shards_teaches_the_same(self, mlp):
        head, settings = VARIANTS["mlp"], Speculation(3)
        module = on_every_device(serving(head, trained_head(head)), mesh_of(2, AXIS))
        model, make = in_shards(build(TARGET, weights()), 2), drafter_for(head, TARGET, settings)
        sharded = LLM(model, module, make, "mlp", None, settings, CONFIG)
        mlp.update_weights(weights(), names="jspec")
        mlp.engine.replace_draft(serving(head, trained_head(head)))
        rollouts = texts(mlp)
        losses = [
            [trainer.step(rollouts).loss for _ in range(3)]
            for trainer in (OnPolicyTrainer(x, **PLAN) for x in (mlp, sharded))
        ]
        np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)  # each device counts its own tokens


class TestWindows:
    def test_prompts_and_padding_are_complements_and_long_texts_go_on(self):
        results = [
            Result(None, new, old, "length", None, Stats.of(0, [], []), [])
            for old, new in (([7], [1, 2]), ([3, 0], [4]), ([5, 6, 7, 8, 9, 10], [11, 12, 13, 14]), ([5], [1]))
        ]
        found = windows_of([results[0], results[1:]], 4)
        assert (
            found.tolist()
            == [
                [~7, 1, 2, -1, -1],
                [~3, ~0, 4, -1, -1],
                [~9, ~10, 11, 12, 13],
                [13, 14, -1, -1, -1],
            ][:3]
        )

    @pytest.mark.parametrize("method", ["eagle", "eagle3", "parallel", "mlp", "medusa", "mtp", "dspark", "dflash"])
    def test_what_does_not_count_changes_no_loss(self, method):
        """Windows of padding beside others, and tokens behind the end of a text, whichever they are."""
        aim, params = objective(method), head_params(method)
        constants = {name: params.pop(name) for name in ("draft_ids",) if name in params}
        leaves, merge = flatten(toy_target())
        compiled, rng = jax.jit(loss_of(aim, merge, "float32")), np.random.default_rng(0)

        def loss(windows) -> float:
            return float(compiled(params, (leaves, constants), windows, jax.random.key(0)))

        whole = rng.integers(2, V, (4, 17)).astype(np.int32)
        ended = np.concatenate([whole[:1], np.where(np.arange(17) < 12, whole[1:2], -1), np.full((2, 17), -1)])
        other = np.where(ended == -1, ~rng.integers(2, V, ended.shape), ended)
        assert loss(ended) == loss(other) == pytest.approx(loss(ended[:2]), rel=1e-5)
        assert loss(ended) != pytest.approx(loss(whole), rel=1e-4)
        assert loss(np.full((4, 17), -1)) == 0


class TestTheNumberOfDrafts:
    def test_it_falls_to_none_with_an_old_head_and_rises_with_one_that_has_learnt(self):
        llm = llm_of("mlp", K="auto", costs=COSTS, max_draft_tokens=3)

        def share_of_rounds_with_drafts() -> float:
            for _ in range(3):
                texts(llm)  # from which the engine learns
            stats = total_stats(result.stats for result in texts(llm))
            return stats.drafted_per_position[0] / stats.num_steps

        young = share_of_rounds_with_drafts()
        llm.update_weights(weights(0.6), names="jspec")
        old, learnt = share_of_rounds_with_drafts(), llm.engine.loop.controller
        trainer, rollouts = OnPolicyTrainer(llm, **PLAN), texts(llm)
        for _ in range(60):
            trainer.step(rollouts)
        assert llm.engine.loop.controller is not learnt  # it has forgotten the old head
        again = share_of_rounds_with_drafts()
        assert old < 0.4 < 0.8 < min(young, again), (young, old, again)


class TestFailures:
    def test_a_loss_that_is_not_finite_leaves_the_head(self, mlp):
        trainer = OnPolicyTrainer(mlp, **PLAN | {"learning_rate": 1e30})
        rollouts = texts(mlp)
        trainer.step(rollouts)  # whose loss is that before the update
        before = drafts(mlp)
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="of the draft head, which stays as it was"):
                trainer.step(rollouts)
        for ours, theirs in zip(drafts(mlp), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert [one.token_ids for one in texts(mlp)] == [one.token_ids for one in rollouts]

    def test_results_without_tokens_are_named(self, mlp):
        trainer, nothing = OnPolicyTrainer(mlp, **PLAN), Stats.of(0, [], [])
        empty = Result(None, [], [3, 4, 5], "abort", None, nothing, [])
        before = drafts(mlp)
        for results in ([], [empty], [[empty], empty]):
            with pytest.raises(ValueError, match=r"results=\[.*expected some with new tokens"):
                trainer.step(results)
        with pytest.raises(ValueError, match="results=7: expected results of"):
            trainer.step([7])  # pyright: ignore[reportArgumentType]
        assert trainer.step([empty, *texts(mlp)]).num_tokens == 20 * len(PROMPTS) - 1
        assert any((ours != theirs).any() for ours, theirs in zip(drafts(mlp), before, strict=True))

    def test_a_model_that_sleeps_or_is_closed_is_named(self):
        llm = llm_of("mlp")
        trainer, rollouts = OnPolicyTrainer(llm, **PLAN), texts(llm)
        for leave, said in ((llm.sleep, r"asleep: call wake_up\(\)"), (llm.close, "the model is closed")):
            leave()
            for call in (lambda: trainer.step(rollouts), lambda: OnPolicyTrainer(llm)):
                with pytest.raises(RuntimeError, match=said):
                    call()
            if leave == llm.sleep:
                llm.wake_up()
                assert trainer.step(rollouts).loss > 0

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            (None, "llm.method=None: expected a draft head of one of dspark, dflash"),
            ("ngram", "llm.method='ngram': expected a draft head"),
            ("draft_model", "llm.method='draft_model': expected a draft head"),
            ("pard", "a draft_model checkpoint that cannot be trained here: it is a whole language model"),
            ("eagle3-int8", "its weights are stored in int8"),
            ("dflash2", "its candidate selector is not trained"),
            ("mtp-two", "it has a layer for each draft"),
            ("medusa-small", "it has a part of the target's output head"),
        ],
    )
    def test_what_cannot_be_trained_is_named(self, name, said):
        settings = Speculation(3)
        if name in VARIANTS:
            head: Any = VARIANTS[name]
            module, method, make = serving(head, random_head(head)), head.method, drafter_for(head, TARGET, settings)
        else:
            module, method, make = draft() if name == "draft_model" else None, name, drafting(name, settings)
        with pytest.raises(ValueError, match=said):
            OnPolicyTrainer(LLM(target(), module, make, method, None, settings, CONFIG))

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"learning_rate": 0}, "learning_rate=0: expected a positive number"),
            ({"length": 2}, "length=2: expected an integer in 6..64"),
            ({"length": 4000}, "length=4000: expected an integer in 6..64"),
            ({"length": 32, "tokens_per_step": 31}, "tokens_per_step=31: expected 1 windows of 32 tokens"),
            ({"tokens_per_step": "all"}, "tokens_per_step='all'"),
        ],
    )
    def test_values_out_of_range_are_named(self, mlp, options, said):
        with pytest.raises(ValueError, match=said):
            OnPolicyTrainer(mlp, **options)
        with pytest.raises(ValueError, match="llm='a folder'"):
            OnPolicyTrainer("a folder")  # pyright: ignore[reportArgumentType]
