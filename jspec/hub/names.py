"""``Repository``: a model repository on the hub, its revision, and which of its GGUF files is meant."""

import dataclasses
import os
import re

DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})?")
_REVISION = re.compile(rf"{_PART}(/{_PART})*")  # a branch as refs/pr/1 has slashes, and a file in a folder
_LONGEST = 96  # characters of a name; the hub's own limit


@dataclasses.dataclass(frozen=True)
class Repository:
    """A model repository.

    Attributes:
      name: ``org/name``; without ``org/`` for a few old ones, which only the local cache can have.
      revision: a branch, a tag or a commit.
      file: which of its GGUF files: a quantisation, or the name of a file; None for its other weights.
    """

    name: str
    revision: str = DEFAULT_REVISION
    file: str | None = None

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.name}{at}" if self.file is None else f"{self.name}{at}:{self.file}"

    @property
    def commit(self) -> str | None:
        """The revision, if it is the full hash of a commit."""
        return self.revision if COMMIT.fullmatch(self.revision) else None

    @property
    def cache_name(self) -> str:
        """The name of its folder in the local cache."""
        return f"models--{self.name.replace('/', '--')}"


def repository_of(text: str) -> Repository | None:
    """The repository that ``org/name``, ``org/name@revision``, and either with ``:Q4_K_M`` behind it names; None if the text
    can be no such name.

    Names that the hub does not give are none, so that no name leads anywhere but to one folder of the cache.
    """
    whole, colon, file = text.partition(":")
    name, at, revision = whole.partition("@")
    fits = _NAME.fullmatch(name) and len(name) <= _LONGEST and ".." not in name and "--" not in name
    if not fits or name.endswith((".git", ".", "-")):
        return None
    if any(
        given and (not _REVISION.fullmatch(part) or ".." in part) for given, part in ((at, revision), (colon, file))
    ):
        return None
    return Repository(name, revision if at else DEFAULT_REVISION, file if colon else None)


def is_hub_name(given: str | os.PathLike) -> bool:
    """Whether a checkpoint that was given is no path here, and may be a name on the hub."""
    repository = repository_of(given) if isinstance(given, str) and not os.path.exists(given) else None
    return repository is not None and "/" in repository.name
