"""Creates a folder atomically: it is written under another name beside its place, synced to disk, and renamed.

For an output folder ``x``, this module uses three names beside it:

- ``.x.jspec-lock`` is a file that is locked while a conversion runs.
- ``.x.jspec-partial`` is the folder that is being written.
- ``.x.jspec-replaced`` is the old ``x``, moved away for the moment before the new one takes its name.

If a conversion is killed, the next one for the same output folder finds these and cleans up."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jspec.checkpoints.files.json_files import reason_of
from jspec.checkpoints.files.refusal import Refusal

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def staged(out: Path, overwrite: bool, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """Yield an empty folder that becomes ``out`` if the block succeeds and is removed if it raises.

    Args:
      out: the folder to create, an absolute path.
      overwrite: whether an existing ``out`` may be replaced once the block has succeeded.
      may_replace: says whether an existing folder is a converted one. Other folders are replaced only if they are empty.

    Raises:
      Refusal: ``out`` exists and may not be replaced, another conversion is writing it, or the operating system reports an
        error, such as a full disk.
    """
    partial, replaced = _beside(out, "partial"), _beside(out, "replaced")
    with _errors_as_refusals(out), _lock(out):
        _clean_up(out, partial, replaced)
        _require_replaceable(out, overwrite, may_replace)
        partial.mkdir()
        try:
            yield partial
            _sync_tree(partial)
            _put_in_place(partial, out, replaced)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def require_apart(out: str | os.PathLike, source: Path) -> Path:
    """The absolute place of ``out``, without symbolic links in its parent; its last part may be one.

    Raises:
      Refusal: it lies inside the folder ``source`` or around it.
    """
    absolute = Path(os.path.abspath(out))
    place = absolute.parent.resolve() / absolute.name
    if place.is_relative_to(source) or source.is_relative_to(place):
        raise Refusal(f"{out}: lies inside the source folder or around it; choose another place")
    return place


@contextlib.contextmanager
def _errors_as_refusals(out: Path) -> Iterator[None]:
    """Raise a ``Refusal`` with one sentence for every ``OSError`` in the block; also create the parent of ``out``."""
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
    """The name beside ``out`` for one of the roles in the module's docstring."""
    return out.with_name(f".{out.name}.jspec-{role}")


def _clean_up(out: Path, partial: Path, replaced: Path):
    """Undo what a killed conversion left behind.

    A half-written folder is removed. An old ``out`` that was moved away is put back if the new one had not taken its
    place yet, and removed otherwise."""
    if partial.exists():
        shutil.rmtree(partial)
    if replaced.exists():
        if os.path.lexists(out):
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, out)


def _require_replaceable(out: Path, overwrite: bool, may_replace: Callable[[Path], bool]):
    """Raise a ``Refusal`` if ``out`` exists and may not be replaced."""
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise Refusal(f"{out}: exists already; choose another place, or give --overwrite to replace it after success")
    if out.is_symlink() or not out.is_dir() or not (may_replace(out) or not any(out.iterdir())):
        raise Refusal(f"{out}: exists and is no converted folder, so it is not overwritten; remove it yourself")


def _put_in_place(partial: Path, out: Path, replaced: Path):
    """Rename ``partial`` to ``out``. An existing ``out`` is moved to ``replaced``, and put back if that fails."""
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
    """Wait until every file and folder below ``folder`` is on the disk."""
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
    """Hold the lock of ``out`` during the block; the kernel releases it if the process dies, even by a kill."""
    path = _beside(out, "lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            current = os.path.exists(path) and os.path.samestat(os.fstat(descriptor), os.stat(path))
        except BlockingIOError:
            current = False
        # Another process holds the lock, or it has removed the file after we opened it and before we locked it. In the
        # second case our lock is on a file that no later process would find.
        if not current:
            raise Refusal(f"{out}: another conversion is writing it; wait for that one, or choose another place")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
