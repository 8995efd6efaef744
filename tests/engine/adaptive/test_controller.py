"""The controller: estimates from past rounds, the best rate, and pauses that grow while drafts do not pay."""

import numpy as np
import pytest

from jspec.config import TreeShape
from jspec.engine.adaptive.controller import FIRST_PAUSE, LONGEST_PAUSE, PRIOR_ACCEPTANCE, Controller
from jspec.engine.adaptive.cost_table import drafts_of

FREE = {0: 1.0, 1: 1.001, 2: 1.002, 4: 1.004}  # drafts cost next to nothing
DEAR = {0: 1.0, 1: 2.1, 2: 3.2, 4: 5.4}  # even perfect drafts lose
ROUNDS, ROWS = 8, 4  # rounds of a call, and rows of the program


def controller_of(seconds) -> Controller:
    return Controller({ROWS: seconds})


def play(controller: Controller, acceptance, calls: int, seed: int = 0, rows: int = 4) -> list[int]:
    """K of each call, if draft i is accepted with probability ``acceptance[i]`` where those before it were."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(calls):
        K = controller.choose(ROWS)
        stands = rng.random((ROUNDS * rows, K)) < np.asarray(acceptance)[:K]
        controller.observe(K, ROUNDS, np.cumprod(stands, axis=1).sum(axis=1).tolist())
        chosen.append(K)
    return chosen


def test_prior_acceptance_without_statistics():
    fresh = controller_of(FREE)
    np.testing.assert_allclose(fresh.acceptance, PRIOR_ACCEPTANCE)
    assert fresh.rates(ROWS)[0] == 1.0
    assert fresh.rates(ROWS)[2] == pytest.approx((1 + 0.7 + 0.49) / 1.002)
    assert fresh.choose(ROWS) == 4
    assert controller_of(DEAR).choose(ROWS) == 0


def test_acceptance_is_estimated_place_by_place():
    truth = [0.9, 0.5, 0.8, 0.3]
    learning = controller_of(FREE)
    play(learning, truth, calls=40, rows=64)
    np.testing.assert_allclose(learning.acceptance, truth, atol=0.04)


def test_a_place_without_drafts_has_the_acceptance_of_the_one_before():
    learning = controller_of({0: 1.0, 2: 1.1, 4: 9.0})
    assert set(play(learning, [0.9, 0.2, 0.0, 0.0], calls=20, rows=64)) == {2}
    np.testing.assert_allclose(learning.acceptance[2:], learning.acceptance[1])


def test_missing_drafts_count_as_rejected():
    """N-gram drafts that miss: what matters is what a round of that K brings."""
    learning = controller_of(FREE)
    for _ in range(100):
        learning.observe(learning.choose(ROWS), ROUNDS, [0] * ROUNDS)
    assert learning.acceptance[0] < 0.06


@pytest.mark.parametrize(
    ("seconds", "acceptance", "best"),
    [
        (FREE, [0.9] * 4, 4),
        ({0: 1.0, 1: 1.03, 2: 1.06, 4: 1.12}, [0.9, 0.9, 0.0, 0.0], 2),
        (DEAR, [0.9] * 4, 0),
        ({0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}, [0.6] * 4, 1),  # 1, 1.23, 1.225 and 1.05 tokens a second
        ({0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}, [0.9] * 4, 4),
        ({0: 1.0, 1: 1.3, 2: 1.6, 4: 2.2}, [0.1] * 4, 0),
    ],
)
def test_most_calls_have_the_best_K(seconds, acceptance, best):
    chosen = play(controller_of(seconds), acceptance, calls=300, rows=64)[20:]
    assert chosen.count(best) > 0.9 * len(chosen)


def test_pauses_double_while_drafts_do_not_pay():
    chosen = play(controller_of({0: 1.0, 4: 1.5}), [0.05] * 4, calls=1000)
    tries = [i for i, K in enumerate(chosen) if K]
    assert tries[0] == 0  # the prior promises more
    pauses = (np.diff(tries) - 1).tolist()
    assert pauses[:5] == [FIRST_PAUSE, 8, 16, 32, LONGEST_PAUSE]
    assert set(pauses[5:]) == {LONGEST_PAUSE}


def test_trying_marks_the_trial_after_a_pause():
    controller = controller_of({0: 1.0, 2: 50.0})
    for _ in range(FIRST_PAUSE + 1):
        assert not controller.trying
        controller.choose(ROWS)
    assert controller.trying
    controller.choose(ROWS)
    assert not controller.trying


def test_drafts_come_back_when_the_text_changes():
    controller = controller_of({0: 1.0, 4: 1.5})
    assert play(controller, [0.0] * 4, calls=200)[-1] == 0
    again = play(controller, [0.9] * 4, calls=LONGEST_PAUSE + 12)
    assert again[-10:] == [4] * 10
    gone = play(controller, [0.0] * 4, calls=40)
    assert gone[0] == 4
    assert [K for K in gone if K] == [4] * sum(K > 0 for K in gone)
    pause = gone.index(0)
    assert gone[pause : pause + FIRST_PAUSE + 1] == [0] * FIRST_PAUSE + [4]  # short pauses again


def test_two_equally_good_K_do_not_alternate():
    chosen = play(controller_of({0: 1.0, 1: 1.25, 2: 1.45, 3: 1.61}), [0.5, 0.4, 0.4], calls=300, rows=4)
    assert np.count_nonzero(np.diff(chosen)) < 30


def test_choice_depends_only_on_earlier_calls():
    """Controllers with one history choose alike, whatever comes next."""
    one, other = controller_of(FREE), controller_of(FREE)
    assert play(one, [0.4] * 4, calls=30) == play(other, [0.4] * 4, calls=30)
    one.observe(one.choose(ROWS), ROUNDS, [4] * ROUNDS)
    other.observe(other.choose(ROWS), ROUNDS, [0] * ROUNDS)
    assert one.rates(ROWS) != other.rates(ROWS)


TREE, SMALL = TreeShape(32, 6, 4), TreeShape(8, 4, 2)
# Milliseconds of a round on an H200, an 8B target with an EAGLE-3 head, of one row and of eight.
OF_ONE_ROW = {0: 4.08, 2: 4.71, 3: 4.90, 4: 5.17, 6: 5.61, TREE: 6.26}
OF_EIGHT = {0: 4.40, 2: 5.16, 3: 5.41, 4: 5.75, 6: 6.49, SMALL: 6.21}
# What places of chains and of trees accept, as the shipped family's EAGLE-3 head at temperatures 0 and 1, and in a text
# of which nearly all, or nothing, is foreseen.
COLD = {None: [0.85, 0.83, 0.82, 0.81, 0.80, 0.78], TREE: [0.90, 0.88, 0.87, 0.86, 0.84, 0.82], SMALL: [0.87] * 4}
WARM = {None: [0.52, 0.50, 0.48, 0.46, 0.42, 0.40], TREE: [0.72, 0.68, 0.66, 0.63, 0.60, 0.50], SMALL: [0.61] * 4}
CERTAIN, HOPELESS = ({kind: [rate] * 6 for kind in (None, TREE, SMALL)} for rate in (0.99, 0.0))


def play_trees(controller: Controller, rows: int, acceptance, calls: int = 400, seed: int = 0) -> list:
    """The shape of each call of four rounds, as ``play``, by the kind of shape."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(calls):
        shape = controller.choose(rows)
        K, kind = drafts_of(shape), shape if isinstance(shape, TreeShape) else None
        stands = rng.random((4 * rows, K)) < np.asarray(acceptance[kind])[:K]
        controller.observe(shape, 4, np.cumprod(stands, axis=1).sum(axis=1).tolist())
        chosen.append(shape)
    return chosen


@pytest.mark.parametrize(
    ("rows", "acceptance", "best", "share"),
    [
        (1, COLD, TREE, 0.6),  # 0.77 tokens a millisecond in place of 0.75, and so chains are tried often
        (1, WARM, TREE, 0.85),
        (1, CERTAIN, 6, 0.85),
        (8, COLD, 6, 0.85),
        (8, WARM, SMALL, 0.85),
    ],
)
def test_trees_where_they_pay_and_chains_where_not(rows, acceptance, best, share):
    chosen = play_trees(Controller({1: OF_ONE_ROW, 8: OF_EIGHT}), rows, acceptance)[20:]
    assert chosen.count(best) > share * len(chosen)


def test_a_tree_that_costs_more_than_it_can_give_is_never_chosen():
    """All of its drafts would have to be accepted, and more."""
    assert TREE not in play_trees(Controller({8: OF_EIGHT | {TREE: 60.0}}), 8, COLD)


def test_the_choice_follows_the_text_and_comes_back():
    controller = Controller({1: OF_ONE_ROW})
    for acceptance, best in [(WARM, TREE), (CERTAIN, 6), (WARM, TREE), (HOPELESS, 0), (CERTAIN, 6), (WARM, TREE)]:
        last = play_trees(controller, 1, acceptance, calls=300)[-100:]
        assert last.count(best) > 50, (best, {shape: last.count(shape) for shape in last})


def test_each_kind_of_shape_is_tried_again():
    """Trees while chains are better, and chains while trees are, after ever so many calls."""
    for rows, acceptance, other in [(1, COLD, 6), (8, COLD, SMALL)]:
        chosen = play_trees(Controller({1: OF_ONE_ROW, 8: OF_EIGHT}), rows, acceptance, calls=1200)
        assert min(chosen[at : at + 300].count(other) for at in range(0, 1200, 300)) > 0


def test_chains_say_nothing_of_trees_but_what_a_tree_may_hope_for():
    learning = Controller({8: OF_EIGHT})
    np.testing.assert_allclose(learning.acceptance_of(SMALL), 1 - 0.3**2)
    for _ in range(200):
        learning.observe(6, 4, [1] * 32)
    np.testing.assert_allclose(learning.acceptance[:2], [1, 0], atol=0.01)
    np.testing.assert_allclose(learning.acceptance_of(SMALL)[:2], [1, 0], atol=0.02)
    for _ in range(200):
        learning.observe(SMALL, 4, [2] * 32)
    np.testing.assert_allclose(learning.acceptance_of(SMALL)[:3], [1, 1, 0], atol=0.01)
    np.testing.assert_allclose(learning.acceptance[:3], [1, 1, 0], atol=0.01)  # nothing is known of chains any more
    assert list(learning.rates(8)) == [0, 2, 3, 4, SMALL, 6]
