"""Weights whose config.json says that they were quantised symmetrically: what is stored may not contradict it.

Published GPTQ files store the zero of a symmetric weight, 8, either as 8 or less one, under both names of the format."""

import itertools

import numpy as np
import pytest
from block_checkpoints import KINDS, Kind, block_checkpoint
from packed_weights import Stored, compressed_config, gptq, gptq_config, pack_config, pack_quantized
from safetensors.numpy import load_file
from tiny import write_weights

from convert import Refusal, load_folder
from jspec.checkpoints.checkpoint import Checkpoint

DOWN = "model.layers.1.mlp.down_proj"  # [64, 96]
ZEROS = f"{DOWN}.qzeros"  # [12, 8], eight zeros in a number
PARTS = [(slice(0, 32),), (slice(32, None),), (slice(None), slice(40, None)), (slice(24, 40), slice(8, 16)), ()]
FIX = "; set sym to false if the weights were not quantised symmetrically, else fetch the file again"
pytestmark = pytest.mark.filterwarnings("ignore:.*are dequantised as they are read:UserWarning")


def stored_as(zero: int):
    """A function that stores a symmetric weight in GPTQ's form with ``zero`` for its zeros."""

    def store(weight: np.ndarray) -> Stored:
        parts, wide = gptq(weight, symmetric=True)
        return {**parts, ".qzeros": np.full_like(parts[".qzeros"], _words(zero))}, wide

    return store


def _words(*zeros: int) -> np.int32:
    """Eight zeros in a number; the last one counts for all that are not given."""
    every = [*zeros, *[zeros[-1]] * (8 - len(zeros))]
    return np.uint32(sum(zero << 4 * i for i, zero in enumerate(every))).view(np.int32)


def down(src):
    return Checkpoint.open(src).hugging_face.tensors[f"{DOWN}.weight"]


LABELS = {
    "gptq": {"checkpoint_format": "gptq", "sym": True},
    "gptq_v2": {"checkpoint_format": None, "format": "gptq_v2", "sym": True},
    "none": {"checkpoint_format": None, "sym": None},  # without ``sym`` a file is symmetric
}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("zero", range(16))
def test_symmetric_gptq(tmp_path, label, zero):
    """Of all values that are stored under any label, two are the zero of a symmetric weight, and mean the same."""
    src = block_checkpoint(tmp_path / "src", Kind(gptq_config(**LABELS[label]), stored_as(zero), ""))
    wide = load_file(tmp_path / "src-wide" / "model.safetensors")[f"{DOWN}.weight"]
    for part in PARTS:  # each is the first one that is read of its weight
        if zero in (7, 8):
            np.testing.assert_array_equal(down(src).read_part(part), wide[part])
            continue
        with pytest.raises(Refusal) as refusal:
            down(src).read_part(part)
        said = (
            f"model.safetensors: tensor '{ZEROS}' holds {zero}: expected 7 everywhere or 8 everywhere, because quanti"
        )
        assert str(refusal.value).startswith(said)
        assert str(refusal.value).endswith(FIX)


@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
def test_asymmetric_gptq_goes_by_its_label(tmp_path, label):
    """An 8 that is stored less one is a 9, also where all zeros are equal."""
    for zero in (7, 8, 3):
        config = gptq_config(sym=False, checkpoint_format=label)
        src = block_checkpoint(tmp_path / f"{zero}", Kind(config, stored_as(zero), ""))
        tensors = load_file(src / "model.safetensors")
        scales = np.repeat(tensors[f"{DOWN}.scales"], 8, axis=0).T.astype(np.float32)
        wide = load_file(tmp_path / f"{zero}-wide" / "model.safetensors")[f"{DOWN}.weight"]
        codes = np.round(wide / scales) + 8
        meant = zero + (label == "gptq")
        np.testing.assert_array_equal(down(src).read(), (codes - meant).astype(np.float32) * scales)


@pytest.mark.parametrize("place", [(0, 0), (11, 7), (6, 3)])
@pytest.mark.parametrize(("zero", "other"), [*itertools.permutations((7, 8)), (7, 0), (8, 9), (7, 15)])
def test_one_zero_of_many(tmp_path, place, zero, other):
    """A tensor that holds both 7 and 8 was not quantised symmetrically. It is refused whichever part is read."""
    src = block_checkpoint(tmp_path / "src", Kind(gptq_config(sym=True), stored_as(zero), ""))
    tensors = load_file(src / "model.safetensors")
    tensors[ZEROS][place] = _words(zero, zero, other, zero)
    write_weights(src, tensors)
    held = "both 7 and 8" if other in (7, 8) else other
    for part in PARTS:
        with pytest.raises(Refusal, match=rf"tensor '{DOWN}\.qzeros' holds {held}: expected 7 everywhere or 8 ever"):
            down(src).read_part(part)
    with pytest.raises(Refusal, match=rf"tensor '{DOWN}\.qzeros' holds {held}"):
        load_folder(src)


def test_tensors_may_differ_from_each_other(tmp_path):
    src = block_checkpoint(tmp_path / "src", Kind(gptq_config(sym=True), stored_as(7), ""))
    tensors = load_file(src / "model.safetensors")
    tensors[ZEROS][:] = _words(8)
    write_weights(src, tensors)
    wide = load_folder(tmp_path / "src-wide", "float32")[1]
    for name, array in load_folder(src, "float32")[1].items():
        np.testing.assert_array_equal(array, wide[name])


def test_zeros_are_read_once(tmp_path, monkeypatch):
    """Whole, with the first part of a weight; a weight that is not symmetric reads those of a part."""
    for symmetric, expected in ((True, [(12, 8)]), (False, [(12, 4), (12, 4), (7, 8), (1, 2), (12, 8)])):
        kind = Kind(gptq_config(sym=symmetric), stored_as(7), "")
        weight, read = down(block_checkpoint(tmp_path / f"{symmetric}", kind)), []
        parts = type(weight.zeros).read_part

        def counting(tensor, index, read=read, parts=parts):
            found = parts(tensor, index)
            if tensor.name == ZEROS:
                read.append(found.shape)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(type(weight.zeros), "read_part", counting)
            patch.setattr(type(weight.zeros), "read", lambda tensor, counting=counting: counting(tensor, ()))
            for part in PARTS:
                weight.read_part(part)
        assert read == expected


@pytest.mark.parametrize("value", [1, "true", [True]])
def test_sym_is_a_boolean(tmp_path, value):
    src = block_checkpoint(tmp_path / "src", Kind(gptq_config(sym=value), gptq, ""))
    with pytest.raises(Refusal, match=r"quantization_config\.sym=.*: expected true or false"):
        load_folder(src)


def refuses(folder, words):
    with pytest.raises(Refusal) as refusal:
        load_folder(folder)
    assert words in str(refusal.value)


@pytest.mark.parametrize("said", [True, None])
def test_zeros_beside_symmetric_pack_quantized(tmp_path, said):
    kind = Kind(pack_config(symmetric=said), lambda weight: pack_quantized(weight, symmetric=False), "")
    refuses(
        block_checkpoint(tmp_path / "src", kind),
        "_proj.weight_zero_point' is there, but quantization_config.config_groups.group_0.weights.symmetric, which is true",
    )


def test_no_zeros_beside_asymmetric_pack_quantized(tmp_path):
    kind = Kind(pack_config(symmetric=False), pack_quantized, "")
    refuses(block_checkpoint(tmp_path / "src", kind), "_proj.weight_zero_point' is missing, and ")


@pytest.mark.parametrize("said", [{"sym": True}, {"zero_point": False}, {"sym": True, "zero_point": False}])
def test_awq_has_the_zeros_that_are_stored(tmp_path, said):
    """It stores every zero as it is. transformers writes ``sym: true`` beside ``zero_point: true``, and AutoRound
    ``zero_point: false`` of symmetric weights, beside zeros of 8."""
    kind = KINDS["awq"]
    src = block_checkpoint(tmp_path / "src", Kind({**kind.config, **said}, kind.store, ""))
    wide = load_file(tmp_path / "src-wide" / "model.safetensors")[f"{DOWN}.weight"]
    np.testing.assert_array_equal(down(src).read(), wide)


def test_asymmetric_fp8(tmp_path):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    config = compressed_config("float-quantized", symmetric=False, **weights)
    src = block_checkpoint(tmp_path / "src", Kind(config, gptq, ""))
    refuses(src, "weights.symmetric=False: expected True; of quantised checkpoints jspec reads")
