"""``jspec.pallas.matmul.few_tokens`` against sums in float64 of the same numbers, and which tilings it has.

jax interprets and lowers the kernel since 0.11. Before that, only the reference implementation is tried."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from inline_assembly import carried_out
from matmul_rows import abstract_weight
from weight_only_problems import check, nvfp4_problem, problem, words

from jspec.pallas.matmul import few_tokens
from jspec.pallas.matmul.few_tokens import few_tokens_matmul, tiling_of
from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel
from jspec.pallas.matmul.partial_sums import PartialSums, reduce_partial_sums
from jspec.pallas.matmul.sm90_tiling import SHARED, MosaicTiling, few_tokens_tiling, parts_of_inputs
from jspec.pallas.matmul.weight_only import weight_only_matmul_reference
from jspec.pallas.weights import unpack
from jspec.quantization import nvfp4
from jspec.quantization.codes import pack_codes
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

INTERPRETS = jax.__version_info__ >= (0, 11)
newer = pytest.mark.skipif(not INTERPRETS, reason="jax 0.10 neither interprets nor lowers the kernel")
KINDS = ("int8", "fp8")
CODES = ("int4", "int4_64_float16_zeros", "int4_all_float32", "nf4_64", "fp4_128")
# As blocks of GGUF are kept; and GPTQ with small groups.
GGUF = (
    *("int4_32_float16_offsets", "int5_32_float16", "int6_16_levels", "int4_32_levels_offsets", "int8_32_float16"),
    *("int5_32_levels_offsets", "int4_16_levels", "iq4_32_float16", "iq4_32_levels", "int8_16_levels"),
    "int4_32_float16_zeros",
)
Tiling = MosaicTiling
TILINGS = [
    (3, 128, 512, Tiling(64, 8, 128, 4, side_by_side=2, in_turns=2)),
    (5, 192, 320, Tiling(64, 8, 64, 2, side_by_side=2)),  # half a tile of outputs
    (8, 64, 384, Tiling(64, 8, 128, 4, in_turns=4)),  # a copy past the last input
    (24, 256, 192, Tiling(128, 16, 64, 3, side_by_side=2)),  # half a tile of tokens
    (16, 128, 512, Tiling(64, 16, 256, 2, keep_x=True)),
    (2, 128, 640, Tiling(64, 8, 128, 2, in_turns=2, num_splits=2)),  # uneven splits
    (9, 64, 1024, Tiling(64, 16, 64, 2, in_sequence=2)),
    (9, 64, 1024, Tiling(64, 16, 64, 3, in_sequence=4)),
    (90, 64, 128, Tiling(64, 96, 64, 2)),  # results leave in two pieces
]
OF_BFLOAT16 = [
    (5, 96, 384, Tiling(64, 8, 128, 2)),  # half a tile of outputs, and results that are written past the last one
    (24, 96, 256, Tiling(64, 16, 64, 3, side_by_side=2)),
    (24, 1, 256, Tiling(64, 16, 64, 3)),
    (24, 7, 256, Tiling(64, 16, 64, 3)),
    (9, 7, 512, Tiling(64, 16, 64, 2, in_sequence=2)),
    (11, 96, 640, Tiling(64, 16, 128, 2, num_splits=2)),
]
OF_CODES = [
    (3, 128, 512, Tiling(64, 8, 256, 4, side_by_side=2, in_turns=2, keep_x=True)),
    (11, 192, 384, Tiling(64, 16, 256, 2, side_by_side=2)),  # half a tile of outputs, half a copy, and a padded token
    (8, 64, 384, Tiling(64, 8, 128, 4, in_turns=4)),  # a copy past the last input
    (2, 128, 640, Tiling(64, 8, 128, 2, in_turns=2, num_splits=2)),  # uneven splits
    (16, 128, 768, Tiling(64, 16, 128, 3, num_splits=2, in_sequence=2)),  # a part past the last input
]


class TestFewTokensMatmul:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, request, implementation):
        if "interpreted" in request.node.callspec.id and not INTERPRETS:
            pytest.skip("jax 0.10 does not interpret Mosaic kernels of this kind")
        self.implementation = implementation
        self.compiled = "compiled" in request.node.callspec.id

    def product(self, x, weight: Weight, tiling: MosaicTiling, dtype=jnp.float32):
        if self.compiled and weight.inputs % tiling.inputs:
            pytest.skip("a copy that goes past the last input compiles for no GPU; the kernel's own tilings have none")

        def kernel(x, weight, interpret=False):
            how: dict[str, Any] = {}
            if interpret:
                from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

                how = {"interpret": InterpretGPUParams(), "instances": 3}  # fewer than tiles
            return few_tokens_matmul_kernel(x, weight, dtype, tiling=tiling, **how)

        def reference(x, weight):
            y = few_tokens._reference(x, weight, dtype=dtype, split_inputs=None, in_parts=tiling.num_splits > 1)
            return y.summands if isinstance(y, PartialSums) else y

        y = self.implementation(reference, kernel)(x, weight)
        return y if tiling.num_splits == 1 else PartialSums(y).total(dtype)

    @pytest.mark.parametrize(
        ("kind", "M", "outputs", "inputs", "tiling"),
        [
            *((kind, *case) for kind in KINDS for case in TILINGS),
            *(("bfloat16", *case) for case in TILINGS if case[3].num_stages >= 2 * case[3].in_turns),
            *(("bfloat16", *case) for case in OF_BFLOAT16),
            *((kind, *case) for kind in (*CODES, "nvfp4") for case in OF_CODES),
            *(
                (kind, *sizes, tiling._replace(inputs=128) if "int8" in kind else tiling)
                for i, kind in enumerate(GGUF)
                for *sizes, tiling in (OF_CODES[i % 2], OF_CODES[2 + i % 3])
            ),
            *(("mxfp8", *sizes, tiling._replace(inputs=128)) for *sizes, tiling in OF_CODES),
        ],
        ids=str,
    )
    def test_agrees_with_float64(self, kind, M, outputs, inputs, tiling):
        args, numbers = nvfp4_problem(M, outputs, inputs) if kind == "nvfp4" else problem(M, outputs, inputs, kind)
        check(self.product(*args, tiling), args, numbers)

    @pytest.mark.parametrize("num_splits", [1, 2])
    def test_tokens_that_are_no_whole_eights(self, num_splits):
        args, numbers = problem(11, 128, 512, "fp8_block")
        check(self.product(*args, Tiling(64, 8, 128, 4, in_turns=2, num_splits=num_splits)), args, numbers)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_largest_and_the_smallest_numbers_are_exact(self, kind):
        args, numbers = problem(5, 64, 256, kind, extreme=True)
        check(self.product(*args, Tiling(64, 8, 128, 2, in_turns=2)), args, numbers)

    def test_results_are_rounded_once(self):
        args, _ = problem(3, 64, 256, "int8")
        exact, rounded = (
            self.product(*args, Tiling(64, 8, 128, 2), dtype=dtype) for dtype in (jnp.float32, jnp.bfloat16)
        )
        np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))

    def test_a_token_that_is_not_finite_leaves_the_others_alone(self):
        (x, weight), _ = problem(3, 64, 256, "fp8")
        product = functools.partial(self.product, tiling=Tiling(64, 8, 128, 2))
        clean, got = product(x, weight), product(x.at[1, 7].set(jnp.nan), weight)
        assert jnp.isnan(got[1]).any()
        np.testing.assert_array_equal(got[jnp.array([0, 2])], clean[jnp.array([0, 2])])

    def test_a_token_gets_the_same_bits_in_any_row_beside_any_others(self):
        (x, weight), _ = problem(16, 128, 256, "int8")
        product = functools.partial(self.product, tiling=Tiling(64, 8, 128, 4, in_turns=2))
        moved = product(jnp.roll(x, 3, axis=0).at[0].set(7.0), weight)
        np.testing.assert_array_equal(moved[3:], product(x, weight)[:-3])


@newer
@pytest.mark.parametrize("by", ["block", "output"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_scales_may_come_in_blocks(by, num_splits):
    """Of 128 inputs, and of 128 outputs or of each."""
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

    (x, weight), numbers = problem(5, 256, 512, "fp8")
    rows = 256 // 128 if by == "block" else 256
    scale = np.exp(np.random.default_rng(0).normal(-3, 1, (rows, 4))).astype(np.float32)
    tiling = Tiling(64, 8, 128, 4, side_by_side=2, in_turns=2, num_splits=num_splits)
    how = {"tiling": tiling, "instances": 2, "interpret": InterpretGPUParams()}
    weight = dataclasses.replace(weight, scale=jnp.asarray(scale), form=known_format("fp8_block"))
    y = few_tokens_matmul_kernel(x, weight, jnp.float32, **how)
    numbers = numbers * np.repeat(np.repeat(scale, 256 // rows, axis=0), 128, axis=1)
    got = y if num_splits == 1 else PartialSums(y).total(jnp.float32)
    check(got, (x, weight), numbers)


@pytest.mark.parametrize("instructions", [(unpack.INT8, unpack.INT8_PAIRS), (unpack.FP8, unpack.FP8_PAIRS)])
def test_numbers_are_the_same_from_a_word_as_from_two_pairs(instructions):
    word = words(np.arange(256, dtype=np.uint8))
    whole, pairs = instructions
    actual = carried_out(pairs, {"$2": word & 0xFFFF, "$3": word >> 16})
    np.testing.assert_array_equal(actual.astype(np.float32), carried_out(whole, {"$2": word}).astype(np.float32))


@pytest.mark.parametrize("zero", [None, 0, 16])
@pytest.mark.parametrize("scale", [2.0**-80, 0.0123291015625, -1.5546875, 2.0**34])
def test_a_word_of_codes_becomes_differences_times_their_scale(zero, scale):
    """The four bytes of a thread: the numbers of its four pairs are those of neighbouring inputs. The first 16 inputs have
    one scale, and the others half of it."""
    codes = np.random.default_rng(0).integers(16, size=(64, 128)).astype(np.uint8)
    word = pack_codes(codes).view(np.uint32).reshape(-1)  # of 32 inputs, of a thread
    scales, shrink = (scale, scale / 2), unpack.CODE_SHRINK
    if zero is None:
        asm = unpack.word_of_codes(4, 0)
        operands = [of / shrink * by for of in scales for by in (2.0**133, 2.0**129, -8)]
    else:
        asm, operands = unpack.DIFFERENCES, [number for of in scales for number in (-zero / shrink, of)]
    pairs = carried_out(asm, {"$4": word, **_operands(operands, word.size)}, results=4)
    actual = pairs.astype(np.float64).reshape(64, 4, 4, 4, 2)  # lines, 32 inputs, threads, eight inputs, a pair
    differences = codes.astype(np.float64) - (8 if zero is None else zero)
    by = np.repeat(scales, 16)
    wanted = (differences.reshape(64, 4, 32) * by).astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(actual * shrink, wanted.reshape(64, 4, 4, 4, 2).swapaxes(2, 3))


@pytest.mark.parametrize("bits", [5, 6])
def test_words_of_codes_with_other_bits_become_numbers_times_their_scale_and_more(bits):
    """Every code, in each place of a block, of whose words several share one with other bits."""
    codes = (
        np.random.default_rng(0).permuted(np.arange(64 * 128).reshape(64, 128) % (1 << bits), axis=1).astype(np.uint8)
    )
    words, shrink = pack_codes(codes, bits).view(np.uint32), unpack.CODE_SHRINK
    low, other = words[:, :16].reshape(64, 4, 4), words[:, 16:].reshape(64, -1, 4)
    numbers = [(0.75, -1.5), (-1.4375, 11.0)]  # a scale and an offset of the first 16 inputs, and of the others
    operands = [number / shrink for scale, offset in numbers for number in (2.0**133 * scale, offset)]
    sharing = 4 // other.shape[1]
    for chunk in range(4):
        asm = unpack.word_of_codes(bits, chunk % sharing)
        registers = {"$4": low[:, chunk].reshape(-1), "$5": other[:, chunk // sharing].reshape(-1)}
        more = {f"${int(name[1:]) + 1}": word for name, word in _operands(operands, 256).items()}
        pairs = carried_out(asm, registers | more, results=4).astype(np.float64).reshape(64, 4, 4, 2)
        of_chunk = codes[:, 32 * chunk : 32 * chunk + 32].reshape(64, 2, 16).astype(np.float64)
        scale, offset = (np.reshape(of, (2, 1)) for of in zip(*numbers, strict=True))
        wanted = (of_chunk * scale + offset).astype(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_array_equal(pairs * shrink, wanted.reshape(64, 4, 4, 2).swapaxes(1, 2))


def test_pairs_of_integers_become_products_with_their_scale():
    word, scale, shrink = words(np.arange(256, dtype=np.uint8)), -1.4375, unpack.CODE_SHRINK
    factors = {name: np.full(64, int(unpack.twice(by * scale / shrink), 16), np.uint32) for name, by in FACTORS_OF_INT8}
    pairs = carried_out(unpack.INT8_PAIRS_TIMES, {"$2": word & 0xFFFF, "$3": word >> 16, **factors})
    wanted = (np.arange(256, dtype=np.uint8).view(np.int8) * scale).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(pairs.astype(np.float64).reshape(-1) * shrink, wanted.astype(np.float64))


FACTORS_OF_INT8 = (("$4", 2.0**133), ("$5", -128.0))


def _operands(numbers, size: int) -> dict[str, np.ndarray]:
    """Registers from $5 on, each with one of some numbers of bfloat16 twice in all of ``size`` words."""
    return {f"${5 + i}": np.full(size, int(unpack.twice(number), 16), np.uint32) for i, number in enumerate(numbers)}


def test_a_word_of_nvfp4_becomes_products_with_their_scales():
    """Every code with every scale that is a number, in each place of a word: exactly."""
    bits = np.arange(0x7F, dtype=np.uint8)
    scales = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = np.tile(np.arange(16, dtype=np.uint8), (len(bits), 8))  # of 128 inputs
    for first, asm in zip((0, 2), unpack.NVFP4_WORDS, strict=True):
        for other in (0, 1):  # the scale of the first 16 inputs, and of the others
            word = pack_codes(codes).view(np.uint32).reshape(len(bits), 4, 4)  # of 32 inputs, of a thread
            of_scales = np.repeat(bits.astype(np.uint32) << np.uint32(8 * (first + other)), 16)
            pairs = carried_out(asm, {"$4": word.reshape(-1), "$5": of_scales}, results=4).astype(np.float32)
            actual = pairs.reshape(len(bits), 4, 4, 4, 2).swapaxes(2, 3) * np.float32(unpack.SHRINK)
            wanted = (nvfp4.VALUES[codes] * scales[:, None]).reshape(len(bits), 4, 2, 2, 4, 2)
            wanted[:, :, 1 - other] = 0
            np.testing.assert_array_equal(actual, wanted.reshape(actual.shape))


@newer
@pytest.mark.parametrize("kind", ["int8", *CODES])
@pytest.mark.parametrize("allow_partial_sums", [False, True])
def test_elsewhere_is_the_reference_with_as_many_partial_sums(kind, allow_partial_sums):
    (x, weight), _ = problem(6, 4096, 4096, kind)
    x = x.reshape(2, 3, -1)
    y = jax.jit(few_tokens_matmul, static_argnums=(2, 3))(x, weight, jnp.float32, allow_partial_sums)
    splits = tiling_of(x, weight, jnp.float32, allow_partial_sums).num_splits  # pyright: ignore
    assert isinstance(y, PartialSums) == (splits > 1) == allow_partial_sums
    total = y.total(jnp.float32) if isinstance(y, PartialSums) else y
    # Sums of 4,096 products that come to thousands, in two orders.
    np.testing.assert_allclose(total, weight_only_matmul_reference(x, weight), rtol=1e-5, atol=3e-3)


WEIGHTS = [
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (128256, 4096),
    (3072, 4096),
    (2880, 2880),
    (2048, 4224),
    (34816, 5120),
    (16384, 5120),
    (5120, 17408),
    (5120, 6144),
]


TOKENS = (1, 5, 16, 40, 64, 80, 120, 160, 320, 640, 2048)


@pytest.mark.parametrize(("scaled", "bits"), [(False, 8), (True, 8), (False, 4), (False, 16)])
@pytest.mark.parametrize("allow_partial_sums", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), WEIGHTS)
def test_tilings_fit_the_chip(outputs, inputs, allow_partial_sums, scaled, bits):
    if (scaled or bits == 4) and inputs % 128:
        return
    for tokens, size in itertools.product(TOKENS, (2, 4)):
        tiling = few_tokens_tiling(tokens, outputs, inputs, bits, allow_partial_sums, size, scaled, scaled)
        assert outputs % tiling.outputs == inputs % tiling.inputs == tiling.num_stages % tiling.in_turns == 0
        assert tiling.inputs % (128 if scaled or bits == 4 else 64) == 0, "a copy has whole groups"
        assert tiling.num_stages >= 2 * (tiling.in_turns if bits == 16 else 1)
        in_parts = parts_of_inputs(outputs, inputs, allow_partial_sums, scaled)[0] > 1
        assert tiling.shared_bytes(inputs, bits / 8, 4 if in_parts else size) <= SHARED
        # What the tensor cores add up, that of a group or a part beside it, and 64 converted inputs of each line.
        sums = tiling.outputs * tiling.tokens // 128 * (1 + scaled + (tiling.in_sequence > 1))
        converted = 0 if bits == 16 else tiling.outputs * 64 // 2 // 128
        assert sums + converted <= tiling.registers() - 24
        assert 128 * (tiling.warpgroups * tiling.registers() + 40) <= 65536
        if tiling.num_splits > 1:
            assert allow_partial_sums
            assert math.ceil(inputs / tiling.split_inputs(inputs)) == tiling.num_splits  # pyright: ignore


@pytest.mark.parametrize(("scaled", "bits"), [(False, 4), (False, 8), (True, 8), (False, 16)])
@pytest.mark.parametrize("allow_partial_sums", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [shape for shape in WEIGHTS if shape[1] % 128 == 0])
def test_the_order_of_sums_follows_from_the_weight_alone(outputs, inputs, allow_partial_sums, scaled, bits):
    def order(tokens: int, result_bytes: int):
        how = allow_partial_sums, result_bytes, scaled, scaled
        tiling = few_tokens_tiling(tokens, outputs, inputs, bits, *how)
        # Parts are added up in their order: by one of these three, or it would depend on which.
        assert [tiling.num_splits, tiling.in_turns, tiling.in_sequence].count(1) >= 2
        parts = tiling.num_splits * tiling.split_parts
        return parts, parts > 1 and tiling.trips(inputs) * tiling.inputs

    assert len({order(tokens, size) for tokens, size in itertools.product(range(1, 2049), (2, 4))}) == 1


@functools.cache
def _rows_among(tokens: int, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """The results of the same four tokens, first, in the middle and last among others, ``[3, 4, out]``."""
    inputs = shape[1]
    same = jax.random.normal(jax.random.key(0), (4, inputs), jnp.bfloat16)
    (_, weight), _ = nvfp4_problem(1, *shape) if kind == "nvfp4" else problem(1, *shape, kind)
    places = (0, (tokens - 4) // 2, tokens - 4)
    x = jax.random.normal(jax.random.key(tokens), (tokens, inputs), jnp.bfloat16)
    rows = []
    for place in places:
        y = few_tokens_matmul(x.at[place : place + 4].set(same), weight, jnp.float32, True)
        rows.append(np.asarray(reduce_partial_sums(y, jnp.float32))[place : place + 4])
    return np.stack(rows)


LARGE = (12288, 1024), (4096, 4096), (6144, 4096), (4096, 14336)
ORDERED = *GGUF, "int4", "int4_64_float16_zeros", "nf4_64", "nvfp4", "int8", "fp8_block", "mxfp8", "bfloat16"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "shape"),
    [*itertools.product(ORDERED, LARGE), ("bfloat16", (96, 5120)), ("bfloat16", (1, 2048))],
    ids=str,
)
def test_a_token_gets_the_same_bits_among_any_number_of_tokens(shape, kind):
    one = _rows_among(4, kind, shape)
    for tokens in (5, 16, 17, 40, 80, 81, 320, 648):
        np.testing.assert_array_equal(_rows_among(tokens, kind, shape), np.broadcast_to(one[:1], one.shape))


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "allow_partial_sums", "served"),
    [
        *[(5, 4096, 4096, False, True), (8, 4096, 4096, False, True), (80, 4096, 4096, False, True)],
        *[(9, 4096, 4096, False, False), (20, 4096, 4096, False, False)],  # no whole eights of tokens
        *[(5, 4100, 4096, False, False), (5, 4096, 4112, False, False), (5, 2880, 2880, True, True)],
        *[(5, 2880, 2880, False, False), (5, 3072, 4096, False, False), (5, 3072, 4096, True, True)],  # too few tiles
    ],
)
def test_which_products_are_served(tokens, outputs, inputs, allow_partial_sums, served, monkeypatch):
    def serves(kind: str) -> bool:
        x = jax.ShapeDtypeStruct((tokens, inputs), jnp.bfloat16)
        found = tiling_of(x, abstract_weight(kind, (outputs, inputs)), jnp.bfloat16, allow_partial_sums)
        return not isinstance(found, str)

    monkeypatch.setattr(few_tokens, "LOWERS", True)
    assert serves("fp8") == served
    if inputs % 128 == 0:
        for kind in ("fp8_block", "mxfp8", *CODES, *GGUF):
            assert serves(kind) == (served or tokens in (9, 20)), kind
        assert not serves("int8_64_bfloat16")  # of whose groups it would multiply sums
    monkeypatch.setattr(few_tokens, "LOWERS", False)
    assert not serves("fp8")


@pytest.mark.parametrize(
    ("kind", "outputs", "served"),
    [("bfloat16", 96, True), ("bfloat16", 1, True), ("bfloat16", 9, False), ("int8", 96, False), ("int8", 64, True)],
)
def test_one_order_serves_tiles_that_reach_past_the_last_output(kind, outputs, served, monkeypatch):
    monkeypatch.setattr(few_tokens, "LOWERS", True)
    x, weight = jax.ShapeDtypeStruct((5, 2048), jnp.bfloat16), abstract_weight(kind, (outputs, 2048))
    for one_order in (False, True):
        found = tiling_of(x, weight, jnp.bfloat16, one_order=one_order)
        assert isinstance(found, str) != (served and one_order)
