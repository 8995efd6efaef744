"""Prefill passes that have several segments of one prompt: the bits of each prompt alone, one segment a pass."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from delta_nets import HEADS, Texts, W, random_texts, wanted_of

from jspec.pallas.delta_net.chunked import CHUNK
from jspec.pallas.delta_net.convolution import convolve_prefill, convolve_prefill_kernel, convolve_prefill_reference
from jspec.pallas.delta_net.prefill import PrefillTiling, prefill_kernel, prefill_reference
from jspec.pallas.delta_net.state import PrefillRows, init_state

LENGTHS = 3 * CHUNK + 21, 5 * CHUNK, CHUNK + 2  # of prompts: one ends within the W - 1 last tokens of a segment
SMALL = PrefillTiling(
    values=16, keys=16, prepare_keys=16, prepare_warps=4, num_warps=4, num_stages=2
)  # two tiles, two instances for each head


class Segments(NamedTuple):
    """The entries of one pass, in order: the prompt of each, -1 for none, and which segment of it."""

    prompts: list[int]
    numbers: list[int]


def alone(size: int) -> list[Segments]:
    """Passes of one segment of so many tokens."""
    return [
        Segments([prompt], [number]) for prompt, length in enumerate(LENGTHS) for number in range(-(-length // size))
    ]


def arranged(entries: int, size: int, seed: int) -> list[Segments]:
    """Passes of so many entries, with any number of segments of each prompt, of so many tokens, and empty entries."""
    rng, passes = np.random.default_rng(seed), []
    counts, done = [-(-length // size) for length in LENGTHS], [0] * len(LENGTHS)
    while done != counts:
        prompts, numbers = [], []
        for prompt in (int(p) for p in rng.permutation(len(LENGTHS))):
            if rng.random() < 0.2:
                prompts, numbers = [*prompts, -1], [*numbers, 0]
            most = min(counts[prompt] - done[prompt], entries - len(prompts))
            for _ in range(int(rng.integers(0, most + 1)) if most > 0 else 0):
                prompts, numbers = [*prompts, prompt], [*numbers, done[prompt]]
                done[prompt] += 1
        empty = entries - len(prompts)
        passes.append(Segments([*prompts, *[-1] * empty][:entries], [*numbers, *[0] * empty][:entries]))
    return passes


def rows_of(segments: Segments, size: int) -> PrefillRows:
    """The prompts' rows are in reverse order. An empty entry has tokens of no row, or a row and no tokens."""
    prompts, numbers = (np.array(x) for x in segments)
    left = np.array([*LENGTHS, 0])[prompts] - numbers * size
    nothing = np.where(np.arange(len(prompts)) % 2, 0, 9)
    tokens = np.where(prompts < 0, nothing, np.clip(left, 0, size))
    row = np.where(prompts < 0, np.where(nothing, len(LENGTHS), 0), len(LENGTHS) - 1 - prompts)
    follows = np.append(False, (prompts[1:] == prompts[:-1]) & (prompts[1:] >= 0))
    fresh = (prompts >= 0) & (numbers == 0)
    return PrefillRows(jnp.int32(row), jnp.int32(tokens), jnp.asarray(fresh), jnp.asarray(follows))


def tokens_of(x, segments: Segments, size: int):
    """What the segments have of an array ``[prompts, N, ...]``, ``[B, size, ...]``; other numbers behind a prompt."""
    x = np.asarray(x)
    taken = np.full((len(segments.prompts), size, *x.shape[2:]), 3, x.dtype)
    for b, (prompt, number) in enumerate(zip(*segments, strict=True)):
        there = x[prompt, number * size : min((number + 1) * size, LENGTHS[prompt])]
        taken[b, : len(there)] = there
    return jnp.asarray(taken)


def read(convolve, prefill, texts: Texts, passes: list[Segments], size: int):
    """Outputs of each prompt and the state, with columns behind the prompts only, after these passes."""
    state = jax.tree.map(lambda x: jnp.full_like(x, 7), init_state(len(LENGTHS), HEADS, W, 5, texts.x.dtype))
    outputs = [np.zeros((length, HEADS.values, HEADS.value_size), np.float32) for length in LENGTHS]
    for segments in passes:
        rows = rows_of(segments, size)
        x, g, beta = (tokens_of(array, segments, size) for array in texts[:3])
        qkv, columns = convolve(state.columns, rows, x, texts.weight)
        o, state = prefill(dataclasses.replace(state, columns=columns), rows, qkv, g, beta)
        for b, (prompt, number) in enumerate(zip(*segments, strict=True)):
            count = 0 if prompt < 0 else int(rows.tokens[b])
            assert not np.asarray(o[b, count:]).any()
            outputs[prompt][number * size :][:count] = o[b, :count]
    return [*outputs, *map(np.asarray, jax.tree.leaves(state))]


def read_by(convolve, prefill):
    return functools.partial(read, jax.jit(convolve), jax.jit(prefill))


def assert_same_bits(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


class TestChains:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        prefill = implementation(prefill_reference, functools.partial(prefill_kernel, tiling=SMALL))
        kernel = functools.partial(convolve_prefill_kernel, tokens=2)  # so that there is less to compile, interpreted
        self.read = read_by(implementation(convolve_prefill_reference, kernel), prefill)

    @pytest.mark.parametrize(
        ("entries", "size", "seed", "dtype"),
        [
            (4, CHUNK, 0, "float32"),
            (3, 2 * CHUNK, 1, "bfloat16"),
            *(pytest.param(2 + seed % 5, CHUNK, seed, "float32", marks=pytest.mark.nightly) for seed in range(2, 8)),
        ],
    )
    def test_bits_are_those_of_each_prompt_alone(self, entries, size, seed, dtype):
        texts = random_texts(len(LENGTHS), max(LENGTHS), seed, dtype=dtype)
        passes = arranged(entries, size, seed)
        assert any(np.asarray(rows_of(segments, size).follows).any() for segments in passes)
        assert_same_bits(self.read(texts, passes, size), self.read(texts, alone(size), size))

    def test_bits_do_not_depend_on_the_size_of_segments(self):
        texts = random_texts(len(LENGTHS), max(LENGTHS), seed=3)
        passes = arranged(3, 2 * CHUNK, seed=3)
        assert_same_bits(self.read(texts, passes, 2 * CHUNK), self.read(texts, alone(CHUNK), CHUNK))

    def test_agrees_with_float64(self):
        """A pass that has all of every prompt."""
        texts = random_texts(len(LENGTHS), max(LENGTHS), seed=2)
        counts = [-(-length // CHUNK) for length in LENGTHS]
        whole = Segments(list(np.repeat(range(len(LENGTHS)), counts)), [n for count in counts for n in range(count)])
        *outputs, S, _, _, _, columns = self.read(texts, [whole], CHUNK)
        for prompt, length in enumerate(LENGTHS):
            wanted, states = wanted_of(prompt, Texts(*(x[:, :length] for x in texts[:3]), texts.weight))
            row = len(LENGTHS) - 1 - prompt
            np.testing.assert_allclose(outputs[prompt], wanted, rtol=2e-5, atol=5e-6)
            np.testing.assert_allclose(S[row], states[-1], rtol=2e-5, atol=5e-6)
            np.testing.assert_array_equal(columns[row, : W - 1], texts.x[prompt, length + 1 - W : length])


def convolve_broken(columns, rows: PrefillRows, x, weight):
    """Each segment stands behind the columns of its row."""
    y, _ = convolve_prefill(columns, dataclasses.replace(rows, follows=jnp.zeros_like(rows.follows)), x, weight)
    return y, convolve_prefill(columns, rows, x, weight)[1]


def prefill_from_the_row(state, rows: PrefillRows, *tokens):
    """Each segment starts from the state of its row."""
    rows = dataclasses.replace(rows, follows=jnp.zeros_like(rows.follows)), rows.written(len(state.S))
    o, _ = prefill_reference(state, rows[0], *tokens)
    return o, prefill_reference(state, dataclasses.replace(rows[0], row=rows[1]), *tokens)[1]


def prefill_to_the_middle(state, rows: PrefillRows, *tokens):
    """The segment before the last of a chain writes the state."""
    is_last = rows.follows & (rows.written(len(state.S)) < len(state.S))
    o, _ = prefill_reference(state, rows, *tokens)
    return o, prefill_reference(state, dataclasses.replace(rows, tokens=jnp.where(is_last, 0, rows.tokens)), *tokens)[1]


FAULTS = {
    "a chain is broken in the convolution": (convolve_broken, prefill_reference),
    "a chain starts again from the state of its row": (convolve_prefill, prefill_from_the_row),
    "a middle segment writes the state": (convolve_prefill, prefill_to_the_middle),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_chain_is_detected(fault):
    texts, passes = random_texts(len(LENGTHS), max(LENGTHS), seed=0), arranged(4, CHUNK, seed=0)
    wanted = read_by(convolve_prefill, prefill_reference)(texts, alone(CHUNK), CHUNK)
    assert_same_bits(read_by(convolve_prefill, prefill_reference)(texts, passes, CHUNK), wanted)
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_bits(read_by(*FAULTS[fault])(texts, passes, CHUNK), wanted)
