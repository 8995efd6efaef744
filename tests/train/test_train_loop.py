"""The loop: a run that stops and goes on gives the numbers of one that never stopped."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.train.checkpoints import KEPT, Checkpoints
from jspec.train.loop import Plan, TrainingProgress, fit, over_held_out

V = 11
PLAN = Plan(steps=12, peak_rate=0.1, weight_decay=0.1, tokens_per_step=64, length=16, evaluate_every=3)
TEXT = np.arange(600) ** 2 % V


class Stop(Exception):
    pass


def loss(params, frozen, windows, key):
    """A bigram model whose table is shaken a little, so that every source of randomness counts."""
    noise = 0.1 * jax.random.normal(key, params["table"].shape)
    log_distribution = jax.nn.log_softmax((params["table"] + noise)[windows[:, :-1]] * frozen)
    return -jnp.take_along_axis(log_distribution, windows[:, 1:, None], axis=-1).mean()


def run(store=None, stop_after: int | None = None) -> tuple[list[TrainingProgress], dict]:
    rows = []

    def report(progress, params):
        rows.append(dataclasses.replace(progress, seconds=0.0))
        if progress.step == stop_after:
            raise Stop

    held_out = over_held_out(loss, TEXT[-100:], (2, 16))
    start, key = {"table": jnp.zeros((V, V))}, jax.random.key(5)
    return rows, fit(PLAN, loss, held_out, start, 1.0, jnp.asarray(TEXT, jnp.int32), key, report, store)


def test_going_on_equals_never_stopping(tmp_path):
    rows, best = run()
    assert [row.step for row in rows] == [3, 6, 9, 12]
    assert rows[-1].train_loss < rows[0].train_loss - 0.3
    with pytest.raises(Stop):
        run(Checkpoints(tmp_path), stop_after=9)  # before its state is kept
    again, same = run(Checkpoints(tmp_path))
    assert again == rows[2:]
    np.testing.assert_array_equal(same["table"], best["table"])


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    _, best = run(Checkpoints(tmp_path))
    rows, same = run(Checkpoints(tmp_path))
    assert rows == []
    np.testing.assert_array_equal(same["table"], best["table"])


def test_the_last_states_are_kept(tmp_path):
    run(Checkpoints(tmp_path))
    assert sorted(int(folder.name) for folder in tmp_path.iterdir()) == [9, 12]
    assert KEPT == 2
    assert Checkpoints(tmp_path).step == 12


def test_no_state_is_no_beginning(tmp_path):
    assert Checkpoints(tmp_path / "new").step is None


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("steps", 0, "steps=0: expected an integer of at least 1"),
        ("length", 0, "length=0: expected an integer of at least 1"),
        ("evaluate_every", 0, "evaluate_every=0: expected an integer of at least 1"),
        ("peak_rate", 0.0, "peak_rate=0.0: expected a positive number"),
        ("weight_decay", -1.0, "weight_decay=-1.0: expected a number of at least 0"),
        ("tokens_per_step", 15, "tokens_per_step=15: expected a window, 16, or more"),
    ],
)
def test_plans_that_cannot_be(field, value, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(PLAN, **{field: value})
