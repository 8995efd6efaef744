"""The training loop and its states on disk: a run that is resumed gives the numbers of one that never stopped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jspec.train.checkpoints import MAX_KEPT, Checkpoints, TrainState
from jspec.train.loop import TrainingPlan, TrainingProgress, fit, make_evaluator

V = 11
PLAN = TrainingPlan(steps=12, peak_rate=0.1, weight_decay=0.1, tokens_per_step=64, length=16, evaluate_every=3)
TEXT = np.arange(600) ** 2 % V


class Stop(Exception):
    pass


def loss(params, frozen, windows, key):
    """The loss of a bigram model with noise on its table, so that the windows and the noise both change the numbers."""
    noise = 0.1 * jax.random.normal(key, params["table"].shape)
    log_distribution = jax.nn.log_softmax((params["table"] + noise)[windows[:, :-1]] * frozen)
    return -jnp.take_along_axis(log_distribution, windows[:, 1:, None], axis=-1).mean()


def run(store=None, stop_after: int | None = None) -> tuple[list[TrainingProgress], dict]:
    """Train the bigram model; returns its evaluations (without times) and the best params."""
    evaluations = []

    def report(progress, params):
        evaluations.append(dataclasses.replace(progress, seconds=0.0))
        if progress.step == stop_after:
            raise Stop

    evaluate = make_evaluator(loss, TEXT[-100:], (2, 16))
    start, key = {"table": jnp.zeros((V, V))}, jax.random.key(5)
    return evaluations, fit(PLAN, loss, evaluate, start, 1.0, jnp.asarray(TEXT, jnp.int32), key, report, store)


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    evaluations, best = run()
    assert [progress.step for progress in evaluations] == [3, 6, 9, 12]
    assert evaluations[-1].train_loss < evaluations[0].train_loss - 0.3
    with pytest.raises(Stop):
        run(Checkpoints(tmp_path), stop_after=9)  # stops before the state of step 9 is saved
    resumed, resumed_best = run(Checkpoints(tmp_path))
    assert resumed == evaluations[2:]
    np.testing.assert_array_equal(resumed_best["table"], best["table"])


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    _, best = run(Checkpoints(tmp_path))
    evaluations, again = run(Checkpoints(tmp_path))
    assert evaluations == []
    np.testing.assert_array_equal(again["table"], best["table"])


def test_newest_two_states_stay_on_disk(tmp_path):
    run(Checkpoints(tmp_path))
    assert sorted(int(folder.name) for folder in tmp_path.iterdir()) == [9, 12]
    assert MAX_KEPT == 2
    assert Checkpoints(tmp_path).step == 12


def test_states_on_disk_keep_their_names(tmp_path):
    run(Checkpoints(tmp_path))
    manager = ocp.CheckpointManager(tmp_path, item_handlers=ocp.StandardCheckpointHandler())
    assert set(manager.item_metadata(12).tree) == set(TrainState._fields)
    assert TrainState._fields == ("step", "seconds", "params", "moments", "key", "best", "lowest")


def test_a_folder_without_a_state_has_no_step(tmp_path):
    assert Checkpoints(tmp_path / "new").step is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", 0, "steps=0: expected an integer of at least 1"),
        ("length", 0, "length=0: expected an integer of at least 1"),
        ("evaluate_every", 0, "evaluate_every=0: expected an integer of at least 1"),
        ("peak_rate", 0.0, "peak_rate=0.0: expected a positive number"),
        ("weight_decay", -1.0, "weight_decay=-1.0: expected a number of at least 0"),
        ("tokens_per_step", 15, "tokens_per_step=15: expected a window, 16, or more"),
    ],
)
def test_invalid_options_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **{field: value})
