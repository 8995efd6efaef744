"""A converted folder that is no longer what was written: loading notices by name, size and small files, check_files=True
by every byte; and nothing outside it is read."""

import json
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from resaved import set_keys
from tiny import tiny_checkpoint, tiny_tokenizer

import jspec
from convert import Refusal, check, convert, load_folder
from convert.manifest import write_manifest
from jspec.checkpoints.converted import manifest as manifests
from jspec.checkpoints.converted.manifest import own_digest
from jspec.checkpoints.converted.orbax import stored_arrays
from jspec.checkpoints.files.folder import Folder

SIZES = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
SMALL = {"max_batch": 1, "max_len": 32, "page_size": 16, "prefill_chunk": 16}
WEIGHT = "params/layers.0.mlp.down.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A converted folder with a tokenizer, not to be changed."""
    root = tmp_path_factory.mktemp("checkpoints")
    src = tiny_checkpoint(root / "src", **SIZES)
    tiny_tokenizer(src)
    convert(src, root / "whole")
    return root / "whole"


@pytest.fixture
def out(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "out")


def sign(folder: Path, **changes):
    """Edit the manifest and give it the digest of what it says now; None takes an entry out."""
    file = folder / "manifest.json"
    manifest = {k: v for k, v in {**json.loads(file.read_text()), **changes}.items() if v is not None}
    manifest["manifest_sha256"] = own_digest(manifest)
    file.write_text(json.dumps(manifest))


def sign_anew(folder: Path):
    """Let the manifest agree with the files as they are."""
    write_manifest(folder, {"dtype": "float32"})


def missing(rng: random.Random, file: Path):
    file.unlink()


def extra(rng: random.Random, file: Path):
    (file.parent / "extra").write_bytes(b"x")


def truncated(rng: random.Random, file: Path):
    file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size)])


def longer(rng: random.Random, file: Path):
    file.write_bytes(file.read_bytes() + b" ")


def renamed(rng: random.Random, file: Path):
    file.rename(file.with_name(f"{file.name}1"))


def flipped(rng: random.Random, file: Path):
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def linked(rng: random.Random, file: Path):
    root = next(parent for parent in file.parents if parent.name == "out")
    shutil.copyfile(file, root.parent / "elsewhere")
    file.unlink()
    file.symlink_to(root.parent / "elsewhere")


DEEDS = (missing, extra, truncated, longer, renamed, flipped, linked)


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_tampered_folders_are_refused(whole, tmp_path, deed):
    """Each deed, to files chosen by a seed."""
    names = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
    rng = random.Random(f"7 {deed.__name__}")
    for name in rng.sample(names, 8):
        out = shutil.copytree(whole, tmp_path / "out")
        deed(rng, out / name)
        with pytest.raises(Refusal) as refusal:
            load_folder(out)
        assert str(refusal.value).startswith(f"{out}/")
        assert str(refusal.value).isprintable()
        assert not (out / "manifest.json").exists() or check(out)
        shutil.rmtree(out)


def test_a_refusal_names_the_first_wrong_file_and_counts_the_others(out):
    (out / WEIGHT / "0.0").write_bytes(b"1234")
    (out / "generation_config.json").write_text("{}")
    with pytest.raises(Refusal) as refusal:
        load_folder(out)
    assert str(refusal.value) == (
        f"{out}/generation_config.json: not in the manifest (1 more; jspec-convert --check names them all); "
        "convert the checkpoint again, or fetch the folder again"
    )
    (out / "generation_config.json").unlink()
    with pytest.raises(Refusal, match=f"{WEIGHT}/0.0: damaged, it has 4 bytes where the manifest says 6144; convert"):
        load_folder(out)


def test_unread_files_are_ignored(out):
    """As the Hub, git and file managers put them there; those between the parameters may not."""
    for name in ("README.md", "LICENSE", ".gitattributes", ".cache/huggingface/x"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("")
    assert load_folder(out)
    assert check(out) == []
    (out / "params" / ".hidden").write_text("")
    assert check(out) == [f"{out}/params/.hidden: not in the manifest"]


def test_large_files_are_hashed_on_request(out, monkeypatch):
    """Without it, a flipped bit among the numbers of a large file stays unseen, and is all that does."""
    monkeypatch.setattr(manifests, "SMALL", 1000)
    file = out / WEIGHT / "0.0"
    jspec.load(out, check_files=True, **SMALL)
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    words = f"{WEIGHT}/0.0: damaged, its SHA-256 does not match"
    jspec.load(out, **SMALL)
    with pytest.raises(Refusal, match=words):
        jspec.load(out, check_files=True, **SMALL)


def test_verify_reads_the_draft_too(whole, out, monkeypatch):
    monkeypatch.setattr(manifests, "SMALL", 1000)
    jspec.load(whole, out, check_files=True, **SMALL)
    flipped(random.Random(0), out / WEIGHT / "0.0")
    with pytest.raises(Refusal, match=f"out/{WEIGHT}/0.0: damaged"):
        jspec.load(whole, out, check_files=True, **SMALL)
    jspec.load(whole, "ngram", check_files=True, **SMALL)


def test_verify_needs_something_to_compare_with(whole):
    with pytest.raises(
        Refusal, match=r"src: has no manifest\.json to check its files by; convert it with jspec-convert"
    ):
        jspec.load(whole.parent / "src", check_files=True, **SMALL)
    with pytest.raises(ValueError, match="check_files=1: expected True or False"):
        jspec.load(whole, check_files=1, **SMALL)  # pyright: ignore[reportArgumentType]


def test_a_manifest_without_sizes_is_read(out):
    """As earlier versions wrote it."""
    sign(out, sizes=None)
    assert load_folder(out)
    (out / WEIGHT / "0.0").write_bytes(b"1234")
    with pytest.raises(Refusal, match="SHA-256"):
        load_folder(out)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": []},
        {"dtype": "float16"},
        {"files": []},
        {"files": {"config.json": 1}},
        {"sizes": {}},
        {"sizes": {"config.json": True}},
        {"head": 1},
        {"quantization": 4},
        {"source": -1},
        {"versions": "x"},
        {"tensor_count": True},
        {"format_version": 3},
        {"format_version": 1, "quantization": "int4"},
        {"format": None},
    ],
    ids=str,
)
def test_a_malformed_manifest_is_refused(out, changes):
    sign(out, **changes)
    with pytest.raises(Refusal, match=rf"out/manifest\.json: {next(iter(changes))}="):
        load_folder(out)


def test_an_edited_manifest_is_refused(out):
    set_keys(out / "manifest.json", dtype="bfloat16")
    with pytest.raises(Refusal, match=r"manifest\.json: damaged, its own SHA-256 does not match"):
        load_folder(out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(Refusal, match=r"manifest\.json: cannot be read as JSON"):
        load_folder(out)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", 2, r"params: parameter 'layers\.1\..*' is missing"),
        (
            "vocab_size",
            265,
            r"params: parameter 'embedding' has shape \[264, 32\], but its config asks for \[265, 32\]",
        ),
    ],
)
def test_signed_params_of_another_config_are_refused(out, field, value, words):
    set_keys(out, **{field: value})
    sign_anew(out)
    with pytest.raises(Refusal, match=words):
        load_folder(out)


HEADER = {"zarr_format": 2, "shape": [32, 48], "chunks": [32, 48], "dtype": "<f4", "compressor": None, "filters": None}
HEADER["order"] = "C"


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "<c16"},
        {"dtype": [["x", "<f4"]]},
        {"shape": [32, 2**50]},
        {"shape": [-1, 48]},
        {"chunks": [2**40, 48]},
        {"chunks": [0, 48]},
        {"order": "F"},
        {"dimension_separator": "/"},
        {"compressor": {"id": "zlib", "level": 1}},
    ],
    ids=str,
)
def test_signed_arrays_of_another_form_are_refused(out, monkeypatch, changes):
    """Refused by its header: the reader, which would make room for it, is not asked."""
    monkeypatch.setattr(
        "jspec.checkpoints.converted.orbax.StoredArray.read", lambda *_: pytest.fail("arrays were read")
    )
    (out / WEIGHT / ".zarray").write_text(json.dumps({**HEADER, **changes}))
    sign_anew(out)
    with pytest.raises(Refusal, match=r"layers\.0\.mlp\.down\.weight"):
        load_folder(out)


def test_signed_names_that_leave_the_folder_are_refused(out, monkeypatch):
    """Orbax goes by the names in _METADATA, wherever they lead."""
    shutil.move(out / WEIGHT, out.parent / "elsewhere")
    file = out / "params" / "_METADATA"
    file.write_text(file.read_text().replace('"key": "down"', '"key": "/../../elsewhere"'))
    sign_anew(out)
    monkeypatch.setattr(
        "jspec.checkpoints.converted.orbax.StoredArray.read", lambda *_: pytest.fail("arrays were read")
    )
    with pytest.raises(Refusal, match="params: _METADATA and the folders disagree about"):
        load_folder(out)


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "tokenizer.json", f"{WEIGHT}/0.0", WEIGHT, "params"])
def test_links_that_leave_a_signed_folder_are_refused(out, name):
    """Even where what it leads to has the right bytes."""
    shutil.move(out / name, out.parent / "elsewhere")
    (out / name).symlink_to(out.parent / "elsewhere")
    with pytest.raises(Refusal, match=rf"out/{name}(/|: )"):
        load_folder(out)
    if name != "manifest.json":
        assert check(out)


def test_converted_folder_in_a_hub_cache(out, tmp_path):
    """Each file is a link to the blobs of its repository, from whatever depth."""
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(p for p in out.rglob("*") if p.is_file())):
        link = snapshot / path.relative_to(out)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert load_folder(snapshot)
    assert check(snapshot) == []
    assert jspec.load(snapshot, check_files=True, **SMALL).tokenizer is not None


# Reads an array that is damaged, past the checks that would find that, and says how it ended.
READ = """
    import sys
    from jspec.checkpoints.converted.orbax import stored_arrays
    from jspec.checkpoints.files.folder import Folder
    from jspec.checkpoints.files.refusal import Refusal
    try:
        stored_arrays(Folder(sys.argv[1]), "params")[sys.argv[2]].read()
    except Refusal as refusal:
        print(refusal)
"""


def test_a_refusal_logs_nothing_else(out):
    """No task whose exception nobody fetched, no traceback of a thread, no exception in a destructor."""
    path, name = out / WEIGHT / "0.0", Path(WEIGHT).name
    path.write_bytes(path.read_bytes()[:-1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-c", textwrap.dedent(READ), str(out), name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert ended.stdout.startswith(f"{out}/params: {name!r} cannot be restored (")
    assert ended.stdout.count("\n") == 1
    with pytest.raises(Refusal, match="cannot be restored"):
        stored_arrays(Folder(out), "params")[name].read()
