"""Nothing outside a checkpoint folder is read, whatever its index and links say."""

import json
import os

import numpy as np
import pytest

from convert import load_folder
from convert.cli import main


def set_shard(folder, shard):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], shard)
    path.write_text(json.dumps(index))


def test_a_pickle_among_shards_is_refused(refused, src):
    set_shard(src, "pytorch_model-00001-of-00001.bin")
    refused(src, "model.safetensors.index.json", "pytorch_model-00001-of-00001.bin")


@pytest.mark.parametrize(
    "shard",
    [
        "../elsewhere/x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x\0.safetensors",
        ".",
        "",
    ],
)
def test_shard_name_that_leaves_the_folder(refused, src, shard):
    elsewhere = src.parent / "elsewhere"
    elsewhere.mkdir()
    os.rename(src / "model-00001-of-00002.safetensors", elsewhere / "x.safetensors")
    set_shard(src, shard)
    refused(src, "model.safetensors.index.json", repr(shard))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_symbolic_link_that_leaves_the_folder(refused, src, name):
    elsewhere = src.parent / "elsewhere"
    elsewhere.mkdir()
    (src / "tokenizer.json").write_text("{}")
    os.rename(src / name, elsewhere / name)
    (src / name).symlink_to(elsewhere / name)
    refused(src, name, "symbolic link")


def test_symbolic_link_inside_the_folder(single):
    os.rename(single / "model.safetensors", single / "weights")
    (single / "model.safetensors").symlink_to("weights")
    assert load_folder(single)[1].keys()


def hub_cache(root, source):
    """``source`` rearranged as huggingface_hub stores a snapshot; returns the snapshot."""
    snapshot, blobs = root / "models--a--b" / "snapshots" / "0123abcd", root / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        os.rename(path, blobs / f"blob{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{number}")
    return snapshot


def test_hub_cache_links_are_followed(tmp_path, src):
    _, expected = load_folder(src)
    snapshot = hub_cache(tmp_path, src)
    _, found = load_folder(snapshot)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert main([str(snapshot), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out" / "config.json").is_symlink()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["revision"] == "0123abcd"


def test_hub_cache_link_to_another_repository(tmp_path, src, capsys):
    snapshot = hub_cache(tmp_path, src)
    other = tmp_path / "models--evil--c" / "blobs"
    other.mkdir(parents=True)
    os.rename((snapshot / "config.json").resolve(), other / "blob")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../../models--evil--c/blobs/blob")
    assert main([str(snapshot), str(tmp_path / "out")]) == 2
    assert "symbolic link" in capsys.readouterr().err


def test_a_folder_in_the_place_of_a_file_is_refused(refused, single):
    (single / "tokenizer.json").mkdir()
    refused(single, "tokenizer.json", "regular file")
