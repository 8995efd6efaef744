"""The files of the arrays of a converted folder: which have several, how many there are, and what is read of them."""

import itertools
import json
import math

import numpy as np
import orbax.checkpoint as ocp
import pytest
from engines import TARGET
from tiny import tiny_checkpoint

from benchmarks.shapes import GPT_OSS_120B, LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, head_for
from convert import Refusal, check, chunks, convert, load_folder
from convert.chunks import MOST, chunk_shapes
from convert.cli import main
from jspec.checkpoints.converted.manifest import SMALL
from jspec.checkpoints.converted.orbax import stored_arrays
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.tensors.params import stored_params
from jspec.config import Shards
from jspec.models.sharding import indices_of

DOWN, OUT = "layers.0.mlp.down.weight", "layers.1.attention.out.weight"


@pytest.fixture
def src(tmp_path, monkeypatch):
    """A checkpoint whose small arrays are written in chunks as large ones are."""
    monkeypatch.setattr(chunks, "SMALLEST", 0)
    return tiny_checkpoint(tmp_path / "src")


def files_of(folder, name: str) -> set[str]:
    return {path.name for path in (folder / "params" / name).iterdir()} - {".zarray"}


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B, QWEN3_30B_A3B, GPT_OSS_120B], ids=lambda c: c.architecture)
def test_shards_have_whole_chunks(config):
    """Of arrays that are dealt along another axis than the first, while all others are one file."""
    arrays = stored_params(config, "bfloat16")
    shapes, files = chunk_shapes(config, arrays), 0
    for name, split in Shards(2).splits(config).items():
        (shape, dtype), chunk = arrays[name], shapes[name]
        counts = [size // each for size, each in zip(shape, chunk, strict=True)]
        files += math.prod(counts)
        assert all(size == count * each for size, count, each in zip(shape, counts, chunk, strict=True))
        if not split.axis:
            assert chunk == shape
            continue
        assert math.prod(counts) == counts[split.axis]
        assert counts[split.axis] == 1 or SMALL < math.prod(chunk) * dtype.itemsize < 64 << 20
        shard_counts = (2, 4, 8) if counts[split.axis] > 1 else ()
        for count, shard in itertools.product(shard_counts, (0, 1)):
            [index] = indices_of(shape, split, config.dimensions, Shards(count), shard)
            part = index[split.axis]
            assert part.start % chunk[split.axis] == part.stop % chunk[split.axis] == 0
    assert files < 4000


@pytest.mark.parametrize(
    ("width", "count"), [(28672, 16), (28672 + 8, 8), (28672 + 4, 4), (28672 + 2, 2), (28673, 1), (4096, 4)]
)
def test_all_chunks_are_of_one_size(monkeypatch, width, count):
    """Half as many where so many would not be, or where they would be small."""
    arrays = {"layers.0.mlp.down.weight": ((512, width), np.dtype(np.uint16))}
    monkeypatch.setattr(chunks, "SMALLEST", 512 << 10)
    assert chunk_shapes(TARGET, arrays) == {"layers.0.mlp.down.weight": (512, width // count)}


def test_draft_heads_are_one_file_an_array():
    config = head_for(LLAMA_70B, "eagle3")
    arrays = stored_params(config, "bfloat16")
    assert chunk_shapes(config, arrays) == {name: shape for name, (shape, _) in arrays.items()}


def test_small_arrays_are_one_file(tmp_path):
    convert(tiny_checkpoint(tmp_path / "src"), tmp_path / "out")
    assert files_of(tmp_path / "out", DOWN) == {"0.0"}


@pytest.mark.parametrize("quantize", [None, "int8", "fp8", "int4"])
def test_chunks_hold_the_same_numbers(src, tmp_path, monkeypatch, quantize):
    """Which earlier versions wrote."""
    convert(src, tmp_path / "out", quantize=quantize, verify="shapes")
    monkeypatch.setattr(chunks, "MOST", 1)
    convert(src, tmp_path / "old", quantize=quantize, verify="shapes")
    assert files_of(tmp_path / "old", DOWN) == {"0.0"}
    assert files_of(tmp_path / "out", DOWN) == {f"0.{i}" for i in range(MOST)}
    (_, found), (_, expected) = load_folder(tmp_path / "out"), load_folder(tmp_path / "old")
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        assert array.tobytes() == expected[name].tobytes()


def test_orbax_restores_chunks(src, tmp_path):
    convert(src, tmp_path / "out")
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "out" / "params")
    np.testing.assert_array_equal(tree["layers"]["1"]["attention"]["out"]["weight"], load_folder(src)[1][OUT])


def test_files_of_other_shards_are_not_needed(src, tmp_path):
    """An array [64, 96] of 16 chunks, of which a quarter of the columns is four."""
    convert(src, tmp_path / "out")
    whole, params = load_folder(tmp_path / "out")[1][DOWN], tmp_path / "out" / "params"
    array = stored_arrays(Folder(tmp_path / "out"), "params")[DOWN]
    for number in (*range(4), *range(8, MOST)):
        (params / DOWN / f"0.{number}").unlink()
    for index in ((slice(None), slice(24, 48)), (slice(3, 9), slice(30, 31)), (slice(0, 0),)):
        np.testing.assert_array_equal(array.read(index), whole[index])
    for index in ((), (slice(None), slice(23, 48)), (slice(None), slice(24, 49))):
        with pytest.raises(Refusal, match=rf"'{DOWN}' cannot be restored \(.*; convert the checkpoint again"):
            array.read(index)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x"], ids=["short", "long"])
def test_a_chunk_of_another_size_is_refused(src, tmp_path, change):
    """Beside the manifest, which notices it before."""
    convert(src, tmp_path / "out")
    path = tmp_path / "out" / "params" / DOWN / "0.3"
    size = len(path.read_bytes())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(Refusal, match=rf"0\.3 has {len(change(bytes(size)))} bytes, not {size}"):
        stored_arrays(Folder(tmp_path / "out"), "params")[DOWN].read()
    with pytest.raises(Refusal, match=rf"{DOWN}/0\.3: damaged, it has"):
        load_folder(tmp_path / "out")


def test_every_chunk_is_in_the_manifest(src, tmp_path, capsys):
    convert(src, tmp_path / "out")
    assert check(tmp_path / "out") == []
    names = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    assert {f"params/{DOWN}/{file}" for file in files_of(tmp_path / "out", DOWN)} < names.keys()
    path = tmp_path / "out" / "params" / DOWN / "0.9"
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    assert main(["--check", str(tmp_path / "out")]) == 1
    assert f"{path}: damaged, its SHA-256 does not match" in capsys.readouterr().out
    path.unlink()
    assert check(tmp_path / "out") == [f"{path}: missing"]


def test_chunks_of_zeros_have_files(src, tmp_path, monkeypatch):
    """Or the manifest would say less than the folder holds."""
    monkeypatch.setattr(
        "convert.quantize.HuggingFaceModel.param", lambda self, name, dtype: np.zeros(self.shapes[name], dtype)
    )
    convert(src, tmp_path / "out", dtype="float32")
    assert files_of(tmp_path / "out", DOWN) == {f"0.{i}" for i in range(MOST)}
    assert not load_folder(tmp_path / "out")[1][DOWN].any()


def test_shapes_are_those_of_the_arrays(src, tmp_path):
    convert(src, tmp_path / "out")
    shapes = {name: array.shape for name, array in load_folder(src)[1].items()}
    arrays = stored_arrays(Folder(tmp_path / "out"), "params")
    assert {name: array.shape for name, array in arrays.items()} == shapes
