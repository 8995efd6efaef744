"""Rounds of gated delta nets as XLA compiles them for an H200: two launches a layer, and no state is moved."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from delta_nets import advanced
from deviceless import compiled_for_h200, why_not

from benchmarks.rounds.hlo import launched, moves
from jspec.pallas.delta_net.convolution import convolve_prefill, convolve_verify
from jspec.pallas.delta_net.prefill import prefill
from jspec.pallas.delta_net.projections import DeltaHeads
from jspec.pallas.delta_net.recur import DeltaInputs, recur
from jspec.pallas.delta_net.state import PrefillRows, VerifyRows, init_state
from jspec.pallas.delta_net.verify import verify

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

HEADS = DeltaHeads(keys=16, values=48, key_size=128, value_size=128)  # of Qwen3.5-27B
BS, W, TM = 64, 4, 5
array = jax.ShapeDtypeStruct


def states(layers: int):
    return [jax.eval_shape(lambda: init_state(BS, HEADS, W, TM, jnp.bfloat16)) for _ in range(layers)]


def rounds(states, rows: VerifyRows, x, g, weight):
    """Ten rounds over all layers, of which a layer reads what the one before made."""

    def one(_, carried):
        states, rows, x = carried
        new = []
        for state in states:
            qkv, columns = convolve_verify(state.columns, rows, x, weight)
            o, state = verify(dataclasses.replace(state, columns=columns), rows, qkv, g, g)
            x = x.at[:, :, : HEADS.values * HEADS.value_size].set(o.reshape(*o.shape[:2], -1))
            new.append(state)
        accepted, half = advanced(rows, rows.tokens - 1)
        return new, dataclasses.replace(rows, accepted=accepted, half=half), x

    return jax.lax.fori_loop(0, 10, one, (states, rows, x))


def compiled_rounds(B: int, T: int, layers: int) -> str:
    rows = VerifyRows(*[array((B,), jnp.int32)] * 4, array((B,), jnp.bool_))  # pyright: ignore
    x, g = array((B, T, HEADS.channels), jnp.bfloat16), array((B, T, HEADS.values), jnp.float32)
    weight = array((W, HEADS.channels), jnp.bfloat16)
    return compiled_for_h200(rounds, states(layers), rows, x, g, weight, donate_argnums=(0, 2)).as_text()


def drafting(state, rows: VerifyRows, x, g, weight):
    """Ten rounds of a draft model's layer: a verify pass of two tokens, then a loop of passes that append one each."""

    def one(_, carried):
        def append(i, carried):
            state, x = carried
            where = {"accepted": rows.tokens + i, "half": 1 - rows.half, "fresh": jnp.zeros(rows.row.shape, bool)}
            appending = dataclasses.replace(rows, **where, append=True)
            inputs = DeltaInputs(x[:, :1], g[:, :1], g[:, :1], weight, HEADS)
            o, state = recur(inputs, state, appending)
            return state, x.at[:, :1, : HEADS.values * HEADS.value_size].set(o.reshape(*o.shape[:2], -1))

        state, rows, x = carried
        o, state = recur(DeltaInputs(x, g, g, weight, HEADS), state, rows)
        x = x.at[:, :, : HEADS.values * HEADS.value_size].set(o.reshape(*o.shape[:2], -1))
        state, x = jax.lax.fori_loop(0, 3, append, (state, x))
        accepted, half = advanced(rows, rows.tokens - 1)
        return state, dataclasses.replace(rows, accepted=accepted, half=half), x

    return jax.lax.fori_loop(0, 10, one, (state, rows, x))


def test_passes_that_append_move_no_state():
    rows = VerifyRows(*[array((16,), jnp.int32)] * 4, array((16,), jnp.bool_))  # pyright: ignore
    x, g = array((16, 2, HEADS.channels), jnp.bfloat16), array((16, 2, HEADS.values), jnp.float32)
    weight = array((W, HEADS.channels), jnp.bfloat16)
    compiled = compiled_for_h200(drafting, states(1)[0], rows, x, g, weight, donate_argnums=(0, 2))
    assert [op.line for op in moves(compiled.as_text(), 2 * BS * TM * HEADS.values * 4)] == []
    assert "jspec_append_delta_net" in compiled.as_text()


@pytest.mark.parametrize(("B", "T"), [(1, 5), (16, 1)])
def test_rounds_move_no_state_and_launch_two_kernels_a_layer(B, T):
    fewer, more = (compiled_rounds(B, T, layers) for layers in (2, 3))
    smallest = 2 * BS * TM * HEADS.values * 4  # bytes, of the pending decays
    assert [op.line for op in moves(more, smallest)] == []
    kernels = [len(launched(text, loop=True)) for text in (fewer, more)]
    assert kernels[1] - kernels[0] == 3  # the third is what this test makes of the outputs


def test_prefill_moves_no_state_and_no_columns():
    rows = PrefillRows(*[array((1,), jnp.int32)] * 2, *[array((1,), jnp.bool_)] * 2)  # pyright: ignore

    def segment(state, rows, x, g, weight):
        qkv, columns = convolve_prefill(state.columns, rows, x, weight)
        return prefill(dataclasses.replace(state, columns=columns), rows, qkv, g, g)

    x, g = array((1, 1024, HEADS.channels), jnp.bfloat16), array((1, 1024, HEADS.values), jnp.float32)
    weight = array((W, HEADS.channels), jnp.bfloat16)
    compiled = compiled_for_h200(segment, states(1)[0], rows, x, g, weight, donate_argnums=0)
    of_columns = 2 * BS * (W - 1 + TM) * HEADS.channels
    large = 4 * BS * HEADS.values * HEADS.key_size * HEADS.value_size
    assert [op.line for op in moves(compiled.as_text(), of_columns)] == []
    assert "jspec_convolve_segments" in compiled.as_text()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < large
