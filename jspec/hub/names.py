"""``Repository``: a model repository on the hub, and its revision."""

import dataclasses
import os
import re

DEFAULT_REVISION = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})?")
_REVISION = re.compile(rf"{_PART}(/{_PART})*")  # a branch as refs/pr/1 has slashes
_LONGEST = 96  # characters of a name; the hub's own limit


@dataclasses.dataclass(frozen=True)
class Repository:
    """A model repository.

    Attributes:
      name: ``org/name``; without ``org/`` for a few old ones, which only the local cache can have.
      revision: a branch, a tag or a commit.
    """

    name: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.name if self.revision == DEFAULT_REVISION else f"{self.name}@{self.revision}"

    @property
    def commit(self) -> str | None:
        """The revision, if it is the full hash of a commit."""
        return self.revision if COMMIT.fullmatch(self.revision) else None

    @property
    def cache_name(self) -> str:
        """The name of its folder in the local cache."""
        return f"models--{self.name.replace('/', '--')}"


def repository_of(text: str) -> Repository | None:
    """The repository that ``org/name`` or ``org/name@revision`` names; None if the text can be no such name.

    Names that the hub does not give are none, so that no name leads anywhere but to one folder of the cache.
    """
    name, at, revision = text.partition("@")
    fits = _NAME.fullmatch(name) and len(name) <= _LONGEST and ".." not in name and "--" not in name
    if not fits or name.endswith((".git", ".", "-")):
        return None
    if not at:
        return Repository(name)
    return Repository(name, revision) if _REVISION.fullmatch(revision) and ".." not in revision else None


def is_hub_name(given: str | os.PathLike) -> bool:
    """Whether a checkpoint that was given is no path here, and may be a name on the hub."""
    return isinstance(given, str) and "/" in given and not os.path.exists(given) and repository_of(given) is not None
