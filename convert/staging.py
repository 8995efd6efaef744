"""Atomic creation of a folder: it is written beside its place, synced to disk, and renamed.

For an OUT named ``x``, three names beside it belong to this module: ``.x.jspec-lock`` (held while a run lasts),
``.x.jspec-partial`` (what is being written) and ``.x.jspec-replaced`` (the old OUT between two renames). After a kill
the next run for the same OUT finds them and tidies up."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jspec.checkpoints.json_files import reason_of
from jspec.checkpoints.refusal import Refusal

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def staged(out: Path, overwrite: bool, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder that becomes ``out`` when the block succeeds, and vanishes when it raises.

    Args:
      out: an absolute path.
      overwrite: whether an existing ``out`` may be replaced, after success.
      may_replace: whether a folder is one of ours; any other is never replaced.

    Raises:
      Refusal: ``out`` exists and may not be replaced, another run is writing it, or the system refuses something, such
        as more space on a full disk.
    """
    partial, replaced = _beside(out, "partial"), _beside(out, "replaced")
    with _told(out), _lock(out):
        _tidy(out, partial, replaced)
        _require_replaceable(out, overwrite, may_replace)
        partial.mkdir()
        try:
            yield partial
            _sync_tree(partial)
            _swap(partial, out, replaced)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


@contextlib.contextmanager
def _told(out: Path) -> Iterator[None]:
    """An error of the system in a sentence."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        at = f" at {error.filename}" if error.filename else ""
        fix = "free some space" if error.errno in FULL else "set that right"
        raise Refusal(
            f"{out}: cannot be written ({reason_of(error)}{at}), so nothing was; {fix}, or choose another place"
        ) from None


def _beside(out: Path, role: str) -> Path:
    return out.with_name(f".{out.name}.jspec-{role}")


def _tidy(out: Path, partial: Path, replaced: Path):
    """Undo what a killed run left: its half-written folder, or an old OUT that was moved away and not yet replaced."""
    if partial.exists():
        shutil.rmtree(partial)
    if replaced.exists():
        if os.path.lexists(out):
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, out)


def _require_replaceable(out: Path, overwrite: bool, may_replace: Callable[[Path], bool]):
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise Refusal(f"{out}: exists already; choose another place, or give --overwrite to replace it after success")
    if out.is_symlink() or not out.is_dir() or not (may_replace(out) or not any(out.iterdir())):
        raise Refusal(f"{out}: exists and is no converted folder, so it is not overwritten; remove it yourself")


def _swap(partial: Path, out: Path, replaced: Path):
    if os.path.lexists(out):
        os.rename(out, replaced)
        try:
            os.rename(partial, out)
        except BaseException:
            os.rename(replaced, out)
            raise
    else:
        os.rename(partial, out)
    _sync(out.parent)


def _sync_tree(folder: Path):
    for directory, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(out: Path):
    """Hold the lock of ``out``; the kernel lets go of it when the process dies, however it dies."""
    path = _beside(out, "lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path))
        except BlockingIOError:
            current = False
        if not current:  # held, or removed by a run that ended between our open and our lock
            raise Refusal(f"{out}: another conversion is writing it; wait for that one, or choose another place")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
