"""Draft heads that are trained on an engine's own texts, beside a target that changes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from engines import CONFIG, TARGET, draft, drafting, in_shards, paused, ragged_prompts, requests_of, target
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
from jspec.sampling.params import SamplingParams
from jspec.train import OnPolicyTrainer
from jspec.train.objectives import loss_of
from jspec.train.on_policy import windows_of

MORE = "eagle3-bare", "eagle3-norms", "medusa-borrowed-head", "dspark-vanilla"
PROMPTS = ragged_prompts((1, 2, 5, 8, 9, 13))
T = 36
PLAN: Any = {"learning_rate": 1e-2, "tokens_per_step": len(PROMPTS) * T, "length": T}
COSTS = {CONFIG.max_batch: {0: 1.0, 1: 1.3, 2: 1.4, 3: 1.5}}  # seconds of a round: one draft has to be accepted in 30%


def weights(change: float = 0.0, seed: int = 0) -> dict[str, np.ndarray]:
    """Those of the target, with so much noise added to its matrices in units of their own size."""
    rng = np.random.default_rng(seed)
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
    """Chooses how many drafts a round makes."""
    return llm_of("mlp", K="auto", costs=COSTS, max_draft_tokens=3)


@pytest.fixture(scope="module")
def trainer(mlp) -> OnPolicyTrainer:
    return OnPolicyTrainer(mlp, **PLAN)


def renewed(llm: LLM, name: str = "mlp") -> LLM:
    """The model with the weights that it was made with."""
    llm.update_weights(weights(), names="jspec")
    llm.engine.replace_draft(serving(VARIANTS[name], trained_head(VARIANTS[name])))
    return llm


class TestLearning:
    @pytest.mark.parametrize(
        "name",
        ["p-eagle", "eagle", "eagle3", "mlp", "mtp", "medusa", "dspark", "dflash", *MORE],
    )
    def test_the_loss_falls_and_acceptance_rises_on_a_target_that_has_changed(self, name):
        llm = llm_of(name)
        before = accepted(llm)
        trainer = OnPolicyTrainer(llm, **PLAN)
        llm.update_weights(weights(0.6), names="jspec")
        old, rollouts = accepted(llm), texts(llm)
        losses = [trainer.step(rollouts) for _ in range(50)]
        assert old < before / 2
        assert losses[-1] < 0.75 * losses[0]
        assert accepted(llm) > max(2 * old, before / 2)

    def test_nothing_is_compiled_behind_the_first_step(self, mlp, trainer):
        """Neither for other texts, nor where an update has put other arrays in the places of the target's."""
        few, many, guard = texts(mlp)[:1], [texts(mlp), *texts(mlp, temperature=1.0)], CompilationGuard("count")
        trainer.step(few)
        guard.seal()
        with guard.watching():
            trainer.step(many)
        mlp.update_weights(weights(0.1), names="jspec")
        with guard.watching():
            trainer.step(few)
        assert guard.count == 0

    def test_a_head_that_grows_old_makes_no_drafts_until_it_has_learnt(self, mlp, trainer):
        """Its texts stay, and come sooner then."""

        def share_of_rounds_with_drafts() -> float:
            for _ in range(3):
                texts(mlp)  # from which the engine learns
            stats = total_stats(result.stats for result in texts(mlp))
            return stats.drafted_per_position[0] / stats.num_steps

        renewed(mlp)
        young = share_of_rounds_with_drafts()
        mlp.update_weights(weights(0.6, seed=1), names="jspec")
        old, learnt, rollouts = share_of_rounds_with_drafts(), mlp.engine.loop.controller, texts(mlp)
        for _ in range(60):
            trainer.step(rollouts)
        assert mlp.engine.loop.controller is not learnt  # it has forgotten the old head
        again = share_of_rounds_with_drafts()
        assert old < 0.4 < 0.8 < min(young, again), (young, old, again)
        after = texts(mlp)
        assert [one.token_ids for one in after] == [one.token_ids for one in rollouts]
        assert sum(one.stats.num_steps for one in after) < 0.8 * sum(one.stats.num_steps for one in rollouts)

    @pytest.mark.parametrize("name", ["eagle", "eagle3", "medusa-borrowed-head"])
    def test_what_a_head_borrows_is_the_targets_of_now(self, name):
        """Embedding, output head and features: a model that got its weights later learns and drafts like one that was made
        with them."""
        updated, made = llm_of(name), llm_of(name, weights(0.6))
        trainers = [OnPolicyTrainer(llm, **PLAN) for llm in (updated, made)]
        updated.update_weights(weights(0.6), names="jspec")
        rollouts, same = texts(made, temperature=1.0), texts(updated, temperature=1.0)
        assert [(one.token_ids, one.stats) for one in same] == [(one.token_ids, one.stats) for one in rollouts]
        first, second = (trainer.step(rollouts) for trainer in trainers)
        assert first == pytest.approx(second, rel=1e-6)
        for ours, theirs in zip(drafts(updated), drafts(made), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)

    def test_requests_under_way_go_on_with_the_new_head(self, mlp, trainer, monkeypatch):
        """Unless the trainer is to wait for them, which nobody can while they are kept."""
        rollouts, params = texts(mlp), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        with paused(mlp.engine) as loop:
            begun = [loop.submit(request) for request in requests_of(PROMPTS, params)]
            loop.step()
            mlp.engine.lifecycle._pausing.pause("keep", None)
        monkeypatch.setattr(trainer, "_wait", True)
        with pytest.raises(RuntimeError, match="stand still"):
            trainer.step(rollouts)
        monkeypatch.undo()
        trainer.step(rollouts)
        mlp.resume()
        assert [one.token_ids for one in texts(mlp)] == [one.token_ids for one in rollouts]
        assert [active.tokens for active in begun] == [one.token_ids for one in rollouts]
        assert [active.redrafted for active in begun] == [True] * 3 + [False] * (len(PROMPTS) - 3)

    def test_a_target_in_shards_teaches_the_same(self, mlp):
        head, settings = VARIANTS["mlp"], Speculation(3)
        module, model = serving(head, trained_head(head)), in_shards(build(TARGET, weights()), 2)
        shared, make = on_every_device(module, mesh_of(2, AXIS)), drafter_for(head, TARGET, settings)
        sharded = LLM(model, shared, make, "mlp", None, settings, CONFIG)
        rollouts, trainers = texts(renewed(mlp)), [OnPolicyTrainer(llm, **PLAN) for llm in (mlp, sharded)]
        ours, theirs = ([trainer.step(rollouts) for _ in range(3)] for trainer in trainers)
        np.testing.assert_allclose(ours, theirs, rtol=2e-3)  # each device takes the mean over its own tokens


class TestWindows:
    def test_prompts_and_padding_are_complements_and_long_texts_go_on(self):
        results = [
            Result(None, new, old, "length", None, Stats.of(0, [], []), [])
            for old, new in (([7], [1, 2]), ([3, 0], [4]), ([5, 6, 7, 8, 9, 10], [11, 12, 13, 14]), ([5], [1]))
        ]
        expected = [[~7, 1, 2, -1, -1], [~3, ~0, 4, -1, -1], [~9, ~10, 11, 12, 13]]
        assert windows_of([results[0], results[1:]], 4).tolist() == expected

    @pytest.mark.parametrize("method", ["eagle", "eagle3", "parallel", "mlp", "medusa", "mtp", "dspark", "dflash"])
    def test_what_does_not_count_changes_no_loss(self, method):
        """Windows of padding beside others, and tokens behind the end of a text, whichever they are."""
        aim, params = objective(method), head_params(method)
        aim = dataclasses.replace(aim, noise=0.0) if method == "eagle" else aim
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
        if method not in ("parallel", "dspark", "dflash"):  # which draw some of the slots
            assert loss(np.where(np.arange(17) < 12, whole, -1)) == pytest.approx(loss(whole[:, :12]), rel=1e-5)


class TestFailures:
    def test_a_loss_that_is_not_finite_leaves_the_head(self, mlp):
        trainer = OnPolicyTrainer(mlp, learning_rate=1e30, tokens_per_step=8 * T, length=T)
        rollouts = texts(mlp)
        trainer.step(rollouts)  # whose loss is that before the update
        before = drafts(mlp)
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="of the draft head, which stays as it was"):
                trainer.step(rollouts)
        for ours, theirs in zip(drafts(mlp), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert [one.token_ids for one in texts(mlp)] == [one.token_ids for one in rollouts]
        renewed(mlp)

    def test_results_without_tokens_are_named(self, mlp, trainer):
        empty = Result(None, [], [3, 4, 5], "abort", None, Stats.of(0, [], []), [])
        before = drafts(mlp)
        for results in ([], [empty], [[empty], empty]):
            with pytest.raises(ValueError, match=r"results=\[.*expected some with new tokens"):
                trainer.step(results)
        with pytest.raises(ValueError, match="results=7: expected results of"):
            trainer.step([7])  # pyright: ignore[reportArgumentType]
        trainer.step([empty, *texts(mlp)])
        assert any((ours != theirs).any() for ours, theirs in zip(drafts(mlp), before, strict=True))

    def test_a_model_that_sleeps_or_is_closed_is_named(self, mlp):
        llm, rollouts = llm_of("mlp"), texts(mlp)
        trainer = OnPolicyTrainer(llm, **PLAN)
        for leave, said in ((llm.sleep, r"asleep: call wake_up\(\)"), (llm.close, "the model is closed")):
            leave()
            for call in (lambda: trainer.step(rollouts), lambda: OnPolicyTrainer(llm)):
                with pytest.raises(RuntimeError, match=said):
                    call()

    def test_a_trainer_goes_on_when_its_model_wakes(self, mlp, trainer):
        rollouts = texts(mlp)
        mlp.sleep()
        mlp.wake_up()
        assert trainer.step(rollouts) > trainer.step(rollouts) > 0
        assert [one.token_ids for one in texts(mlp)] == [one.token_ids for one in rollouts]

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            (None, "llm.method=None: expected a draft head of one of dspark, dflash"),
            ("ngram", "llm.method='ngram': expected a draft head"),
            ("draft_model", "llm.method='draft_model': expected a draft head"),
            ("pard", "a draft_model checkpoint that cannot be trained here: it is a whole language model"),
            ("eagle3-int8", "its weights are stored in int8"),
            ("dflash2", "its candidate selector is not trained"),
            ("domino", "its recurrence over drafts is not trained"),
            ("xpress", "llm.method='xpress': expected a draft head"),
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
