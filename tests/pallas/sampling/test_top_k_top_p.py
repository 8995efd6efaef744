"""The cutoff against a float64 oracle that sorts, for its reference implementation and its kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal

from jspec.pallas.sampling.sample import sample, sample_kernel
from jspec.pallas.sampling.top_k_top_p import cutoff_reference, from_ordered, to_ordered

MARGIN = 1e-5


def oracle(logits, scale, top_k, top_p, min_p):
    """Survivors of one row, and how far the decisions were from falling otherwise (in probability)."""
    z, margin = np.asarray(logits, np.float64), np.inf
    surviving = np.ones(z.size, bool)
    probability = np.exp((z - z.max()) * scale)
    if min_p > 0:
        surviving &= probability >= min_p
        margin = np.abs(probability - min_p).min()
    if 0 < top_k < z.size:
        surviving &= z >= np.sort(z)[-top_k]
    if top_p < 1:
        values = np.unique(z[surviving])[::-1]
        mass = np.cumsum([probability[z == value].sum() for value in values]) / probability[surviving].sum()
        last = min(np.searchsorted(mass, top_p), values.size - 1)
        margin = min(margin, np.abs(mass - top_p).min())
        surviving &= z >= values[last]
    return surviving, margin


def problem(V, dtype, seed=0):
    """Each filter alone, every pair, all three, none, and settings that keep everything or one token."""
    settings = [
        *[(0, 1, 0), (5, 1, 0), (0, 0.9, 0), (0, 1, 0.05), (20, 0.7, 0), (20, 1, 0.1), (0, 0.5, 0.02)],
        *[(50, 0.95, 0.01), (1, 1, 0), (V, 0.99, 0), (0, 1e-6, 0), (0, 1, 1), (2 * V, 1, 0), (0, 0.999999, 0)],
    ]
    top_k, *others = (np.array(x) for x in zip(*settings, strict=True))
    rng = np.random.default_rng(seed)
    logits, scale = normal(rng, (len(settings), V), dtype, scale=4, mean=3), rng.uniform(0.5, 3.0, len(settings))
    return logits, jnp.float32(scale), jnp.int32(top_k), *map(jnp.float32, others)


def assert_agrees(actual, args):
    actual, close = np.asarray(actual), 0
    assert actual.dtype == np.float32
    for row, (z, *settings) in enumerate(zip(*(np.asarray(x.astype(jnp.float32)) for x in args), strict=True)):
        settings[1] = int(settings[1])
        surviving, margin = oracle(z, *settings)
        if margin < MARGIN:
            close += 1
        else:
            np.testing.assert_array_equal(z >= actual[row], surviving, err_msg=f"row {row}, {settings}")
    assert close <= 2


def cutoff_kernel(logits, scale, top_k, top_p, min_p, **how):
    """The cutoffs that the kernel of ``sample`` finds."""
    return sample_kernel(logits[:, None], 1 / scale, top_k, top_p, min_p, **how)[1].cutoff[:, 0]


class TestCutoff:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.cutoff = implementation(cutoff_reference, cutoff_kernel)

    @pytest.mark.parametrize(
        ("V", "dtype"),
        [
            *[(1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (127, "float32")],
            *[(257, "bfloat16"), (1000, "float32"), (1031, "bfloat16"), (1031, "float32")],
        ],
    )
    def test_agrees_with_the_oracle(self, V, dtype):
        args = problem(V, dtype)
        assert_agrees(self.cutoff(*args), args)

    def test_rows_that_cut_nothing_get_minus_infinity(self):
        actual = self.cutoff(*problem(257, "bfloat16"))
        assert np.isneginf(np.asarray(actual)[[0, 12]]).all()
        assert np.isfinite(np.asarray(actual)[[1, 2, 3]]).all()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_ties_at_the_cutoff_all_survive(self, dtype):
        z = jnp.array([[3.0, 1.0, 2.0, 2.0, 2.0, -1.0, 0.0] + [-5.0] * 300] * 3, dtype)
        args = (z, jnp.ones(3), jnp.array([2, 0, 4], jnp.int32), jnp.array([1.0, 0.6, 0.55]), jnp.zeros(3))
        assert self.cutoff(*args).tolist() == [2.0, 2.0, 2.0]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_negative_logits_and_zeros_of_both_signs_are_ordered(self, dtype):
        z = jnp.array([[-8.0, -3.5, -0.0, 0.0, -1e-3, -2.0], [-8.0, -3.5, -4.0, -5.0, -7.5, -2.0]], dtype)
        actual = self.cutoff(z, jnp.ones(2), jnp.array([3, 4], jnp.int32), jnp.ones(2), jnp.zeros(2))
        assert actual.tolist() == [z[0, 4].astype(jnp.float32).item(), -5.0]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("stride", [128, 4096])
    def test_the_largest_logits_may_sit_at_any_stride(self, stride, dtype):
        V, large = 10 * stride + 3, stride * jnp.arange(10)
        z = jax.random.normal(jax.random.key(2), (4, V)).at[:, large].set(10 + jnp.arange(10.0)[None, :] / 4)
        settings = jnp.array([7, 9, 0, 8], jnp.int32), jnp.array([1, 1, 0.95, 0.9]), jnp.array([0, 0, 0, 0.01])
        args = (z.astype(dtype), jnp.array([1.0, 2.0, 0.7, 1.0]), *settings)
        assert_agrees(self.cutoff(*args), args)

    def test_minus_infinity_never_counts_as_mass(self):
        logits, *rest = problem(257, "float32")
        logits = jnp.where(jnp.arange(257)[None, :] % 3 == 1, -jnp.inf, logits)
        assert_agrees(self.cutoff(logits, *rest), (logits, *rest))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_bad_number_stays_in_its_row(self, bad):
        args = problem(257, "bfloat16")
        clean = np.asarray(self.cutoff(*args))
        actual = np.asarray(self.cutoff(args[0].at[4, 100].set(bad).at[7].set(bad), *args[1:]))
        others = np.setdiff1d(np.arange(clean.size), [4, 7])
        np.testing.assert_array_equal(actual[others], clean[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ordered_bits_keep_the_order_and_come_back(dtype):
    x = jnp.array([-jnp.inf, -1e30, -2.5, -1e-30, -0.0, 0.0, 1e-30, 1.0, 1.5, 3e38, jnp.inf], dtype)
    ordered = to_ordered(x)
    assert (np.diff(np.asarray(ordered).astype(np.int64)) > 0).all()
    np.testing.assert_array_equal(from_ordered(ordered, x.dtype), x.astype(jnp.float32))


def test_rows_that_cut_nothing_cost_nothing_on_a_cpu():
    logits, scale, *filters = problem(127, "float32")
    idle = (jnp.zeros(len(logits), jnp.int32), jnp.ones(len(logits)), jnp.zeros(len(logits)))
    cutoffs = jax.jit(lambda *args: sample(*args)[1].cutoff[:, 0])
    with jax.default_device(jax.devices("cpu")[0]):
        assert np.isneginf(cutoffs(jnp.full_like(logits, jnp.nan)[:, None], scale, *idle)).all()
        actual = cutoffs(logits[:, None], 1 / scale, *filters)
        np.testing.assert_array_equal(actual, jax.jit(cutoff_reference)(logits, scale, *filters))
