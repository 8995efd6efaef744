"""OUT appears whole or not at all, whatever happens on the way; an old OUT survives every failure."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from children import environment
from packed_weights import gptq, gptq_config
from resaved import set_keys
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

from convert import Refusal, check, convert, load_folder
from convert.cli import main


@pytest.fixture
def src(tmp_path):
    return tiny_checkpoint(tmp_path / "src", num_hidden_layers=1)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "place").mkdir()
    return tmp_path / "place" / "out"


def snapshot(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def is_whole(out) -> bool:
    return check(out) == [] and len(load_folder(out)[1]) > 0


def alone(out) -> bool:
    """Nothing is left beside OUT."""
    return [path.name for path in out.parent.iterdir()] in ([], [out.name])


def failing_once(original, chosen):
    """``original``, but the call for which ``chosen`` is true fails as on a full disk."""

    def call(*args, **kwargs):
        if chosen(*args):
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return original(*args, **kwargs)

    return call


def fail_at(monkeypatch, point: str):
    """Make one step of the conversion fail."""
    if point == "manifest":
        monkeypatch.setattr("convert.write.write_manifest", failing_once(None, lambda *a: True))
    elif point == "copy":
        monkeypatch.setattr("shutil.copyfile", failing_once(None, lambda *a: True))
    elif point == "params":
        monkeypatch.setattr(
            "jspec.checkpoints.huggingface.model.HuggingFaceModel.param", failing_once(None, lambda self, name, d: True)
        )
    elif point == "late param":
        original = __import__(
            "jspec.checkpoints.huggingface.model", fromlist=["HuggingFaceModel"]
        ).HuggingFaceModel.param
        fails = failing_once(original, lambda self, name, dtype: name == "head.weight")
        monkeypatch.setattr("jspec.checkpoints.huggingface.model.HuggingFaceModel.param", fails)
    elif point == "sync":
        monkeypatch.setattr("os.fsync", failing_once(None, lambda *a: True))
    elif point == "rename into place":
        monkeypatch.setattr("os.rename", failing_once(os.rename, lambda a, b: str(a).endswith("jspec-partial")))
    elif point == "rename away":
        monkeypatch.setattr("os.rename", failing_once(os.rename, lambda a, b: str(b).endswith("jspec-replaced")))


POINTS = ["params", "late param", "copy", "manifest", "sync", "rename into place"]


@pytest.mark.parametrize("point", POINTS)
def test_failure_leaves_nothing(monkeypatch, capsys, src, out, point):
    with monkeypatch.context() as patch:
        fail_at(patch, point)
        assert main([str(src), str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not out.exists()
    assert alone(out)
    assert main([str(src), str(out)]) == 0
    assert is_whole(out)


@pytest.mark.parametrize("point", [*POINTS, "rename away"])
def test_failure_keeps_the_old_folder(monkeypatch, src, out, point):
    convert(src, out)
    before = snapshot(out)
    with monkeypatch.context() as patch:
        fail_at(patch, point)
        assert main([str(src), str(out), "--overwrite", "--dtype", "bfloat16"]) == 2
    assert snapshot(out) == before
    assert alone(out)


def test_existing_out_is_not_touched(capsys, src, out):
    convert(src, out)
    before = snapshot(out)
    assert main([str(src), str(out), "--dtype", "bfloat16"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert snapshot(out) == before
    assert main([str(src), str(out), "--dtype", "bfloat16", "--overwrite"]) == 0
    assert snapshot(out) != before
    assert is_whole(out)
    assert alone(out)


def test_folders_not_converted_are_never_overwritten(capsys, src, out):
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    assert main([str(src), str(out), "--overwrite"]) == 2
    assert "no converted folder" in capsys.readouterr().err
    assert snapshot(out) == {"thesis.tex": b"years of work"}


@pytest.mark.parametrize("kind", ["file", "link"])
def test_only_folders_are_overwritten(src, out, kind):
    if kind == "file":
        out.write_text("x")
    else:
        convert(src, out.parent / "real")
        out.symlink_to("real")
    with pytest.raises(Refusal, match="no converted folder"):
        convert(src, out, overwrite=True)
    assert out.is_symlink() or out.read_text() == "x"


def test_interrupt_cleans_up(monkeypatch, capsys, src, out):
    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("convert.write.write_manifest", interrupt)
        assert main([str(src), str(out)]) == 130
    assert alone(out)
    assert not out.exists()


def test_failed_verification_writes_nothing(monkeypatch, capsys, src, out):
    convert(src, out)
    before = snapshot(out)
    with monkeypatch.context() as patch:
        patch.setattr("convert.verify.abstract_params", lambda config, dtype: {})
        assert main([str(src), str(out), "--overwrite", "--verify", "shapes"]) == 1
    assert "expected None" in capsys.readouterr().err
    assert snapshot(out) == before
    assert main([str(src), str(out), "--overwrite", "--verify", "shapes"]) == 0
    assert "shapes verified" in capsys.readouterr().out


def test_concurrent_conversions_to_one_place_are_refused(src, out):
    lock = out.with_name(".out.jspec-lock")
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Refusal, match="another conversion"):
            convert(src, out)
    convert(src, out)
    assert alone(out)


# The child stops at a point of its conversion, says so, and waits to be killed.
CHILD = """
    import sys, time
    import convert.conversion, convert.staging
    from convert import convert as run
    from jspec.checkpoints.huggingface.model import HuggingFaceModel

    def stop(*args):
        print("here", flush=True)
        time.sleep(600)

    point, src, out = sys.argv[1:]
    if point == "in the params":
        original = HuggingFaceModel.param
        def param(self, name, dtype):
            return stop() if name == "head.weight" else original(self, name, dtype)
        HuggingFaceModel.param = param
    elif point == "before the sync":
        convert.staging._sync_tree = stop
    else:
        rename = convert.staging.os.rename
        def between(a, b):
            return stop() if str(b) == out else rename(a, b)
        convert.staging.os.rename = between
    run(src, out, dtype="bfloat16", overwrite=True)
"""


@contextlib.contextmanager
def running(*arguments):
    command = [sys.executable, "-c", textwrap.dedent(CHILD), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "here\n"
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("point", ["in the params", "before the sync", "between the renames"])
def test_a_killed_conversion_is_cleaned_up(src, out, point):
    convert(src, out)
    before = snapshot(out)
    with running(point, src, out) as child:
        with pytest.raises(Refusal, match="another conversion"):
            convert(src, out, overwrite=True)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    if point == "between the renames":
        assert not out.exists()
    else:
        assert snapshot(out) == before
    with pytest.raises(Refusal, match="exists already"):  # tidies up, then finds the old one in its place
        convert(src, out)
    assert snapshot(out) == before
    assert alone(out)
    convert(src, out, dtype="bfloat16", overwrite=True)
    assert is_whole(out)
    assert alone(out)


# The child is killed as it opens a file whose path ends so, for the first time.
KILLED = """
    import os, signal, sys
    src, out, end, *options = sys.argv[1:]

    def watch(event, args):
        if event == "open" and str(args[0]).endswith(end) and ".jspec-partial" in str(args[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    from convert.cli import main
    sys.addaudithook(watch)
    main([src, out, *options])
"""
EXPORT = ("--quantize", "int4", "--format", "compressed-tensors")


def in_four_bits(folder):
    """A checkpoint as GPTQ writes it."""
    tensors, stored = load_file(tiny_checkpoint(folder, num_hidden_layers=1) / "model.safetensors"), {}
    for name, array in tensors.items():
        parts = gptq(array, group_size=32, symmetric=True)[0] if name.endswith("proj.weight") else {".weight": array}
        stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    write_weights(folder, stored)
    return set_keys(folder, quantization_config=gptq_config(group_size=32, sym=True))


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ((), "params/_METADATA"),
        ((), "partial/manifest.json"),
        (("--quantize", "int4"), "attention.qkv.scale/.zarray"),
        (EXPORT, "partial/config.json"),
    ],
)
def test_a_killed_conversion_of_quantised_weights_leaves_no_folder_that_loads(tmp_path, out, options, end):
    """Of weights that are stored in four bits, or become so: neither in its place nor beside it."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    src = tiny_checkpoint(tmp_path / "src", **sizes) if options else in_four_bits(tmp_path / "src")
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(src), str(out), end, *options]
    assert subprocess.run(command, env=environment(), capture_output=True).returncode == -signal.SIGKILL
    partial = out.with_name(f".{out.name}.jspec-partial")
    assert not out.exists()
    assert partial.exists()
    with pytest.raises(Refusal):
        load_folder(partial)
    assert main([str(src), str(out), *options]) == 0
    assert alone(out)
    assert len(load_folder(out)[1]) > 0
