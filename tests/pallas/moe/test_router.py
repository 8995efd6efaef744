"""Routing, against the same in NumPy, for kernels and reference implementations."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from expert_layers import one_after_another

from jspec.config import Experts
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.moe import router_logits as logits_module
from jspec.pallas.moe.router import choose_kernel, group_kernel
from jspec.pallas.moe.router_logits import in_pairs, router_logits, router_logits_kernel
from jspec.pallas.moe.router_reference import choose_reference, group_reference, route_reference
from jspec.pallas.moe.router_small_batch import MOST_TOKENS, route_small_batch_kernel

SHAPES = [(1, 8, 2), (5, 16, 4), (16, 128, 8), (40, 6, 3), (3, 5, 5)]  # tokens, experts, choices
FEW = [(1, 8, 2), (3, 5, 5), (4, 6, 3), (2, 300, 8), (MOST_TOKENS, 128, 8)]  # the fourth in rounds
WAYS = {
    "softmax": {},
    "among all": {"renormalise": False},
    "sigmoid": {"scores": "sigmoid", "scale": 2.5},
    "sigmoids as they are": {"scores": "sigmoid", "renormalise": False},
    "shared": {"scores": "sigmoid", "shared": 1},
    "two shared": {"shared": 2, "scale": 1.5},
}
GROUPED = [
    (5, 16, 4, 4, 2),
    (20, 12, 3, 2, 1),
    (3, 256, 8, 8, 4),
    (17, 6, 2, 3, 3),
]  # and groups, and how many are chosen


def halves_of(seed: int, shape: tuple[int, ...]):
    return jnp.asarray(np.round(2 * np.random.default_rng(seed).normal(size=shape)) / 2, jnp.float32)


def logits_of(M: int, X: int):
    """Router logits among which many are equal."""
    return halves_of(M, (M, X))


def bias_of(X: int):
    return halves_of(X, (X,))


def wanted_of(logits, bias, routing: Experts):
    """Experts and weights of each token in float64; equal ones go by their numbers."""
    logits = np.asarray(logits, np.float64)
    added = np.zeros(logits.shape[1]) if bias is None else np.asarray(bias, np.float64)
    sigmoid = routing.scores == "sigmoid"
    choice = 1 / (1 + np.exp(-logits)) + added if sigmoid else logits + added
    experts, weights = [], []
    for row, scores in enumerate(choice):
        groups = scores.reshape(routing.groups, -1)
        sums = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        allowed = np.full(groups.shape, -np.inf)
        for group in np.argsort(-sums, kind="stable")[: routing.chosen_groups]:
            allowed[group] = groups[group]
        expert = np.argsort(-allowed.reshape(-1), kind="stable")[: routing.chosen]
        every = (
            1 / (1 + np.exp(-logits[row]))
            if sigmoid
            else np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        )
        weight = every[expert] / (every[expert].sum() if routing.renormalise else 1) * routing.scale
        experts.append([*expert, *range(len(scores), len(scores) + routing.shared)])
        weights.append([*weight, *[1] * routing.shared])
    return np.asarray(experts), np.asarray(weights)


class TestChoose:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.choose = lambda routing: implementation(
            *(functools.partial(f, routing=routing) for f in (choose_reference, choose_kernel))
        )

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(("M", "X", "Y"), SHAPES)
    def test_takes_the_likeliest_and_of_equals_the_first(self, M, X, Y, way):
        routing, logits = Experts(X, Y, 1, **WAYS[way]), logits_of(M, X)
        expert, weight = self.choose(routing)(logits, None)
        wanted, own = wanted_of(logits, None, routing)
        np.testing.assert_array_equal(expert, wanted)
        np.testing.assert_allclose(weight, own, rtol=1e-5)

    @pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
    @pytest.mark.parametrize(("M", "X", "Y", "groups", "chosen"), GROUPED)
    def test_takes_none_outside_the_best_groups(self, M, X, Y, groups, chosen, scores):
        routing = Experts(X, Y, 1, scores=scores, groups=groups, chosen_groups=chosen)
        logits, bias = logits_of(M, X), bias_of(X)
        expert, weight = self.choose(routing)(logits, bias)
        wanted, own = wanted_of(logits, bias, routing)
        np.testing.assert_array_equal(expert, wanted)
        np.testing.assert_allclose(weight, own, rtol=1e-5)

    def test_weights_are_nan_only_if_the_sum_of_sigmoids_is(self):
        logits = jnp.full((2, 6), -200.0).at[1].set(0)
        expert, weight = self.choose(Experts(6, 2, 1, scores="sigmoid"))(logits, None)
        np.testing.assert_array_equal(expert, [[0, 1], [0, 1]])
        np.testing.assert_array_equal(weight, [[0, 0], [0.5, 0.5]])

    @pytest.mark.parametrize("way", [{}, {"scores": "sigmoid"}, {"scores": "sigmoid", "groups": 2}])
    def test_a_router_that_is_not_finite_chooses_experts_that_exist(self, way):
        logits = logits_of(3, 6).at[1].set(jnp.nan)
        expert, weight = self.choose(Experts(6, 2, 1, **way))(logits, None)
        assert ((expert >= 0) & (expert < 6)).all()
        assert jnp.isnan(weight[1]).all()
        assert jnp.isfinite(weight[jnp.array([0, 2])]).all()


class TestGroup:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation, monkeypatch):
        monkeypatch.setattr("jspec.pallas.moe.router._BLOCK", 32)  # so that the assignments of a test span several
        self.group = lambda X: implementation(
            *(functools.partial(f, num_experts=X) for f in (group_reference, group_kernel))
        )

    @pytest.mark.parametrize(("M", "X", "Y"), SHAPES)
    def test_assignments_lie_by_expert_in_their_order(self, M, X, Y):
        expert = wanted_of(logits_of(M, X), None, Experts(X, Y, 1))[0].astype(np.int32)
        count, order = self.group(X)(jnp.asarray(expert))
        np.testing.assert_array_equal(count, np.bincount(expert.reshape(-1), minlength=X))
        np.testing.assert_array_equal(order, np.argsort(expert.reshape(-1), kind="stable"))


class TestRouteSmallBatch:
    """Routing in one launch gives what the reference implementation gives."""

    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.route = lambda routing: implementation(
            *(functools.partial(f, routing=routing) for f in (route_reference, route_small_batch_kernel))
        )

    @pytest.mark.parametrize(
        ("way", "biased"), [*((way, True) for way in WAYS), ("softmax", False), ("sigmoid", False)]
    )
    @pytest.mark.parametrize(("M", "X", "Y"), FEW)
    def test_agrees_with_numpy(self, M, X, Y, way, biased):
        routing, logits, bias = Experts(X, Y, 1, **WAYS[way]), logits_of(M, X), bias_of(X) if biased else None
        routed = self.route(routing)(logits, bias)
        wanted, own = wanted_of(logits, bias, routing)
        np.testing.assert_array_equal(routed.expert, wanted)
        np.testing.assert_allclose(routed.weight, own, rtol=1e-5)
        np.testing.assert_array_equal(routed.sizes, np.bincount(wanted.reshape(-1), minlength=X + routing.shared))
        np.testing.assert_array_equal(routed.order, np.argsort(wanted.reshape(-1), kind="stable"))

    def test_a_router_that_is_not_finite_chooses_experts_that_exist(self):
        logits = logits_of(3, 6).at[1].set(jnp.nan)
        routed = self.route(Experts(6, 2, 1))(logits, None)
        assert ((routed.expert >= 0) & (routed.expert < 6)).all()
        assert jnp.isnan(routed.weight[1]).all()
        assert jnp.isfinite(routed.weight[jnp.array([0, 2])]).all()
        assert sorted(np.asarray(routed.order).tolist()) == list(range(6))
        assert routed.sizes.sum() == 6


@pytest.mark.parametrize("way", WAYS)
def test_a_token_has_the_same_bits_alone_and_among_many(way):
    """One token has all of its experts compared at once, many have them chosen in rounds."""
    routing, logits = Experts(12, 5, 1, **WAYS[way]), logits_of(6, 12).at[2].set(-0.0).at[3].multiply(1.7)
    expert, weight = choose_kernel(logits, bias_of(12), routing, interpret=True)
    for token in range(6):
        routed = route_small_batch_kernel(logits[token][None], bias_of(12), routing, interpret=True)
        np.testing.assert_array_equal(routed.expert[0], expert[token])
        np.testing.assert_array_equal(routed.weight[0], weight[token])


TILINGS = None, MatmulTiling(16, 16, 64, 2, 4), MatmulTiling(64, 32, 64, 4, 3)


class TestRouterLogits:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def kernel(tiling, x, weight, *, interpret=False):
            return in_pairs(list(router_logits_kernel(x, weight, tiling=tiling, interpret=interpret)))

        self.logits = lambda tiling: implementation(router_logits, functools.partial(kernel, tiling))

    @pytest.mark.parametrize("tiling", TILINGS, ids=str)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize(("M", "X", "D"), [(1, 1, 64), (3, 128, 300), (40, 6, 512)])
    def test_agrees_with_float64(self, M, X, D, dtype, tiling):
        x, weight = (jnp.asarray(np.random.default_rng(D).normal(size=(n, D)), dtype) for n in (M, X))
        actual = self.logits(tiling)(x, weight)
        assert actual.dtype == jnp.float32
        wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-4)


def test_logits_have_one_order_in_every_tile(monkeypatch):
    """However instances divide them: inputs are dealt to the same sums, of which tensor cores add one after the other."""
    monkeypatch.setattr(logits_module, "dot", one_after_another)
    x, weight = (jnp.asarray(np.random.default_rng(n).normal(size=(n, 600)) ** 3, jnp.bfloat16) for n in (5, 16))
    first, *others = (
        in_pairs(list(router_logits_kernel.__wrapped__(x, weight, tiling=tiling, interpret=True))) for tiling in TILINGS
    )
    for other in others:
        np.testing.assert_array_equal(first, other)
