"""A checkpoint folder as a boundary of trust: nothing outside it is read, whatever its files say."""

import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath

from jspec.checkpoints.json_files import read_json, reason_of
from jspec.checkpoints.refusal import Refusal


class Folder:
    """The folder ``path``, whose files are reached by bare name only.

    A symbolic link is followed when it stays inside the folder, or when it leads to the ``blobs`` of the same
    repository in a Hugging Face hub cache (``<repository>/snapshots/<revision>/name -> ../../blobs/<hash>``), which is
    how that cache stores every file."""

    def __init__(self, path: str | os.PathLike):
        self.given = str(path)
        if not os.path.isdir(path):
            raise Refusal(f"{path}: not a folder; give the folder that holds config.json and model.safetensors")
        self.root = Path(path).resolve()

    @property
    def revision(self) -> str | None:
        """The commit, when the folder is a snapshot in a hub cache."""
        return self.root.name if self.root.parent.name == "snapshots" else None

    def names(self) -> list[str]:
        return sorted(os.listdir(self.root))

    def has(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def path(self, name: str, named_by: str | None = None) -> Path:
        """The file ``name``, resolved.

        Args:
          name: a bare file name.
          named_by: the file that named it, for the message.

        Raises:
          Refusal: the name is no bare name, leads out of the folder, or is no regular file.
        """
        where = named_by or f"{self.given}/{name}"
        if not is_bare_name(name):
            raise Refusal(f"{where}: the file name {name!r} is refused, because only a bare name stays in the folder")
        try:
            path = (self.root / name).resolve(strict=True)
            regular = stat.S_ISREG(path.stat().st_mode)
        except (OSError, RuntimeError) as error:
            raise Refusal(f"{where}: cannot open {name!r} ({reason_of(error)})") from None
        if path.parent != self.root and path.parent != self._blobs():
            raise Refusal(f"{where}: {name!r} is a symbolic link that leaves the folder, which is refused")
        if not regular:
            raise Refusal(f"{where}: {name!r} is not a regular file")
        return path

    def below(self, name: str) -> Path:
        """The file ``name``, which may lie in folders of this folder, resolved.

        Args:
          name: a POSIX path relative to this folder, as a walk of it gives them.

        Raises:
          Refusal: it leads out of the folder, or is no regular file.
        """
        where = f"{self.given}/{name}"
        try:
            path = (self.root / name).resolve(strict=True)
            regular = stat.S_ISREG(path.stat().st_mode)
        except (OSError, RuntimeError) as error:
            raise Refusal(f"{where}: cannot be opened ({reason_of(error)})") from None
        if not path.is_relative_to(self.root) and path.parent != self._blobs():
            raise Refusal(f"{where}: is a symbolic link that leaves the folder, which is refused")
        if not regular:
            raise Refusal(f"{where}: is not a regular file")
        return path

    def json(self, name: str) -> dict:
        """The JSON object in ``name``.

        Raises:
          Refusal: it is no JSON object, or larger or deeper than such a file is.
        """
        where = f"{self.given}/{name}"
        value = read_json(self.path(name), where)
        if not isinstance(value, dict):
            raise Refusal(f"{where}: holds a {type(value).__name__}, expected a JSON object")
        return value

    def _blobs(self) -> Path | None:
        return self.root.parent.parent / "blobs" if self.revision else None


def is_bare_name(name) -> bool:
    """Whether ``name`` is a plain file name: no separator, drive, NUL, and neither ``.`` nor ``..``."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )
