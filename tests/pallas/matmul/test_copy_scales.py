"""``jspec.pallas.matmul.sm90_copy_scales``: of the words that four threads of a line read, each group has its own."""

import jax.numpy as jnp
import numpy as np
import pytest
from weight_only_problems import problem

from jspec.pallas.matmul import sm90_copy_scales
from jspec.pallas.matmul.sm90_copy_scales import CopyScales, scale_words
from jspec.pallas.matmul.sm90_memory import CodeScales
from jspec.pallas.matmul.sm90_tiling import MosaicTiling
from jspec.quantization.formats import SUPER, known_format

FLOATS = ("int4", "int4_64_float16_zeros", "int4_32_float16_offsets", "int5_32_float16", "iq4_32_float16", "nf4_64")
LEVELS = ("int4_32_levels_offsets", "int4_16_levels_offsets", "int6_16_levels", "iq4_32_levels")
OUTPUTS, INPUTS = 64, 1024


@pytest.fixture(autouse=True)
def words_of_threads(monkeypatch):
    """A word is a list of what the four threads have; a half of one stands for it twice."""
    monkeypatch.setattr(sm90_copy_scales, "_of_thread", lambda word, thread: word[thread])
    monkeypatch.setattr(
        sm90_copy_scales, "_half_twice", lambda word, half: np.atleast_1d(word)[:1].view(np.uint16)[half]
    )


def read(words: np.ndarray) -> list[np.ndarray]:
    """What ``load_words`` gives of words in their order."""
    return [words[i : i + 4] for i in range(0, len(words), 4)]


@pytest.mark.parametrize("inputs", [128, 256])
@pytest.mark.parametrize("kind", [*FLOATS, "int8_32_float16"])
def test_numbers_of_a_group(kind, inputs):
    (_, weight), _ = problem(1, OUTPUTS, INPUTS, kind)
    assert weight.form is not None
    scales, stored = CopyScales(weight.form, inputs, True), np.asarray(weight.scale)
    words = np.asarray(scale_words(weight, inputs).scale)
    if not scales.words:
        assert (kind, inputs) == ("int4", 128), "half a word for a copy"
        return
    bits = stored.view(np.uint32 if stored.itemsize == 4 else np.uint16).reshape(OUTPUTS, -1, scales.numbers)
    assert words.dtype == np.int32
    for line, copy in ((0, 0), (5, 1), (63, INPUTS // inputs - 1)):
        own = words[line, copy * scales.words : (copy + 1) * scales.words].view(np.uint32)
        of_group = scales.of_line(read(own))
        for group in range(scales.groups):
            found = [np.ravel(word)[0] for word in of_group(group)]
            assert found == bits[line, copy * scales.groups + group].tolist()


@pytest.mark.parametrize("inputs", [128, 256])
@pytest.mark.parametrize("kind", [*LEVELS, "int8_16_levels"])
def test_integers_of_a_group(kind, inputs):
    form = known_format(kind)
    (_, weight), _ = problem(1, OUTPUTS, INPUTS, kind)
    scales, words = CopyScales(form, inputs, True), np.asarray(scale_words(weight, inputs).scale)
    code_scales = CodeScales(weight, 0, MosaicTiling(64, 8, inputs, 4))
    integers = (
        np.ascontiguousarray(words[..., 1:])
        .view(np.int8)
        .reshape(OUTPUTS, -1, scales.numbers, SUPER // (form.group or 1))
    )
    for line, copy in ((0, 0), (5, 1), (63, INPUTS // inputs - 1)):
        super_, word = map(int, code_scales._place(jnp.int32(copy)))
        own = words[line, super_, 1 + word :][scales.places]
        of_group = scales.of_line(["factor", *read(own)])
        for group in range(scales.groups):
            factor, *found = of_group(group)
            assert factor == "factor"
            expected = integers[line, super_, :, 4 * word + group]
            assert [np.atleast_1d(one)[:1].view(np.int8)[group % 4] for one in found] == expected.tolist()


@pytest.mark.parametrize(
    ("kind", "inputs", "groups"),
    [
        ("int4_32_levels_offsets", 256, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("int6_16_levels", 128, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("int4_64_float16_zeros", 128, [[0], [1]]),
        ("int4", 256, [[0], [0], [1], [1]]),
        ("int4_all_float32", 128, [[0], [0]]),
    ],
)
def test_groups_of_64_inputs(kind, inputs, groups):
    scales = CopyScales(known_format(kind), inputs, True)
    assert [[*scales.groups_of(first)] for first in range(0, inputs, 64)] == groups


def test_scales_that_are_no_whole_words_stay_as_they_are():
    for kind in ("int4_all_float32", "int4"):
        (_, weight), _ = problem(1, OUTPUTS, 384, kind)
        assert scale_words(weight, 128) is weight
