"""What a stored weight stands for, in every format, against the equation of ``Weight`` number by number."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.quantization.formats import format_of
from jspec.quantization.mxfp4_pairs import factors
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight, random_weight

KINDS = (
    *(None, "int8", "fp8", "fp8_block", "int4", "int4_32_float16_zeros", "int4_all_float32", "int8_64_float16_zeros"),
    *("int4_64_bfloat16_ordered", "int8_32_float16_zeros_ordered", "nvfp4", "mxfp4", "mxfp4_pairs", "mxfp8"),
    *("int4_scaled", "int8_scaled", "int4_64_bfloat16_ordered_scaled"),
    *("nf4_64", "fp4_32"),
)
OUTPUTS, INPUTS = 6, 320
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def drawn(kind: str | None) -> Weight:
    """A weight of NumPy arrays whose scales, zeros and order differ from group to group."""
    rng, form = np.random.default_rng(0), format_of(kind)
    weight = random_weight(jax.random.key(0), (OUTPUTS, INPUTS), INPUTS**-0.5, dtype=jnp.float32, form=form)
    weight = jax.tree.map(np.array, weight)
    if form is None:
        return weight
    scale, channel_scale, order = weight.scale, weight.channel_scale, weight.order
    if form.kind == "mxfp4_pairs":
        scale = factors(*rng.integers(100, 126, (2, *scale.shape), np.uint32))
    elif form.scales == "powers":
        scale = scale + rng.integers(3, size=scale.shape, dtype=np.uint8)
    elif form.zeros:
        middle = 8 if form.packed else 0
        scale[..., 0] *= rng.choice([0.5, 1.5, -1], scale.shape[:2]).astype(scale.dtype)
        scale[..., 1] = rng.integers(middle - 3, middle + 4, scale.shape[:2])
    else:
        scale = (scale.astype(np.float32) * rng.choice([0.5, 1, 1.75], scale.shape)).astype(scale.dtype)
    if form.channel_numbers:
        channel_scale = rng.uniform(1, 2, channel_scale.shape).astype(np.float32)
    if form.ordered:
        order = rng.permutation(INPUTS).astype(np.int32)
    input_scale = rng.uniform(0.5, 2, INPUTS).astype(np.float32) if form.scaled_inputs else None
    return dataclasses.replace(weight, scale=scale, channel_scale=channel_scale, order=order, input_scale=input_scale)


def code_at(weight: Weight, o: int, i: int) -> int:
    """The code of an input as the tables of ``jspec.quantization.codes`` and ``mxfp4_pairs`` place it."""
    if weight.in_pairs:
        at = i % 32 // 4 * 4 + 2 * (i % 2)
        half = int(weight.numbers[i // 64, o, at]) | int(weight.numbers[i // 64, o, at + 1]) << 8
        magnitude, sign = [[(6, 15), (3, 12)], [(0, 14), (9, 13)]][i // 32 % 2][i % 4 // 2]
        return half >> magnitude & 7 | (half >> sign & 1) << 3
    if not weight.packed:
        return int(weight.numbers[o, i])
    place = i % 32  # one of 32 inputs, which have 16 bytes, four for each thread
    byte = int(weight.numbers[o, i // 32 * 16 + place % 8 // 2 * 4 + 2 * (place % 2) + (place >= 16)])
    return byte & 15 if place % 16 < 8 else byte >> 4


def number_at(weight: Weight, o: int, i: int) -> float:
    """What stands for output o and the i-th input as it is stored, by the equation."""
    form = weight.form
    if form is None:
        return weight.numbers[o, i]
    group = 0 if form.group is None else i // form.group
    scale = weight.scale[o] if form.per_channel else weight.scale[(o, group) if not weight.in_pairs else (i // 64, o)]
    if weight.in_pairs:
        bits = (int(scale) >> 16 * (group % 2) & 0xFFFF) << 16
        return E2M1[code_at(weight, o, i)] * np.array(bits, np.uint32).view(np.float32) * 2.0**-126
    if form.kind == "mxfp4":
        return E2M1[code_at(weight, o, i)] * 2.0 ** (int(scale) - 127)
    if form.kind == "mxfp8":
        return float(weight.numbers[o, i]) * 2.0 ** (int(scale) - 127)
    if form.kind == "nvfp4":
        multiplies, divides = weight.channel_scale[o].astype(float)
        return E2M1[code_at(weight, o, i)] * float(scale) * multiplies / divides
    if not form.in_codes:
        return float(weight.numbers[o, i]) * float(scale)
    if form.table:
        return TABLES[form.table].numbers[code_at(weight, o, i)] * float(scale)
    scale, zero = scale if form.zeros else (scale, 8 if form.packed else 0)
    return (code_at(weight, o, i) - float(zero)) * float(scale)


@pytest.mark.parametrize("kind", KINDS)
class TestWeight:
    def test_stands_for_what_its_equation_says(self, kind):
        weight = drawn(kind)
        wanted = np.array([[number_at(weight, o, i) for i in range(INPUTS)] for o in range(OUTPUTS)])
        if weight.order is not None:
            wanted = wanted[:, np.argsort(weight.order)]
        if weight.input_scale is not None:
            wanted = wanted * weight.input_scale
        for arrays, library in ((weight, np.ndarray), (jax.device_put(weight), jax.Array)):
            found = arrays.dequantize()
            assert isinstance(found, library)
            assert (found.dtype, found.shape) == (np.float32, weight.shape)
            np.testing.assert_allclose(found, wanted, rtol=1e-6)

    def test_has_the_arrays_of_its_format(self, kind):
        weight, form = drawn(kind), format_of(kind)
        assert weight.shape == (OUTPUTS, INPUTS)
        if form is not None:
            expected = form.arrays(weight.shape).values()
            assert [(a.shape, a.dtype.name) for a in jax.tree.leaves(weight)] == list(expected)

    def test_rows_and_parts_stand_for_the_same(self, kind):
        weight = drawn(kind)
        whole, parts = weight.dequantize(), weight.split(3)
        assert parts.shape == (3, OUTPUTS // 3, INPUTS)
        np.testing.assert_array_equal(parts.dequantize(), whole.reshape(parts.shape))
        if not weight.in_pairs:
            rows = np.array([[4, 1], [0, 4]])
            np.testing.assert_array_equal(weight[rows].dequantize(), whole[rows])
        if not weight.in_pairs and weight.order is None:
            np.testing.assert_array_equal(weight.of_inputs(slice(128, 256)).dequantize(), whole[:, 128:256])
