"""``Listing``: the files of a repository at a commit, as the hub lists them."""

import dataclasses
import re

from jspec._validation import is_int
from jspec.checkpoints.files.folder import is_bare_name
from jspec.checkpoints.files.refusal import Refusal
from jspec.hub.errors import explained
from jspec.hub.names import COMMIT, Repository

SECONDS = 20.0  # to wait for the hub's answer
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
      name: its path in the repository, with ``/`` between the parts.
      size: in bytes.
      digest: SHA-256 of its content in hexadecimal for a large file; for a small one, which lies in git itself, the
        SHA-1 that git calls it by. The local cache names the content so.
    """

    name: str
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a repository at a commit."""

    repository: Repository
    commit: str
    files: tuple[RemoteFile, ...]

    def named(self, name: str) -> RemoteFile | None:
        """The file ``name``; None if there is none."""
        return next((file for file in self.files if file.name == name), None)


def ask_hub(repository: Repository, seconds: float = SECONDS) -> Listing:
    """Ask the hub for the files of a repository.

    Args:
      repository: which one, and at what revision.
      seconds: how long to wait for the answer.

    Raises:
      Unreachable: the hub does not answer.
      Refusal: there is no such repository or revision, it is gated and the user's token may not read it, or the answer
        names files that no repository can have.
    """
    from huggingface_hub import HfApi, constants

    with explained(repository):
        api = HfApi(endpoint=constants.ENDPOINT, library_name="jspec")
        info = api.model_info(repository.name, revision=repository.revision, files_metadata=True, timeout=seconds)
        if getattr(info, "gated", False):
            api.auth_check(repository.name)  # the list is for everybody, the files are not
    commit = info.sha
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or repository.commit not in (None, commit):
        raise Refusal(f"{repository}: {constants.ENDPOINT} answers for the commit {commit!r}; check HF_ENDPOINT")
    files = tuple(_file(repository, sibling) for sibling in info.siblings or ())
    return Listing(repository, commit, files)


def _file(repository: Repository, sibling) -> RemoteFile:
    name, size, lfs = sibling.rfilename, sibling.size, sibling.lfs
    if not isinstance(name, str) or not all(is_bare_name(part) for part in name.split("/")):
        raise Refusal(
            f"{repository}: lists a file {name!r}, which would lie outside of its folder; nothing is downloaded"
        )
    digest, form = (sibling.blob_id, COMMIT) if lfs is None else (lfs.sha256, _SHA256)
    size = size if lfs is None else lfs.size
    if not is_int(size) or size < 0 or not isinstance(digest, str) or not form.fullmatch(digest):
        raise Refusal(
            f"{repository}: lists {name!r} with size={size!r} and digest={digest!r}, by which no download could be "
            "checked; give a hub that lists both (HF_ENDPOINT)"
        )
    return RemoteFile(name, size, digest)
