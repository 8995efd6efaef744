"""A checkpoint folder is opened once: each JSON file is parsed once, and the bytes that are loaded are the bytes that are
hashed."""

import collections
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny_heads
from mtp_checkpoints import with_layers
from tiny import tiny_checkpoint, tiny_tokenizer

import jspec
from convert import Refusal, convert
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.converted import manifest as manifests
from jspec.checkpoints.files import folder as folders

SMALL = {"max_batch": 1, "max_len": 32, "page_size": 16, "prefill_chunk": 16, "num_draft_tokens": 2}
WEIGHT = "params/layers.0.mlp.down.weight"


@pytest.fixture
def parses(monkeypatch):
    """Path of a JSON file -> how often it was parsed."""
    counts = collections.Counter()
    parse = folders.parse_json

    def counted(data, where):
        counts[Path(where).resolve()] += 1
        return parse(data, where)

    monkeypatch.setattr(folders, "parse_json", counted)
    return counts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A Hugging Face folder with a tokenizer, and ``converted`` beside it."""
    src = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "src", num_hidden_layers=8)
    tiny_tokenizer(src)
    (src / "generation_config.json").write_text("{}")
    convert(src, src.parent / "converted")
    return src


@pytest.mark.parametrize("draft", [tiny_checkpoint, tiny_heads.eagle, tiny_heads.speculators, tiny_heads.pard])
@pytest.mark.parametrize("converted", [False, True], ids=["hugging face", "converted"])
def test_each_json_file_is_parsed_once(target, tmp_path, parses, draft, converted):
    folder = draft(tmp_path / "draft")
    if draft in (tiny_checkpoint, tiny_heads.pard):
        tiny_tokenizer(folder)
    if converted:
        convert(folder, tmp_path / "converted")
        target, folder = target.parent / "converted", tmp_path / "converted"
    parses.clear()
    jspec.load(target, folder, check_files=converted, **SMALL)
    names = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert {(target / name).resolve() for name in names} <= parses.keys()
    assert converted or (folder / "config.json").resolve() in parses  # that of a converted head is in its manifest
    assert not converted or (folder / "manifest.json").resolve() in parses
    assert set(parses.values()) == {1}


def test_each_json_file_is_parsed_once_for_a_head_that_names_its_target(target, tmp_path, parses):
    head = tiny_heads.speculators(tmp_path / "head", verifier=str(target))
    jspec.load(head, **SMALL)
    assert {target / "config.json", head / "config.json"} <= parses.keys()
    assert set(parses.values()) == {1}


@pytest.mark.parametrize("converted", [False, True], ids=["hugging face", "converted"])
def test_each_json_file_is_parsed_once_for_layers_in_the_target(tmp_path, parses, converted):
    folder = with_layers(tmp_path / "src")
    if converted:
        convert(folder, tmp_path / "out")
        folder = tmp_path / "out"
    parses.clear()
    jspec.load(folder, "mtp", check_files=converted, **SMALL)
    assert set(parses.values()) == {1}


def test_opening_reads_nothing(tmp_path, monkeypatch):
    """Not even headers: a pickle is not given to the process that unpickles before its tensors are asked for."""
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    checkpoint = Checkpoint.open(tmp_path, allow_pickle=True)
    with pytest.raises(Refusal, match=r"config\.json: cannot be read as JSON"):
        checkpoint.params()


def test_pickles_are_read_where_they_are_allowed(tmp_path):
    torch = pytest.importorskip("torch")
    folder = tiny_heads.medusa(tmp_path / "head")
    expected = Checkpoint.open(folder).params()
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in _tensors(folder).items()}
    shutil.copytree(folder, tmp_path / "pickled")
    (tmp_path / "pickled" / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "pickled" / "medusa_lm_head.pt")
    params = Checkpoint.open(tmp_path / "pickled", allow_pickle=True).params()
    assert params.keys() == expected.keys()
    for name in params:
        np.testing.assert_array_equal(params[name], expected[name])
    with pytest.raises(Refusal, match="pickle weights are refused"):
        Checkpoint.open(tmp_path / "pickled").params()


def _tensors(folder):
    return {name: tensor.read() for name, tensor in Checkpoint.open(folder).hugging_face.tensors.items()}


@pytest.mark.parametrize("converted", [False, True], ids=["hugging face", "converted"])
def test_kind_is_language_model_or_draft_head(target, tmp_path, converted):
    for make, kind in (
        (tiny_heads.eagle, "draft_head"),
        (tiny_heads.medusa, "draft_head"),
        (tiny_heads.pard, "language_model"),
        (tiny_checkpoint, "language_model"),
    ):
        folder = make(tmp_path / make.__name__)
        if converted:
            convert(folder, tmp_path / f"{make.__name__} converted")
            folder = tmp_path / f"{make.__name__} converted"
        checkpoint = Checkpoint.open(folder)
        assert checkpoint.kind == kind
        if kind == "draft_head":
            with pytest.raises(Refusal, match="holds a draft head, not a language model"):
                checkpoint.language_model()
        else:
            assert checkpoint.language_model()[0] == checkpoint.target_config


@pytest.fixture
def hashed(monkeypatch):
    """The files that are read for nothing but their digest; with no file small enough to be hashed in any case."""
    names, sha256 = [], manifests.sha256
    monkeypatch.setattr(manifests, "SMALL", -1)
    monkeypatch.setattr(manifests, "sha256", lambda path: names.append(path) or sha256(path))
    return names


def test_no_loaded_file_is_read_again_to_be_hashed(target, tmp_path, hashed):
    """And every file is hashed all the same, those of weights, of the tokenizer and others."""
    out = shutil.copytree(target.parent / "converted", tmp_path / "out")
    jspec.load(out, check_files=True, **SMALL)
    numbers = [path for path in hashed if path.name[0].isdigit()]
    assert not numbers
    assert not {"config.json", "tokenizer.json", "generation_config.json"} & {path.name for path in hashed}
    checkpoint = Checkpoint.open(out)
    dict(checkpoint.language_model(check_files=True)[1])
    assert checkpoint.tokenizer is not None
    hashed.clear()
    checkpoint.require_intact()
    digests = checkpoint.folder.digests or {}
    assert digests.keys().isdisjoint(hashed)
    names = json.loads((out / "manifest.json").read_text())["files"].keys()
    assert {*digests, *hashed} == {(out / name).resolve() for name in (*names, "manifest.json")}


def test_the_bytes_that_are_loaded_are_hashed(target, tmp_path, monkeypatch):
    """A file that changes after the first look is noticed when it is loaded, and one that changes later does no harm."""
    monkeypatch.setattr(manifests, "SMALL", 1000)
    out = shutil.copytree(target.parent / "converted", tmp_path / "out")
    checkpoint = Checkpoint.open(out)
    checkpoint.require_intact(hash_all=False)
    _, params = checkpoint.language_model(check_files=True)
    good = dict(params)["layers.0.mlp.down.weight"]
    file = out / WEIGHT / "0.0"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    checkpoint.require_intact()
    fresh = Checkpoint.open(out)
    fresh.require_intact(hash_all=False)
    _, params = fresh.language_model(check_files=True)
    with pytest.raises(Refusal, match=f"out/{WEIGHT}/0.0: damaged, its SHA-256 does not match; convert the checkpoint"):
        params["layers.0.mlp.down.weight"]
    assert not np.array_equal(fresh.language_model()[1]["layers.0.mlp.down.weight"], good)


def test_a_part_is_hashed_with_the_rest_of_its_array(target, monkeypatch):
    """Devices ask for parts one after another; the array is read once for all of them."""
    checkpoint, name = Checkpoint.open(target.parent / "converted"), "layers.0.attention.qkv.weight"
    params, expected = checkpoint.language_model(check_files=True)[1], checkpoint.language_model()[1][name]
    recorded = []
    record = type(checkpoint.folder).record
    monkeypatch.setattr(
        type(checkpoint.folder), "record", lambda self, path, data: recorded.append(path) or record(self, path, data)
    )
    indices = [(slice(0, 4),), (slice(4, 8), slice(0, 2)), ()]
    for index, part in zip(indices, params.parts(name, indices), strict=True):
        np.testing.assert_array_equal(part, expected[index])
    assert len(recorded) == len(set(recorded)) >= 1


def test_layers_in_the_target_are_hashed_once(tmp_path, hashed):
    """They are in the manifest of the folder around them too."""
    convert(with_layers(tmp_path / "src"), tmp_path / "out")
    hashed.clear()
    jspec.load(tmp_path / "out", "mtp", check_files=True, **SMALL)
    assert not [path for path in hashed if path.name[0].isdigit()]
    [file] = list((tmp_path / "out" / "mtp" / "params").rglob("layers.0.mlp.*/0*"))[:1]
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(Refusal, match=rf"out/mtp/{file.relative_to(tmp_path / 'out' / 'mtp')}: damaged, its SHA-256"):
        jspec.load(tmp_path / "out", "mtp", check_files=True, **SMALL)
