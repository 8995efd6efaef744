"""The types of GGUF as jspec keeps them, against what the package gguf dequantises."""

import dataclasses

import numpy as np
import pytest
from gguf_blocks import random_blocks

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.gguf import BlockWeight
from jspec.checkpoints.quantized.gguf_blocks import TYPES, WIDER
from jspec.checkpoints.quantized.stored_codes import in_eight_bits
from jspec.quantization.codes import BLOCK, HALF
from jspec.quantization.weight import Weight

gguf = pytest.importorskip("gguf")
ALL = pytest.mark.parametrize("number", TYPES, ids=lambda number: TYPES[number].name)
ROWS, INPUTS, BEFORE = 12, 1024, 96  # and bytes of the file before the tensor


def of_gguf(number: int, blocks: np.ndarray) -> np.ndarray:
    return gguf.dequantize(blocks.reshape(len(blocks), -1), gguf.GGMLQuantizationType(number))


def in_file(tmp_path, number: int, blocks: np.ndarray) -> BlockWeight:
    """A tensor in a file that has other bytes before it and behind it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(BEFORE) + blocks.tobytes() + bytes(7))
    shape = ROWS, INPUTS
    return BlockWeight("w", path.name, path, shape, "float32", type=TYPES[number], start=BEFORE, held=ROWS)


def kept(weight: BlockWeight) -> np.ndarray:
    """What the arrays stand for that are kept of a weight."""
    stored = weight.stored()
    assert stored is not None
    declared = stored.form.arrays((weight.shape[0], weight.shape[1]))
    arrays = {name: array.read() for name, array in stored.arrays.items()}
    assert {name: (array.shape, array.dtype.name) for name, array in arrays.items()} == declared
    halves = (slice(0, 5), slice(5, None))  # as shards read them
    for name, array in stored.arrays.items():
        if name != "order":
            parts = [array.read_part((half,)) for half in halves]
            np.testing.assert_array_equal(np.concatenate(parts), arrays[name])
    return np.asarray(Weight.of(arrays, stored.form, weight.shape[1]).dequantize())


@ALL
def test_numbers_are_those_that_gguf_dequantises(number, tmp_path):
    kind = TYPES[number]
    assert (kind.weights, kind.bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    blocks = random_blocks(kind, ROWS, INPUTS)
    weight, wanted = in_file(tmp_path, number, blocks), of_gguf(number, blocks)
    np.testing.assert_array_equal(kept(weight), wanted)
    np.testing.assert_array_equal(weight.read(), wanted)
    np.testing.assert_array_equal(weight.read_part((slice(3, 9), slice(70, 1000))), wanted[3:9, 70:1000])
    assert (kind.form.bytes((ROWS, INPUTS)) <= 1.05 * blocks.size) == (kind.name not in WIDER)


@pytest.mark.parametrize("number", [2, 3, 20, 39], ids=lambda number: TYPES[number].name)
def test_rows_that_end_within_a_block_of_packed_codes(number):
    kind, inputs = TYPES[number], 160
    blocks = random_blocks(kind, ROWS, inputs)
    packed = kind.array("weight", blocks)
    assert (packed[:, -HALF + inputs % BLOCK // 2 :] == 0x88).all()  # codes that are missing are 8
    found = Weight(packed, kind.array("scale", blocks), form=kind.form, inputs=inputs).dequantize()
    np.testing.assert_array_equal(found, of_gguf(number, blocks))


@ALL
def test_some_rows_in_another_order(number, tmp_path):
    rows = np.array([7, 2, 3, 4, 11, 0, 7])
    blocks = random_blocks(TYPES[number], ROWS, INPUTS, seed=1)
    some = {"shape": (len(rows), INPUTS), "rows": lambda: rows}
    weight = dataclasses.replace(in_file(tmp_path, number, blocks), **some)
    np.testing.assert_array_equal(kept(weight), of_gguf(number, blocks)[rows])
    np.testing.assert_array_equal(weight.read_part((slice(2, 6),)), of_gguf(number, blocks)[rows[2:6]])


@ALL
def test_columns_in_another_order(number, tmp_path):
    """They are kept as the order of inputs, where there is such a format; MXFP4 and NVFP4 are dequantised."""
    columns = np.random.default_rng(2).permutation(INPUTS)
    blocks = random_blocks(TYPES[number], ROWS, INPUTS, seed=2)
    weight = dataclasses.replace(in_file(tmp_path, number, blocks), columns=lambda: columns)
    wanted = of_gguf(number, blocks)[:, columns]
    np.testing.assert_array_equal(weight.read(), wanted)
    if weight.stored() is None:
        assert TYPES[number].name in ("MXFP4", "NVFP4")
    else:
        np.testing.assert_array_equal(kept(weight), wanted)


@pytest.mark.parametrize(("number", "byte"), [(2, 0), (3, 2), (12, 0), (12, 2), (14, 208), (21, 0)])
def test_scales_that_are_no_numbers_are_refused(number, byte, tmp_path):
    blocks = random_blocks(TYPES[number], ROWS, INPUTS)
    blocks[5, 1, byte : byte + 2] = np.array([np.inf], np.float16).view(np.uint8)
    weight = in_file(tmp_path, number, blocks)
    for read in (weight.read, lambda: kept(weight)):
        with pytest.raises(Refusal, match="'w' holds a scale that is no number"):
            read()


def test_scales_of_mxfp4_that_are_no_powers_are_refused(tmp_path):
    blocks = random_blocks(TYPES[39], ROWS, INPUTS)
    blocks[3, 0, 0] = 255
    with pytest.raises(Refusal, match="'w' holds a scale above 133"):
        in_file(tmp_path, 39, blocks).read()


@ALL
def test_codes_of_four_bits_are_the_same_numbers_in_eight(number, tmp_path):
    """As maps have them that are read together with some of eight bits. Those with offsets stay as they are."""
    blocks = random_blocks(TYPES[number], ROWS, INPUTS)
    stored = in_file(tmp_path, number, blocks).stored()
    assert stored is not None
    wide = in_eight_bits(stored, INPUTS)
    assert (wide.form.bits == 8) == (stored.form.bits == 8 or TYPES[number].name in ("Q4_0", "Q3_K"))
    found = Weight.of({name: array.read() for name, array in wide.arrays.items()}, wide.form, INPUTS).dequantize()
    np.testing.assert_array_equal(found, of_gguf(number, blocks))
