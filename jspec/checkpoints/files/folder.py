"""``Folder``: a checkpoint folder from which only its own files can be opened, whatever names its files contain."""

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from jspec.checkpoints.files.json_files import MAX_BYTES, limit_of, parse_json, read_bytes, reason_of
from jspec.checkpoints.files.refusal import Refusal


class Folder:
    """An untrusted checkpoint folder, whose files are opened by their bare names.

    A symbolic link is followed if it stays inside the folder. It is also followed if it leads to the ``blobs`` of the
    same repository in a Hugging Face hub cache, because that cache stores every file in this way:
    ``<repository>/snapshots/<revision>/name -> ../../blobs/<hash>``.

    Each JSON file is parsed once, unless it has more than ``MAX_BYTES``.

    Attributes:
      given: the path as the user gave it, for messages.
      root: the resolved path.
      notes: one sentence for the user on each thing to know about how it was found.
      digests: resolved path of a file -> SHA-256 of the bytes that were read of it, in hexadecimal, for every file that was
        read as a whole. None if digests are not wanted.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, path: str | os.PathLike, digests: dict[Path, str] | None = None):
        self.given, self.digests = str(path), digests
        self._parsed: dict[str, dict] = {}
        if not os.path.isdir(path):
            raise Refusal(f"{path}: not a folder; give the folder that holds config.json and model.safetensors")
        self.root = Path(path).resolve()

    @property
    def revision(self) -> str | None:
        """The commit hash if the folder is a snapshot in a hub cache, else None."""
        return self.root.name if self.root.parent.name == "snapshots" else None

    def names(self) -> list[str]:
        """Names of everything in the folder, sorted."""
        return sorted(os.listdir(self.root))

    def has(self, name: str) -> bool:
        """Whether the folder has an entry ``name``, be it a link that leads nowhere."""
        return os.path.lexists(self.root / name)

    def path(self, name: str, named_by: str | None = None) -> Path:
        """The resolved path of the file ``name``.

        Args:
          name: a bare file name, ``model.safetensors``.
          named_by: the file that contains this name, such as an index of shards, for messages.

        Raises:
          Refusal: the name is no bare name, the file lies outside the folder, or it is no regular file.
        """
        where = named_by or f"{self.given}/{name}"
        if not is_bare_name(name):
            raise Refusal(f"{where}: the file name {name!r} is refused, because only a bare name stays in the folder")
        return self._resolved(name, f"{where}: {name!r}", lambda path: path.parent == self.root)

    def below(self, name: str) -> Path:
        """The resolved path of a file that may lie in a subfolder.

        Args:
          name: a path relative to this folder with ``/`` between its parts, found by listing the folder.

        Raises:
          Refusal: the file lies outside the folder, or it is no regular file.
        """
        return self._resolved(name, f"{self.given}/{name}:", lambda path: path.is_relative_to(self.root))

    def _resolved(self, name: str, called: str, is_inside: Callable[[Path], bool]) -> Path:
        """The resolved path of a regular file; a refusal begins as ``called`` says."""
        try:
            path = (self.root / name).resolve(strict=True)
            regular = stat.S_ISREG(path.stat().st_mode)
        except (OSError, RuntimeError) as error:
            raise Refusal(f"{called} cannot be opened ({reason_of(error)})") from None
        if not is_inside(path) and path.parent != self._blobs():
            raise Refusal(f"{called} is a symbolic link that leaves the folder, which is refused")
        if not regular:
            raise Refusal(f"{called} is not a regular file")
        return path

    def read(self, name: str, most: int) -> bytes:
        """The content of a file of at most ``most`` bytes, whose digest is recorded.

        Args:
          name: a bare file name, or a path that was found by listing the folder.
          most: the limit.

        Raises:
          Refusal: the file has more bytes, lies outside the folder, or cannot be read.
        """
        path = self.below(name) if "/" in name else self.path(name)
        data = read_bytes(path, f"{self.given}/{name}", most)
        self.record(path, data)
        return data

    def record(self, path: Path, data: bytes | memoryview) -> str | None:
        """The SHA-256 of the bytes ``data`` of the file ``path``, which is recorded; None if digests are not wanted."""
        if self.digests is None:
            return None
        digest = self.digests[path] = hashlib.sha256(data).hexdigest()
        return digest

    def json(self, name: str) -> dict:
        """The JSON object in the file ``name``, as for ``read``; callers share it and must not change it.

        Raises:
          Refusal: it holds no JSON object, or exceeds the limits on size and depth of ``json_files``.
        """
        if name in self._parsed:
            return self._parsed[name]
        where, data = f"{self.given}/{name}", self.read(name, limit_of(PurePosixPath(name).name))
        value = parse_json(data, where)
        if not isinstance(value, dict):
            raise Refusal(f"{where}: holds a {type(value).__name__}, expected a JSON object")
        if len(data) <= MAX_BYTES:
            self._parsed[name] = value
        return value

    def _blobs(self) -> Path | None:
        return self.root.parent.parent / "blobs" if self.revision else None


class MemoryFolder(Folder):
    """JSON files that are made in memory, in the place of a folder that has no others.

    Args:
      given: what the user gave, for messages.
      files: name -> a function that returns the object in it, which is called when it is first asked for.
    """

    def __init__(self, given: str, files: Mapping[str, Callable[[], dict]]):
        self.given, self.digests, self.root = given, None, Path(given)
        self._files, self._parsed = files, {}

    def names(self) -> list[str]:
        return sorted(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def json(self, name: str) -> dict:
        if name not in self._files:
            raise Refusal(f"{self.given}: holds no file {name!r}")
        if name not in self._parsed:
            self._parsed[name] = self._files[name]()
        return self._parsed[name]

    def read(self, name: str, most: int) -> bytes:
        try:
            data = json.dumps(self.json(name), ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise Refusal(f"{self.given}: gives a {name} that cannot be written ({reason_of(error)})") from None
        if len(data) > most:
            raise Refusal(f"{self.given}: gives a {name} of {len(data)} bytes: expected at most {most}")
        return data


def is_bare_name(name) -> bool:
    """Whether ``name`` is a file name without path: no separator, no drive, no NUL, and neither ``.`` nor ``..``."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and "\0" not in name
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )
