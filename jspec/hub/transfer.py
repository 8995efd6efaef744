"""Downloads files of a repository into the local cache, and goes on where an earlier download ended.

huggingface_hub makes the requests, and the links of a snapshot. It throws a part of a file away when the process ends, so a
part is kept here, beside the contents of the cache, until its size and its digest are those of the hub's listing.
"""

import contextlib
import dataclasses
import hashlib
import os
import queue
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.hub.cache import storage, write_reference
from jspec.hub.errors import Unreachable, explained
from jspec.hub.listing import Listing, RemoteFile
from jspec.hub.selection import first_files, shards_in_use, weight_files

WORKERS = 4  # files that are downloaded at a time
LARGEST_REQUEST = 50 * 10**9  # bytes; larger files come through Xet alone
_PIECE = 2**22  # bytes that are hashed at a time


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of a repository is to be downloaded.

    Attributes:
      listing: the repository's files.
      first: those that are needed beside the weights, and come before them; or the parts of a GGUF file.
      weights: the weights; of shards the most that they can be.
    """

    listing: Listing
    first: tuple[RemoteFile, ...]
    weights: tuple[RemoteFile, ...]

    @classmethod
    def of(cls, listing: Listing, allow_pickle: bool = False) -> "Plan":
        """The plan for a repository; arguments and errors as for ``selection.first_files``."""
        return cls(listing, tuple(first_files(listing, allow_pickle)), tuple(weight_files(listing, allow_pickle)))

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        return (*self.first, *self.weights)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def missing(self) -> int:
        """Bytes that are not in the local cache."""
        blobs = storage(self.listing.repository) / "blobs"
        different = {file.digest: file for file in self.files}.values()  # two names of one content are stored once
        return sum(file.size - _stored(blobs, file) for file in different)


def download(plan: Plan) -> Path:
    """Download what the local cache lacks; returns the snapshot's folder, or the GGUF file in it that is meant.

    Processes that download the same repository take turns.

    Raises:
      Refusal: a download broke off, the disk is full, or a file is not what the hub lists. What has come is kept, and the
        next call goes on from there.
    """
    from huggingface_hub.utils import WeakFileLock

    listing, place = plan.listing, storage(plan.listing.repository)
    lock = place.parent / ".locks" / place.name / "jspec.lock"
    with explained(listing.repository):
        lock.parent.mkdir(parents=True, exist_ok=True)
        (place / "blobs").mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            folder = _fetch(listing, plan.first)
            weights = shards_in_use(listing, plan.weights, Folder(folder)) if plan.weights else []
            _fetch(listing, weights)
            write_reference(listing.repository, listing.commit)
    return folder if listing.repository.file is None else folder / plan.first[0].name


def _stored(blobs: Path, file: RemoteFile) -> int:
    """How many bytes of a file are in the local cache."""
    if (blobs / file.digest).exists():
        return file.size
    part = _part(blobs, file)
    return min(part.stat().st_size, file.size) if part.exists() else 0


def _part(blobs: Path, file: RemoteFile) -> Path:
    return blobs / f"{file.digest}.jspec.incomplete"


def _fetch(listing: Listing, files: Sequence[RemoteFile]) -> Path:
    """Download ``files``, several at a time, with one progress bar; returns the snapshot's folder."""
    blobs, stop = storage(listing.repository) / "blobs", threading.Event()
    contents = {file.digest: file for file in files}.values()  # files may have the same
    total, here = sum(file.size for file in contents), sum(_stored(blobs, file) for file in contents)
    options = {"unit": "B", "unit_scale": True, "leave": False, "disable": not sys.stderr.isatty()}
    waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)

    def work(progress: _Progress):
        while not stop.is_set() and not waiting.empty():
            with contextlib.suppress(queue.Empty):
                file = waiting.get_nowait()
                try:
                    _fetch_one(listing, file, blobs, progress)
                    ended.put(None)
                except Exception as error:
                    ended.put(error)

    with tqdm(total=total, initial=here, desc=listing.repository.name, file=sys.stderr, **options) as bar:
        progress = _Progress(bar, stop)
        threads = [threading.Thread(target=work, args=(progress,), daemon=True) for _ in files[:WORKERS]]
        for thread in threads:
            thread.start()
        try:
            error = next((error for _ in files if (error := ended.get()) is not None), None)
        finally:  # Ctrl-C waits for no thread: one may wait for the network, and writes nothing any more when it goes on
            stop.set()
        for thread in threads:
            thread.join()
        if error is not None:
            raise error
    return storage(listing.repository) / "snapshots" / listing.commit


class _Stopped(Exception):
    """Another thread failed, or the user has interrupted."""


class _Progress:
    """What huggingface_hub takes for the progress bar of a file: counts into that of all files. It is told of bytes before
    they are written, so that what is stopped writes nothing more."""

    def __init__(self, bar: tqdm, stop: threading.Event):
        self._bar, self._stop, self._lock = bar, stop, threading.Lock()

    def update(self, size: float | None = 1):
        if self._stop.is_set():
            raise _Stopped
        with self._lock:
            self._bar.update(size)


def _fetch_one(listing: Listing, file: RemoteFile, blobs: Path, progress: _Progress):
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import WeakFileLock

    with explained(listing.repository):
        if file.size <= LARGEST_REQUEST:
            lock = blobs.parents[1] / ".locks" / blobs.parent.name / f"{file.digest}.jspec.lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock):  # another file, or another process, may want the same content
                if not (blobs / file.digest).exists():
                    _fetch_content(listing, file, blobs, progress)
        whole = (blobs / file.digest).exists()
        link = hf_hub_download(
            listing.repository.name,
            file.name,
            revision=listing.commit,
            endpoint=constants.ENDPOINT,
            cache_dir=constants.HF_HUB_CACHE,
            library_name="jspec",
        )
        content = Path(link).resolve()
        if whole and (content.name == file.digest or not content.is_relative_to(blobs.resolve())):
            return  # the second where the cache has copies, because its disk has no links
        if content.stat().st_size != file.size or _digest(content, file) != file.digest:
            Path(link).unlink()
            content.unlink(missing_ok=True)
            raise _wrong(listing, file)


def _fetch_content(listing: Listing, file: RemoteFile, blobs: Path, progress: _Progress):
    """Download the content of a file, from where an earlier call ended, and check it."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = _part(blobs, file)
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    url = hf_hub_url(listing.repository.name, file.name, revision=listing.commit, endpoint=constants.ENDPOINT)
    headers = {**build_hf_headers(library_name="jspec"), "Accept-Encoding": "identity"}
    try:
        with open(part, "ab") as stream:
            options = {"resume_size": stream.tell(), "headers": headers, "expected_size": file.size}
            http_get(url, stream, _tqdm_bar=progress, **options)  # pyright: ignore[reportArgumentType]
    except _Stopped:
        raise Refusal(f"{listing.repository}: the download was stopped") from None
    except Exception as error:
        _raise_broken(listing, file, part, error)
    if _digest(part, file) != file.digest:
        part.unlink()
        raise _wrong(listing, file)
    os.replace(part, blobs / file.digest)


def _raise_broken(listing: Listing, file: RemoteFile, part: Path, error: Exception):
    """Raise a ``Refusal`` that says how far a download came, unless the hub refused it or the disk is full."""
    size = part.stat().st_size if part.exists() else 0
    if size > file.size:
        part.unlink()
        raise _wrong(listing, file) from None
    try:
        with explained(listing.repository):
            raise error
    except Unreachable as reason:
        raise Refusal(
            f"{listing.repository}: the download of {file.name} broke off after {size:,} of {file.size:,} bytes ({reason}); "
            "run the command again, which goes on from there"
        ) from None


def _wrong(listing: Listing, file: RemoteFile) -> Refusal:
    return Refusal(
        f"{listing.repository}: {file.name} has come with other bytes than the hub lists at commit {listing.commit[:8]} "
        f"({file.size:,} bytes, digest {file.digest[:12]}), and was thrown away; run the command again, and check "
        "HF_ENDPOINT and proxies if it stays so"
    )


def _digest(path: Path, file: RemoteFile) -> str:
    """The digest of a file's content, of the kind that the hub lists for it."""
    if len(file.digest) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
