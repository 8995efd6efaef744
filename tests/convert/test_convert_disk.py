"""A disk that is full, before or in the middle: a sentence, exit code 2, and nothing left behind."""

import collections
import errno
import os
import shutil
import subprocess
import sys

import pytest
import tensorstore
from tiny import tiny_checkpoint, tiny_tokenizer

from convert import Refusal, chunks, convert
from convert.cli import main

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def src(tmp_path_factory):
    src = tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "src")
    tiny_tokenizer(src)
    return src


def bytes_on_disk(folder) -> int:
    """What the disk handed out for a folder, itself included."""
    return sum(path.lstat().st_blocks * 512 for path in (folder, *folder.rglob("*")))


def free(monkeypatch, size: int):
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(2**50, 0, size))


def told(capsys, *words: str):
    """One sentence on stderr, with these words."""
    error = capsys.readouterr().err
    assert error.startswith("jspec-convert: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


@pytest.mark.parametrize("smallest", [2**20, 0], ids=["files", "chunks"])
def test_all_that_is_written_is_counted(src, tmp_path, monkeypatch, capsys, smallest):
    """Params, headers, folders, copied files and manifest, in blocks; and not much more than that."""
    monkeypatch.setattr(chunks, "SMALLEST", smallest)
    convert(src, tmp_path / "whole")
    used = bytes_on_disk(tmp_path / "whole")
    (tmp_path / "place").mkdir()
    free(monkeypatch, used - 1)
    assert main([str(src), str(tmp_path / "place" / "out")]) == 2
    told(capsys, "place: the converted folder needs ", f"{used - 1:,} are free on that disk", "free some space")
    assert not any((tmp_path / "place").iterdir())
    free(monkeypatch, used + used // 2)
    assert main([str(src), str(tmp_path / "place" / "out")]) == 0


def test_copied_files_count(src, tmp_path, monkeypatch):
    bulky = shutil.copytree(src, tmp_path / "bulky")
    (bulky / "merges.txt").write_bytes(bytes(2**24))
    free(monkeypatch, 2**24)
    with pytest.raises(Refusal, match=r"needs 1[67],\d{3},\d{3} bytes and 16,777,216 are free"):
        convert(bulky, tmp_path / "out")
    convert(src, tmp_path / "out")


TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing local file "x": Failed to write 8192 bytes: No space left on device '
    "[os_error_code='28']",
    'INTERNAL: Error writing local file "x": Disk quota exceeded',
    "RESOURCE_EXHAUSTED: Error writing",
    "UNKNOWN: Failed to write 8192 bytes [os_error_code='27']",
)


@pytest.mark.parametrize(
    "error", [*map(ValueError, TENSORSTORE), OSError(errno.ENOSPC, "No space left on device", "x")], ids=str
)
def test_a_disk_that_fills_up_later_is_reported(src, tmp_path, monkeypatch, capsys, error):
    """Others write to the disk as well. TensorStore tells of it in a ValueError."""

    def fail(self, *args, **kwargs):
        raise error

    (tmp_path / "place").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(tensorstore.TensorStore, "write", fail)
        assert main([str(src), str(tmp_path / "place" / "out")]) == 2
    reason = os.strerror(errno.EFBIG if "27" in str(error) else errno.ENOSPC)
    told(capsys, f"place/out: cannot be written ({reason}", "so nothing was; free some space, or choose another place")
    assert not any((tmp_path / "place").iterdir())


def test_other_writer_errors_are_not_reported_as_a_full_disk(src, tmp_path, monkeypatch):
    def fail(self, *args, **kwargs):
        raise ValueError("a bug")

    monkeypatch.setattr(tensorstore.TensorStore, "write", fail)
    with pytest.raises(ValueError, match="a bug") as error:
        convert(src, tmp_path / "out")
    assert not isinstance(error.value, Refusal)
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_created_is_refused(src, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([str(src), str(tmp_path / "file" / "out")]) == 2
    told(capsys, "file/out: cannot be written", "set that right, or choose another place")


# With a limit on the size of a file, writing fails in TensorStore itself, as on a full disk.
LIMITED = """
    import resource, sys
    from convert.cli import main
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    sys.exit(main(sys.argv[1:]))
"""


def test_stderr_has_one_sentence(src, tmp_path):
    """Neither what Orbax logs nor the tracebacks of its threads and tasks."""
    (tmp_path / "place").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    code = "\n".join(line.strip() for line in LIMITED.splitlines())
    command = [sys.executable, "-c", code, str(src), str(tmp_path / "place" / "out")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    out = tmp_path / "place" / "out"
    assert ended.stderr == (
        f"jspec-convert: {out}: cannot be written (File too large), so nothing was; free some space, or choose another "
        "place\n"
    )
    assert not any((tmp_path / "place").iterdir())
