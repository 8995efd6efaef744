"""Finds whole checkpoints in the hub's local cache, which other programs fill too.

A repository has ``blobs/<digest>``, the contents; ``snapshots/<commit>/<name>``, links to them; and ``refs/<revision>``,
which commit a branch or tag was when it was last asked for.
"""

import dataclasses
import os
from pathlib import Path

from jspec.checkpoints.converted.manifest import is_converted
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.gguf.names import called
from jspec.checkpoints.huggingface.weights import INDEX, MEDUSA, PICKLE_INDEX, SINGLE
from jspec.hub.names import COMMIT, Repository
from jspec.hub.selection import CONFIG, NEEDED, gguf_of, pickles_among, shard_names


def storage(repository: Repository) -> Path:
    """The folder of a repository in the local cache, which ``HF_HOME`` or ``HF_HUB_CACHE`` name; it may not exist yet."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, repository.cache_name)


def cached_commit(repository: Repository) -> str | None:
    """The commit that the revision was when it was last asked for; None if the cache does not know."""
    if repository.commit is not None:
        return repository.commit
    try:
        text = (storage(repository) / "refs" / repository.revision).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if COMMIT.fullmatch(text) else None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A snapshot of a repository in the local cache.

    Attributes:
      folder: where it is.
      missing: a file that it lacks, so that a download of it did not come to its end; None if it is whole.
      gguf: the name in it of the GGUF file that is meant; None if its other weights are.
    """

    folder: Path
    missing: str | None
    gguf: str | None = None

    @property
    def place(self) -> Path:
        """The checkpoint: the folder, or the GGUF file."""
        return self.folder if self.gguf is None else self.folder / self.gguf


def snapshot_of(repository: Repository) -> Snapshot | None:
    """The snapshot of a repository; None if the local cache has none.

    jspec downloads weights last, so that a snapshot with all of its weights has what belongs to them. For one that another
    program began, huggingface_hub knows which files there should be.
    """
    folder = cached_folder(repository)
    if folder is not None and repository.file is not None:
        names = names_in(folder)
        if not called(names, repository.file):
            return None
        parts = gguf_of(repository, names)
        return Snapshot(folder, next((name for name in parts if name not in names), None), parts[0])
    if folder is None or is_converted(folder):  # whose manifest is compared with its files whenever it is loaded
        return folder and Snapshot(folder, None)
    return Snapshot(folder, _missing_weights(folder) or _missing_beside(repository, folder))


def cached_folder(repository: Repository) -> Path | None:
    """The folder of that snapshot, which may lack files; None if there is none."""
    commit = cached_commit(repository)
    folder = storage(repository) / "snapshots" / str(commit)
    return folder if commit is not None and folder.is_dir() else None


def names_in(folder: Path) -> list[str]:
    """The names of all files of a snapshot, with ``/`` between their parts."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _missing_weights(path: Path) -> str | None:
    if not os.path.exists(path / CONFIG):
        return CONFIG
    if any(os.path.exists(path / name) for name in (SINGLE, MEDUSA)):
        return None
    folder = Folder(path)
    index = next((name for name in (INDEX, PICKLE_INDEX) if os.path.exists(path / name)), None)
    if index is None:
        return None if pickles_among(folder.names()) else SINGLE
    return next((name for name in sorted(shard_names(folder, index)) if not os.path.exists(path / name)), None)


def _missing_beside(repository: Repository, path: Path) -> str | None:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    place = {"cache_dir": constants.HF_HUB_CACHE, "local_files_only": True}
    for name in NEEDED:
        try:
            snapshot_download(repository.name, revision=path.name, allow_patterns=[name], **place)
        except LocalEntryNotFoundError:
            return name
    return None


def write_reference(repository: Repository, commit: str):
    """Note which commit the revision is, so that its name finds the snapshot without a hub."""
    if repository.commit is not None:
        return
    reference = storage(repository) / "refs" / repository.revision
    reference.parent.mkdir(parents=True, exist_ok=True)
    temporary = reference.with_name(f"{reference.name}.{os.getpid()}.new")
    temporary.write_text(commit, "ascii")
    os.replace(temporary, reference)
