"""``jspec.pallas.matmul.weight_only`` against sums in float64 of the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from inline_assembly import carried_out
from tiers import in_tiers
from weight_only_problems import check, mxfp4_problem, nvfp4_problem, problem, words

from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.matmul.weight_only import (
    weight_only_matmul,
    weight_only_matmul_kernel,
    weight_only_matmul_reference,
    weight_only_tiling,
)
from jspec.pallas.weights import table_codes, unpack
from jspec.pallas.weights.unpack import MXFP4_SHRINK, SHRINK
from jspec.quantization import codes, nvfp4
from jspec.quantization.formats import known_format
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight

FOUR_BITS = ("int4", "int4_64_float16_zeros", "int4_32_float32", "int4_all_float16_zeros", "nf4_64", "fp4_32")
# As blocks of GGUF are kept: Q4_1, Q5_0, Q6_K, Q4_K, Q5_K, Q3_K, Q2_K, IQ4_NL and IQ4_XS.
GGUF = (
    *(
        "int4_32_float16_offsets",
        "int5_32_float16",
        "int6_16_levels",
        "int4_32_levels_offsets",
        "int5_32_levels_offsets",
    ),
    *("int4_16_levels", "int4_16_levels_offsets", "iq4_32_float16", "iq4_32_levels"),
)
GROUPED = (*FOUR_BITS, *GGUF, "int8_32_float16_zeros", "int8_16_levels")
KINDS = ("int8", "fp8", "fp8_block", "mxfp8", *GROUPED)

FEW = ("int8", "int4", "fp8_block", "mxfp8")
SHAPES = ((1, 64, 128), (3, 70, 100), (16, 128, 640), (17, 200, 300), (65, 96, 1536))
CASES = in_tiers(
    [(*shape, kind) for kind in KINDS for shape in SHAPES],
    test=[(*shape, kind) for kind in KINDS for shape in (SHAPES if kind in FEW else SHAPES[1:4:2])],
)


def _middles(weight: Weight, form) -> jax.Array:
    """The codes in the middle, of a weight's shape."""
    middle = 1 << (form.bits - 1)
    return jnp.asarray(codes.pack_codes(np.full(weight.shape, middle, np.uint8), form.bits))


class TestWeightOnlyMatmul:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.implementation = implementation

    def product(self, *args, tiling: MatmulTiling | None = None, dtype=jnp.float32):
        kernel = functools.partial(weight_only_matmul_kernel, tiling=tiling, dtype=dtype)
        return self.implementation(functools.partial(weight_only_matmul_reference, dtype=dtype), kernel)(*args)

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_agrees_with_float64(self, case):
        args, numbers = problem(*case)
        check(self.product(*args), args, numbers)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_largest_and_the_smallest_numbers_are_exact(self, kind):
        args, numbers = problem(5, 64, 256, kind, extreme=True)
        check(self.product(*args), args, numbers)

    @pytest.mark.parametrize("kind", KINDS)
    def test_zeros_give_zeros(self, kind):
        (x, weight), _ = problem(2, 64, 128, kind)
        scale, form = weight.scale, known_format(kind)
        zeros = dataclasses.replace(
            weight,
            numbers=_middles(weight, form) if form.packed else jnp.zeros_like(weight.numbers),
            scale=scale.at[..., 1].set(8 if form.packed else 0) if form.zeros else scale,
        )
        if form.offsets or form.table == "iq4":  # no code stands for 0 in every group
            return
        np.testing.assert_array_equal(self.product(x, zeros), 0)
        np.testing.assert_array_equal(self.product(jnp.zeros_like(x), weight), 0)

    @pytest.mark.parametrize("kind", in_tiers(KINDS, test=FEW))
    @pytest.mark.parametrize("num_splits", [2, 4, 8])
    def test_inputs_may_be_split_unevenly(self, kind, num_splits):
        args, numbers = problem(5, 70, 128 * 5 - 3, kind)
        check(self.product(*args, tiling=MatmulTiling(64, 16, 128, 4, 3, num_splits=num_splits)), args, numbers)

    @pytest.mark.parametrize("kind", in_tiers(KINDS, test=FEW))
    @pytest.mark.parametrize("ordered", [False, True])
    def test_x_may_be_read_in_either_order(self, kind, ordered):
        args, numbers = problem(20, 70, 600, kind)
        check(self.product(*args, tiling=MatmulTiling(64, 32, 256, 4, 3, ordered=ordered)), args, numbers)

    @pytest.mark.parametrize("num_splits", [1, 2])
    def test_results_are_rounded_once(self, num_splits):
        for kind in FEW:
            args, _ = problem(3, 64, 256, kind)
            tiling = MatmulTiling(64, 16, 128, 4, 3, num_splits=num_splits)
            exact, rounded = (self.product(*args, dtype=dtype, tiling=tiling) for dtype in (jnp.float32, jnp.bfloat16))
            np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))

    def test_a_token_that_is_not_finite_leaves_the_others_alone(self):
        for kind in FEW:
            (x, weight), _ = problem(3, 64, 200, kind)
            clean, got = self.product(x, weight), self.product(x.at[1, 7].set(jnp.nan), weight)
            assert jnp.isnan(got[1]).any()
            np.testing.assert_array_equal(got[jnp.array([0, 2])], clean[jnp.array([0, 2])])


def test_shapes_before_the_last_are_kept():
    (x, weight), _ = problem(6, 32, 128, "int4")
    flat = weight_only_matmul(x, weight)
    np.testing.assert_array_equal(weight_only_matmul(x.reshape(2, 3, -1), weight), flat.reshape(2, 3, -1))


@pytest.mark.parametrize("step", [64, 128])
def test_input_indices_are_in_mma_order(step):
    tile = unpack.input_indices(256, step, False)
    np.testing.assert_array_equal(unpack.input_indices(256, step, True), unpack.to_mma_order(tile[None])[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["mxfp8", *GROUPED])
def test_groups_are_exact(dtype, kind):
    (_, weight), numbers = problem(1, 16, 256, kind, rounded=dtype == "bfloat16")
    actual = jax.jit(weight_only_matmul_reference)(jnp.eye(256, dtype=dtype), weight)
    np.testing.assert_array_equal(actual, numbers.T.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_has_the_derivative_of_its_reference(kind):
    (x, weight), _ = problem(2, 16, 128, kind)
    derivative = lambda product: jax.grad(lambda x: jnp.sum(jnp.sin(product(x, weight))))(x)  # noqa: E731
    np.testing.assert_array_equal(derivative(weight_only_matmul), derivative(weight_only_matmul_reference))


def test_products_of_a_block_are_added_up_before_its_scale():
    """The definition, block by block, and two wrong readings of the scales."""
    (x, weight), _ = problem(3, 128, 256, "fp8_block")
    scale = weight.scale

    def by_block(scale):
        parts = (slice(0, 128), slice(128, 256))
        sums = (
            jnp.einsum("mi,oi->mo", *(a[:, part].astype(jnp.float32) for a in (x, weight.numbers))) for part in parts
        )
        return sum(scale[None, :, i] * total for i, total in enumerate(sums))

    got = np.asarray(weight_only_matmul(x, weight))
    tolerance = {"rtol": 1e-5, "atol": 1e-5 * np.abs(got).max()}
    np.testing.assert_allclose(got, by_block(scale), **tolerance)
    for wrong in (1 / scale, scale[:, ::-1]):
        assert not np.allclose(got, by_block(wrong), **tolerance)


def product_of(interpret: bool):
    return functools.partial(weight_only_matmul_kernel, interpret=True) if interpret else weight_only_matmul


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("shape", [(3, 70, None), (17, 64, 640)])
@pytest.mark.parametrize(("make", "inputs"), [(nvfp4_problem, 304), (mxfp4_problem, 288)], ids=["nvfp4", "mxfp4"])
def test_e2m1_agrees_with_float64(make, inputs, shape, interpret):
    (x, weight), wanted = make(*shape[:2], shape[2] or inputs)
    got, exact = jax.jit(product_of(interpret))(x, weight), np.asarray(x, np.float64)
    assert got.dtype == jnp.float32
    assert (np.abs(got - exact @ wanted.T) <= 1e-5 * (np.abs(exact) @ np.abs(wanted).T) + 1e-30).all()
    np.testing.assert_allclose(jax.tree.map(np.asarray, weight).dequantize(), wanted, rtol=2e-7)
    if make is mxfp4_problem:
        plain = nvfp4.VALUES[codes.unpack_codes(np.asarray(weight.numbers), weight.inputs)]
        plain = plain * np.asarray(weight.scale).repeat(32, axis=1)[:, : weight.inputs]
        assert np.abs(got - exact @ plain.T).max() > 1  # scales that are no exponents


def assert_exact(byte, scale, factors, shrink: float):
    """That the instructions make the products of all codes in ``byte`` with ``scale``, whose factors for them these are."""
    registers = {"$2": words(byte)} | dict.fromkeys(("$3", "$4"), factors.view(np.uint16).repeat(2).view(np.uint32))
    for asm, code in ((unpack.LOW_E2M1, byte & 15), (unpack.HIGH_E2M1, byte >> 4)):
        actual = carried_out(asm, registers).astype(np.float64).reshape(-1) * shrink
        np.testing.assert_array_equal(actual, nvfp4.VALUES[code] * scale.repeat(4))


@pytest.mark.parametrize("name", list(TABLES))
def test_instructions_look_up_the_numbers_of_a_table(name):
    """Every code, in both halves of bytes, and in each place of a word."""
    byte, table = np.arange(256, dtype=np.uint8), TABLES[name]
    wanted = (table.multiples / table_codes.shrink_of_table(table)).astype(ml_dtypes.bfloat16)
    for asm, code in zip(table_codes.halves(table), (byte & 15, byte >> 4), strict=True):
        np.testing.assert_array_equal(carried_out(asm, {"$2": words(byte)}).reshape(-1), wanted[code])
    digits = np.random.default_rng(0).integers(16, size=(64, 128)).astype(np.uint8)
    word = codes.pack_codes(digits).view(np.uint32)
    scales = np.float32(0.75), np.float32(-1.4375)  # of the first 16 inputs of a word, and of the others
    factors = [int(unpack.twice(float(scale * by)), 16) for scale in scales for by in table_codes.factors_of(table)]
    of_table = [*table_codes.words_of(table).values()]
    pairs, others = (
        carried_out(
            table_codes.word_of(table, bool(before)),
            {"$4": word.reshape(-1)}
            | {f"${i}": np.full(word.size, x, np.uint32) for i, x in enumerate(before + factors, 5)},
            results=4,
        )
        for before in ([], of_table)
    )
    np.testing.assert_array_equal(pairs, others)
    multiples = table.multiples[digits].reshape(64, 4, 2, 2, 4, 2) * np.reshape(scales, (2, 1, 1, 1))
    scaled = (multiples / table_codes.shrink_of_table(table, scaled=True)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(pairs.reshape(64, 4, 4, 4, 2), scaled.reshape(64, 4, 4, 4, 2).swapaxes(2, 3))
    error = np.sqrt(np.mean(np.square(table.values(rounded=True) - table.values())))
    assert error == (pytest.approx(3.8e-4, rel=0.01) if name == "nf4" else 0)


def test_nvfp4_instructions_agree_with_the_definition():
    """Of every code with every scale that is a number: the product is exact."""
    bits = np.arange(0x7F, dtype=np.uint8)
    scales = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(unpack.numbers_of_e4m3(jnp.asarray(bits)), scales)
    byte, scale = np.tile(np.arange(256, dtype=np.uint8), len(bits)), scales.repeat(64)  # one for each four bytes
    assert_exact(byte, scale, (scale * np.float32(2.0**126 / SHRINK)).astype(ml_dtypes.bfloat16), SHRINK)


def test_mxfp4_instructions_agree_with_the_definition():
    """Of every code with every scale: the product is exact, down to subnormal numbers of bfloat16."""
    scale = np.arange(known_format("mxfp4").largest_power + 1, dtype=np.uint8)
    byte, power = np.tile(np.arange(256, dtype=np.uint8), len(scale)), np.ldexp(1.0, scale.astype(int) - 127).repeat(64)
    factors = (power * 2.0**121).astype(ml_dtypes.bfloat16)
    assert (factors.astype(np.float64) == power * 2.0**121).all()
    assert_exact(byte, power, factors, MXFP4_SHRINK)


@pytest.mark.parametrize(("interpret", "smallest"), [(False, 2), (True, 7)])
def test_mxfp4_is_exact(interpret, smallest):
    """Of every code with every scale whose numbers, and what a kernel makes of them, a CPU does not count as 0."""
    scale = np.arange(smallest, known_format("mxfp4").largest_power + 1, dtype=np.uint8)
    code = np.tile(np.arange(16, dtype=np.uint8).repeat(8), (len(scale), 1))
    scales = scale[:, None].repeat(4, axis=1)
    weight = Weight(jnp.asarray(codes.pack_codes(code)), scales, form=known_format("mxfp4"), inputs=128)
    found = product_of(interpret)(jnp.eye(128, dtype=jnp.bfloat16), weight)
    wanted = nvfp4.VALUES[code] * np.ldexp(1.0, scale.astype(int) - 127)[:, None]
    np.testing.assert_array_equal(np.float64(found), wanted.T)


def test_mxfp8_instructions_agree_with_the_definition():
    """Of every number with every scale: the product is exact but for what is below the least number of bfloat16."""
    byte, scale = np.arange(256, dtype=np.uint8), np.arange(known_format("mxfp8").largest_power + 1)
    factors = np.ldexp(1.0, scale - 7).astype(ml_dtypes.bfloat16).view(np.uint16).repeat(64).repeat(2).view(np.uint32)
    wanted = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    wanted[[0x7F, 0xFF]] = 480, -480  # NaN
    wanted = np.ldexp(wanted, scale[:, None] - 127).astype(ml_dtypes.bfloat16).astype(np.float64)
    registers = {"$2": words(np.tile(byte, len(scale))), "$3": factors, "$4": factors}
    actual = carried_out(unpack.FP8_TIMES, registers).astype(np.float64)
    np.testing.assert_array_equal(actual.reshape(wanted.shape), wanted)
    registers = {"$2": registers["$2"] & 0xFFFF, "$3": registers["$2"] >> 16, "$4": factors}
    pairs = carried_out(unpack.FP8_PAIRS_TIMES, registers).astype(np.float64)
    np.testing.assert_array_equal(pairs.reshape(wanted.shape), wanted)


def test_int8_instructions_agree_with_int8():
    byte = np.arange(256, dtype=np.uint8)
    actual = carried_out(unpack.INT8, {"$2": words(byte)}).astype(np.float32)
    np.testing.assert_array_equal(actual.reshape(-1) * SHRINK, byte.view(np.int8))


def test_fp8_instructions_agree_with_fp8():
    byte = np.arange(256, dtype=np.uint8)
    actual = carried_out(unpack.FP8, {"$2": words(byte)}).astype(np.float32).reshape(-1) * SHRINK
    wanted = byte.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    wanted[0x7F], wanted[0xFF] = 480, -480  # NaN
    np.testing.assert_array_equal(actual, wanted)


def test_instructions_for_four_bits_agree_with_the_definition():
    byte = np.tile(np.arange(256, dtype=np.uint8), 17)
    zeros = np.arange(17).repeat(64)  # one for each four bytes
    added = (-zeros / SHRINK).astype(ml_dtypes.bfloat16).view(np.uint16).repeat(2).view(np.uint32)
    registers = {"$2": words(byte), "$3": added, "$4": added}
    for asm, code, zero in (
        (unpack.LOW, byte & 15, 8),
        (unpack.HIGH, byte >> 4, 8),
        (unpack.LOW_LESS_ZEROS, byte & 15, zeros.repeat(4)),
        (unpack.HIGH_LESS_ZEROS, byte >> 4, zeros.repeat(4)),
    ):
        actual = carried_out(asm, registers).astype(np.float32).reshape(-1) * SHRINK
        np.testing.assert_array_equal(actual, code.astype(np.float32) - zero)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 2048), (70, 100)])
def test_tilings_fit_the_chip(bits, outputs, inputs):
    for tokens in (1, 5, 16, 17, 64, 80, 320, 512):
        tiling = weight_only_tiling(tokens, outputs, inputs, bits)
        for size in (tiling.outputs, tiling.tokens, tiling.inputs, tiling.num_splits):
            assert size & (size - 1) == 0
        assert tiling.inputs >= (128 if bits == 4 else 64)
        assert bits == 4 or weight_only_tiling(tokens, outputs, inputs, bits, in_blocks=True).inputs % 128 == 0
        assert tiling.num_splits <= max(1, -(-inputs // tiling.inputs))
        stage = tiling.outputs * tiling.inputs * bits // 8 + 2 * tiling.tokens * tiling.inputs
        assert (tiling.num_stages - 1) * stage + 2 * tiling.tokens * tiling.inputs <= 227 * 1024
