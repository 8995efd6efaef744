"""Prefill of a gated delta net: right numbers, and the same bits however a prompt is cut at multiples of 64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of
from delta_nets import HEADS, W, random_texts, wanted_of
from tiers import in_tiers

from jspec.pallas.delta_net.chunked import CHUNK
from jspec.pallas.delta_net.convolution import convolve_prefill, convolve_verify_reference
from jspec.pallas.delta_net.prefill import PrefillTiling, prefill, prefill_kernel, prefill_reference
from jspec.pallas.delta_net.projections import DeltaHeads
from jspec.pallas.delta_net.state import PrefillRows, VerifyRows, init_state
from jspec.pallas.delta_net.verify import verify_reference

R, N = 2, 4 * CHUNK + 21
SMALL = PrefillTiling(
    values=16, keys=16, prepare_keys=16, prepare_warps=4, num_warps=4, num_stages=2
)  # two tiles, two instances for each head
ALONE = jnp.zeros(R, bool)  # no segment follows another
convolve = jax.jit(convolve_prefill)


def used_state(dtype="float32"):
    state = init_state(R + 1, HEADS, W, 5, dtype)
    return jax.tree.map(lambda x: jnp.full_like(x, 7), state)


class TestPrefill:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.prefill = implementation(prefill_reference, functools.partial(prefill_kernel, tiling=SMALL))

    def segment(self, state, rows: PrefillRows, x, g, beta, weight):
        qkv, columns = convolve(state.columns, rows, x, weight)
        return self.prefill(dataclasses.replace(state, columns=columns), rows, qkv, g, beta)

    def read(self, texts, cuts, room: int = 0):
        """Outputs ``[R, N, Nv, Dv]`` and the state, of texts that are read in segments which end at the cuts.

        Args:
          room: tokens of a segment's arrays, which are filled up with others; 0 for as many as there are.
        """
        state, outputs = used_state(texts.x.dtype), []
        for start, end in zip((0, *cuts), (*cuts, texts.x.shape[1]), strict=True):
            more = ((0, 0), (0, max(room - (end - start), 0)), (0, 0))
            padded = (jnp.pad(x[:, start:end], more, constant_values=3) for x in texts[:3])
            rows = PrefillRows(jnp.int32([2, 0]), jnp.full(R, end - start, jnp.int32), jnp.full(R, start == 0), ALONE)
            o, state = self.segment(state, rows, *padded, texts.weight)
            assert not np.asarray(o)[:, end - start :].any()
            outputs.append(np.asarray(o, np.float32)[:, : end - start])
        return np.concatenate(outputs, axis=1), state

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_agrees_with_float64(self, dtype):
        texts = random_texts(R, N, seed=3, dtype=dtype)
        outputs, state = self.read(texts, ())
        for r, row in enumerate((2, 0)):
            wanted, states = wanted_of(r, texts)
            close = {"rtol": 2**-6, "atol": 2**-6} if dtype == "bfloat16" else {"rtol": 2e-5, "atol": 5e-6}
            np.testing.assert_allclose(outputs[r], wanted, **close)
            np.testing.assert_allclose(state.S[row], states[-1], **close)
            np.testing.assert_array_equal(state.columns[row, : W - 1], texts.x[r, 1 - W :])

    @pytest.mark.parametrize(
        "cuts", in_tiers([(64,), (128,), (64, 128, 192, 256), (192, 256)], test=[(192, 256)]), ids=str
    )
    def test_bits_do_not_depend_on_the_cuts(self, cuts):
        self.assert_same_bits(random_texts(R, N, seed=4), cuts)

    def assert_same_bits(self, texts, cuts):
        """As of the texts in one segment."""
        outputs, state = self.read(texts, ())
        for room in (N, 0):
            others, other = self.read(texts, cuts, room)
            np.testing.assert_array_equal(others, outputs)
            for x, y in zip(jax.tree.leaves(other), jax.tree.leaves(state), strict=True):
                np.testing.assert_array_equal(x, y)

    def test_a_cut_within_a_chunk_is_detected(self):
        with pytest.raises(AssertionError, match="not equal"):
            self.assert_same_bits(random_texts(R, N, seed=4), (CHUNK + 1,))

    def test_keys_that_are_nearly_equal(self):
        """Which make the equations of a chunk ill-conditioned."""
        texts = random_texts(R, N, seed=5)
        same = jnp.concatenate(
            [texts.x[:, :1, :128].repeat(N, 1) + 1e-3 * texts.x[:, :, :128], texts.x[:, :, 128:]], axis=2
        )
        texts = texts._replace(x=same, g=texts.g * 1e-3, beta=jnp.full_like(texts.beta, 0.999))
        outputs, state = self.read(texts, ())
        wanted, states = wanted_of(0, texts)
        np.testing.assert_allclose(outputs[0], wanted, atol=1e-4 * np.abs(wanted).max())
        np.testing.assert_allclose(state.S[2], states[-1], atol=1e-4 * np.abs(states).max())

    def test_a_row_that_is_not_in_the_pass_stays_as_it_is(self):
        texts, state = random_texts(R, CHUNK, seed=6), used_state()
        rows = PrefillRows(jnp.int32([R + 1, 1]), jnp.int32([CHUNK, 0]), jnp.array([True, True]), ALONE)
        o, new = self.segment(state, rows, *texts)
        for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(x, y)
        assert not np.asarray(o)[1].any()

    def test_decoding_goes_on_where_prefill_ends(self):
        texts = random_texts(R, CHUNK + 10, seed=7)
        prompts = texts._replace(**{name: getattr(texts, name)[:, : CHUNK + 5] for name in ("x", "g", "beta")})
        _, state = self.read(prompts, (), N)
        rows = VerifyRows(jnp.int32([2, 0]), jnp.int32([5, 5]), *[jnp.zeros(2, jnp.int32)] * 2, jnp.zeros(2, bool))
        qkv, columns = convolve_verify_reference(state.columns, rows, texts.x[:, -5:], texts.weight)
        state = dataclasses.replace(state, columns=columns)
        o, _ = verify_reference(state, rows, qkv, texts.g[:, -5:], texts.beta[:, -5:])
        for r in range(R):
            wanted, _ = wanted_of(r, texts)
            np.testing.assert_allclose(o[r], wanted[-5:], rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("T", "size", "kernels"), [(1000, 128, ["prepare_chunks", "invert_chunks", "run_chunks"]), (70, 24, [])]
)
def test_lowers_for_cuda(T, size, kernels, dtype):
    heads, array = DeltaHeads(2, 6, size, size), jax.ShapeDtypeStruct
    state = jax.eval_shape(lambda: init_state(3, heads, W, 5, dtype))
    rows = PrefillRows(*[array((2,), jnp.int32)] * 2, *[array((2,), jnp.bool_)] * 2)  # pyright: ignore
    numbers = array((2, T, heads.values), jnp.float32)
    args = state, rows, array((2, T, heads.channels), dtype), numbers, numbers
    assert kernels_of(for_cuda(prefill, args)) == kernels
    assert not kernels_of(jax.jit(prefill).lower(*args).as_text())
