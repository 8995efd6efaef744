"""Verify passes of a gated delta net: right numbers, and the bits of plain decoding whatever is drafted and rejected, for
reference implementation and kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of
from delta_nets import HEADS, Decoder, W, assert_same_bits, random_passes, random_texts, wanted_of

from jspec.pallas.delta_net.convolution import convolve_verify, convolve_verify_kernel, convolve_verify_reference
from jspec.pallas.delta_net.projections import DeltaHeads
from jspec.pallas.delta_net.recur import DeltaInputs, recur
from jspec.pallas.delta_net.state import VerifyRows, init_state
from jspec.pallas.delta_net.verify import VerifyTiling, verify, verify_kernel, verify_reference

SMALL = VerifyTiling(values=16, keys=16, num_warps=1)  # two tiles, and two program instances for each head
R, N = 3, 12


def decoder_of(implementation) -> Decoder:
    convolve = implementation(convolve_verify_reference, convolve_verify_kernel)
    return Decoder(convolve, implementation(verify_reference, functools.partial(verify_kernel, tiling=SMALL)))


def rows_of(row, tokens, accepted=0, half=0, fresh=False) -> VerifyRows:
    """Rows of a pass, int32 where a number stands for all of them."""
    numbers = (
        jnp.broadcast_to(jnp.int32(x), (len(row),)) for x in (jnp.asarray(row), jnp.asarray(tokens), accepted, half)
    )
    return VerifyRows(*numbers, jnp.broadcast_to(jnp.asarray(fresh), (len(row),)))


class TestVerify:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.decoder = decoder_of(implementation)

    def used(self, seed: int = 0):
        """A state in use, of three rows, and 2 query tokens for two rows of a pass."""
        rng = np.random.default_rng(seed)
        state = init_state(3, HEADS, W, 5, jnp.float32)
        state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
        state = dataclasses.replace(state, g=-jnp.abs(state.g))
        texts = random_texts(2, 2, seed)
        return state, (texts.x, texts.g, texts.beta)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_agrees_with_float64(self, dtype):
        texts = random_texts(R, N, seed=1, dtype=dtype)
        outputs, states = self.decoder.run(texts, random_passes(R, N, seed=2))
        for r in range(R):
            wanted, wanted_states = wanted_of(r, texts)
            # What is stored in bfloat16 is rounded, by 2^-9 of itself, and a convolved number by more where others were.
            close = {"rtol": 2**-6, "atol": 2**-6} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 2e-6}
            np.testing.assert_allclose(outputs[r], wanted, **close)
            np.testing.assert_allclose(states[r], wanted_states[-1], **close)

    @pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 8))])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_bits_are_those_of_plain_decoding(self, dtype, seed):
        texts = random_texts(R, N, seed, dtype=dtype)
        assert_same_bits(self.decoder, self.decoder, texts, random_passes(R, N, seed))

    def test_passes_that_append_leave_what_one_verify_pass_leaves(self):
        """Of two rows, with two tokens first and then one at a time, the second row one less: outputs, triples and columns
        have the same bits, and S and the other row stay as they are."""
        state, _ = self.used()
        texts, count = random_texts(2, 4, seed=3), jnp.int32([4, 3])
        at = rows_of([2, 0], 2, accepted=[1, 3], half=[0, 1])
        o, wanted = layer(self.decoder, state, dataclasses.replace(at, tokens=count), texts)
        first, new = layer(self.decoder, state, at, cut(texts, 0, 2))
        outputs = [first]
        for i, tokens in ((2, [1, 1]), (3, [1, 0])):
            pending = {"accepted": jnp.full(2, i, jnp.int32), "half": 1 - at.half, "fresh": jnp.zeros(2, bool)}
            rows = VerifyRows(at.row, jnp.int32(tokens), **pending, append=True)
            one, after = layer(self.decoder, new, rows, cut(texts, i, i + 1))
            np.testing.assert_array_equal(after.S, new.S)
            outputs.append(one)
            new = after
        np.testing.assert_array_equal(np.concatenate(outputs, axis=1), o)
        np.testing.assert_array_equal(new.S, wanted.S)
        for b, row in enumerate([2, 0]):
            n, half = count[b], 1 - at.half[b]
            np.testing.assert_array_equal(new.columns[row, : W - 1 + n], wanted.columns[row, : W - 1 + n])
            for name in ("k", "u", "g"):
                of_row, wanted_row = (np.asarray(getattr(x, name))[half, row, :n] for x in (new, wanted))
                np.testing.assert_array_equal(of_row, wanted_row, err_msg=name)
        for before, after in zip(jax.tree.leaves(state.of_row(1)), jax.tree.leaves(new.of_row(1)), strict=True):
            np.testing.assert_array_equal(before, after)

    def test_a_row_that_is_not_in_the_pass_stays_as_it_is(self):
        """Past the end, or without a valid token, or not named; in both halves."""
        state, queries = self.used()
        o, new = self.decoder.verify(state, rows_of([3, 1], [2, 0], accepted=1), *queries)
        assert not np.asarray(o).any()
        for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(before, after)
        columns = self.decoder.convolve(state.columns, rows_of([3, 1], [2, 0], accepted=1), queries[0], weight())[1]
        np.testing.assert_array_equal(columns, state.columns)

    def test_a_row_writes_only_what_it_has(self):
        state, queries = self.used()
        o, new = self.decoder.verify(state, rows_of([2, 0], [1, 2], accepted=[1, 2], half=[0, 1]), *queries)
        assert not np.asarray(o)[0, 1].any()
        np.testing.assert_array_equal(new.S[1], state.S[1])
        for name in ("k", "u", "g"):
            before, after = (np.asarray(getattr(x, name)) for x in (state, new))
            np.testing.assert_array_equal(after[:, 1], before[:, 1], err_msg=name)
            np.testing.assert_array_equal(after[0, 2], before[0, 2], err_msg=name)
            np.testing.assert_array_equal(after[1, 0], before[1, 0], err_msg=name)
            assert (after[1, 2, 0] != before[1, 2, 0]).all()
            assert (after[0, 0, :2] != before[0, 0, :2]).all()

    def test_a_fresh_row_forgets_everything(self):
        state, queries = self.used()
        empty = jax.tree.map(jnp.zeros_like, state)
        broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state)
        rows = rows_of([2, 0], 2, accepted=3, fresh=True)
        for x, y in zip((broken, empty), (rows, rows), strict=True):
            qkv, columns = self.decoder.convolve(x.columns, y, queries[0], weight())
            o, new = self.decoder.verify(x, y, qkv, *queries[1:])
            assert np.isfinite(np.asarray(o)).all()
            assert not np.asarray(new.S)[np.array([0, 2])].any()
            assert np.isfinite(np.asarray(columns)[np.array([0, 2]), : W + 1]).all()
        wanted, _ = self.decoder.verify(empty, rows_of([2, 0], 2), qkv, *queries[1:])
        np.testing.assert_array_equal(o, wanted)

    @pytest.mark.parametrize("number", [np.nan, np.inf])
    def test_a_row_that_is_not_finite_leaves_the_others_alone(self, number):
        state, (x, g, beta) = self.used()
        rows = rows_of([2, 0], 2, accepted=1)
        clean, _ = self.decoder.verify(state, rows, x, g, beta)
        o, _ = self.decoder.verify(state, rows, x.at[0, 0, -1].set(number), g, beta)
        assert not np.isfinite(np.asarray(o)[0, :, -1, -1]).any()
        np.testing.assert_array_equal(o[1], clean[1])
        o, _ = self.decoder.verify(dataclasses.replace(state, S=state.S.at[0, 1, 3, 5].set(number)), rows, x, g, beta)
        assert not np.isfinite(np.asarray(o)[1, :, 1, 5]).any()
        np.testing.assert_array_equal(o[0], clean[0])


def layer(decoder: Decoder, state, rows, texts):
    qkv, columns = decoder.convolve(state.columns, rows, texts.x, texts.weight)
    return decoder.verify(state.with_columns(columns), rows, qkv, texts.g, texts.beta)


def cut(texts, start: int, end: int):
    return texts._replace(**{name: getattr(texts, name)[:, start:end] for name in ("x", "g", "beta")})


def weight():
    return random_texts(1, 1, 0).weight


def shift(state, rows, by):
    return state, dataclasses.replace(rows, accepted=jnp.clip(rows.accepted + by, 0, 5))


def with_the_refused_one(state, rows):
    """In place of the last accepted token, the one behind it is folded in."""
    last = jnp.maximum(rows.accepted - 1, 0)
    at = lambda slot: (rows.half, rows.row, slot)  # noqa: E731
    moved = {
        name: x.at[at(last)].set(x[at((last + 1) % 5)]) for name, x in vars(state).items() if name in ("k", "u", "g")
    }
    return dataclasses.replace(state, **moved), rows


FAULTS = {
    "one token too many": lambda state, rows: shift(state, rows, 1),
    "one token too few": lambda state, rows: shift(state, rows, -1),
    "the rejected token": with_the_refused_one,
    "the count of another row": lambda state, rows: (
        state,
        dataclasses.replace(rows, accepted=jnp.roll(rows.accepted, 1)),
    ),
    "the pass before the last": lambda state, rows: (state, dataclasses.replace(rows, half=jnp.zeros_like(rows.half))),
    "no reset": lambda state, rows: (state, dataclasses.replace(rows, fresh=jnp.zeros_like(rows.fresh))),
    "a state in bfloat16": lambda state, rows: (
        dataclasses.replace(state, S=state.S.astype(jnp.bfloat16).astype(jnp.float32)),
        rows,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_fold_is_detected(fault):
    plain, texts, passes = (
        decoder_of(lambda reference, kernel: jax.jit(reference)),
        random_texts(R, N, 0),
        random_passes(R, N, 0),
    )
    assert_same_bits(plain, plain, texts, passes)
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_bits(dataclasses.replace(plain, tamper=FAULTS[fault]), plain, texts, passes)


def shapes_of(B, T, heads, dtype="bfloat16", most_tokens=16):
    array = jax.ShapeDtypeStruct
    state = jax.eval_shape(lambda: init_state(64, heads, W, most_tokens, dtype))
    rows = VerifyRows(*[array((B,), jnp.int32)] * 4, array((B,), jnp.bool_))  # pyright: ignore
    numbers = array((B, T, heads.values), jnp.float32)
    return state, rows, array((B, T, heads.channels), dtype), array((W, heads.channels), dtype), numbers


def pass_of_layer(state, rows, x, weight, g):
    qkv, columns = convolve_verify(state.columns, rows, x, weight)
    return verify(dataclasses.replace(state, columns=columns), rows, qkv, g, g)


LARGE = DeltaHeads(16, 48, 128, 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (64, 5), (2, 16)])
def test_lowers_for_cuda(B, T, dtype):
    kernels = kernels_of(for_cuda(pass_of_layer, shapes_of(B, T, LARGE, dtype)))
    assert kernels == ["convolve_delta_net", "verify_delta_net"]


def test_passes_that_append_lower_for_cuda():
    def appended(state, rows, x, weight, g):
        return recur(DeltaInputs(x, g, g, weight, LARGE), state, dataclasses.replace(rows, append=True))

    assert kernels_of(for_cuda(appended, shapes_of(64, 1, LARGE))) == ["convolve_delta_net", "append_delta_net"]


def test_sizes_without_a_kernel_are_for_the_reference():
    assert kernels_of(for_cuda(pass_of_layer, shapes_of(2, 3, DeltaHeads(2, 4, 24, 12)))) == ["convolve_delta_net"]
    assert not kernels_of(jax.jit(pass_of_layer).lower(*shapes_of(2, 3, LARGE)).as_text())
