"""The convolution of a prefill pass: each segment behind the inputs before it, and the columns that it leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of
from delta_nets import float64_convolution
from normals import normal

from jspec.pallas.delta_net.convolution import convolve_prefill, convolve_prefill_kernel, convolve_prefill_reference
from jspec.pallas.delta_net.state import PrefillRows

BS, W, CC, MORE, T = 6, 4, 300, 310, 64  # no number of channels that fills blocks


def rows_of(entries) -> PrefillRows:
    row, tokens, fresh, follows = zip(*entries, strict=True)
    return PrefillRows(jnp.int32(row), jnp.int32(tokens), jnp.array(fresh), jnp.array(follows))


def numbers(B: int, T: int, dtype, seed: int = 0):
    """Columns, and inputs of a pass with others behind the Cc channels; weights."""
    rng, shapes = np.random.default_rng(seed), ((BS, W + 4, CC), (B, T, MORE), (W, CC))
    columns, x, weight = (normal(rng, shape, dtype) for shape in shapes)
    return columns, x.at[:, :, CC:].set(jnp.nan), weight


class TestConvolvePrefill:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.convolve = implementation(convolve_prefill_reference, convolve_prefill_kernel)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_agrees_with_float64(self, dtype):
        """A chain from the columns whose last segment is shorter than W - 1, one from zero, a short segment alone, an entry
        past the end and one without tokens, which names the row that another one writes."""
        entries = [(4, T, False, False), (4, T, False, True), (4, 2, False, True), (0, T, True, False)]
        entries += [(0, 33, False, True), (2, 1, False, False), (BS, T, False, False), (4, 0, True, False)]
        columns, x, weight = numbers(len(entries), T, dtype)
        y, new = self.convolve(columns.at[0].set(jnp.nan), rows_of(entries), x, weight)  # what a fresh row forgets
        old, x, new = (np.asarray(a, np.float64) for a in (columns, x[:, :, :CC], new))
        wanted = old.copy()
        close = {"rtol": 2**-7, "atol": 2**-7} if dtype == "bfloat16" else {"rtol": 2e-5, "atol": 2e-6}
        for row, chain, start in (
            (4, (0, 1, 2), old[4, : W - 1]),
            (0, (3, 4), np.zeros((W - 1, CC))),
            (2, (5,), old[2]),
        ):
            text = np.concatenate([start[: W - 1], *(x[b, : entries[b][1]] for b in chain)])
            convolved = np.concatenate([np.asarray(y[b, : entries[b][1]], np.float64) for b in chain])
            np.testing.assert_allclose(convolved, float64_convolution(text[: W - 1], text[W - 1 :], weight), **close)
            wanted[row, : W - 1] = text[1 - W :]
        np.testing.assert_array_equal(new[0, W - 1 :], np.nan)
        wanted[0, W - 1 :] = np.nan
        np.testing.assert_array_equal(new, wanted)

    @pytest.mark.parametrize("T", [1, 18])
    def test_segments_of_any_size(self, T):
        columns, x, weight = numbers(2, T, "float32")
        y, new = self.convolve(columns, rows_of([(1, T, False, False), (3, T, True, False)]), x, weight)
        for b, before in enumerate((columns[1, : W - 1], jnp.zeros((W - 1, CC)))):
            wanted = float64_convolution(before, x[b, :, :CC], weight)
            np.testing.assert_allclose(y[b], wanted, rtol=2e-5, atol=2e-6)
            kept = np.concatenate([before, x[b, :, :CC]])[1 - W :]
            np.testing.assert_array_equal(new[(1, 3)[b], : W - 1], kept)


@pytest.mark.parametrize(("T", "channels", "dtype"), [(64, 8192, "bfloat16"), (70, CC, "float32")])
def test_lowers_for_cuda(T, channels, dtype):
    array = jax.ShapeDtypeStruct
    rows = PrefillRows(*[array((2,), jnp.int32)] * 2, *[array((2,), jnp.bool_)] * 2)  # pyright: ignore
    args = array((3, 8, channels), dtype), rows, array((2, T, channels + 64), dtype), array((W, channels), dtype)
    assert kernels_of(for_cuda(convolve_prefill, args)) == ["convolve_segments"]
    assert not kernels_of(jax.jit(convolve_prefill).lower(*args).as_text())
