"""``manifest.json`` of a converted folder: what it was made from, and the size and SHA-256 of every file."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jspec._validation import is_int
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import NUMPY_DTYPES

NAME = "manifest.json"
PARAMS = "params"  # the folder of the Orbax checkpoint, beside the manifest
CACHE, SCALES = "kv_cache", "scales"  # what is said of a cache in eight bits; see ``converted.cache``
FORMAT = "jspec-checkpoint"
VERSION = 2  # of 1, codes of four bits were packed in another order, and all else was as it is
SMALL = 2**20  # bytes; a file up to this size is hashed whenever its folder is loaded
AGAIN = "convert the checkpoint again, or fetch the folder again"
UNREAD = ("README.md", "LICENSE")  # may be added to a converted folder, as hidden files may, because nothing reads them


def is_converted(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a folder that ``convert`` wrote; its files may be damaged."""
    return os.path.isfile(os.path.join(path, NAME)) and os.path.isdir(os.path.join(path, PARAMS))


def read_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of a converted folder.

    Raises:
      Refusal: it is missing, unreadable or altered, or its format is that of another version.
    """
    where, manifest = f"{folder.given}/{NAME}", folder.json(NAME)
    if manifest.get("format") != FORMAT:
        raise Refusal(f"{where}: format={manifest.get('format')!r}: expected {FORMAT!r}")
    version = manifest.get("format_version")
    if version not in (1, VERSION) or (version == 1 and manifest.get("quantization") == "int4"):
        which = " for int4" if version == 1 else ""
        raise Refusal(f"{where}: format_version={version!r}: this jspec reads {VERSION}{which}; convert again")
    if manifest.get("manifest_sha256") != own_digest(manifest):
        raise Refusal(f"{where}: damaged, its own SHA-256 does not match; convert the checkpoint again")
    _require_form(manifest, where)
    return manifest


def _require_form(manifest: dict[str, Any], where: str):
    """Raise a ``Refusal`` unless every entry of the manifest has the right type.

    Manifests that earlier versions wrote have no ``sizes``."""
    fields = Fields(manifest, where)
    if fields.text("dtype") not in NUMPY_DTYPES:
        raise fields.refuse("dtype", f"one of {', '.join(NUMPY_DTYPES)}")
    for name in ("quantization", "architecture"):
        fields.text(name, None)
    for name in ("source", "versions", "head"):
        fields.nested(name)
    if not isinstance(manifest.get("plain_maps", []), list):
        raise fields.refuse("plain_maps", "a list of names of linear maps")
    others = manifest.get("other_formats", [])
    if not isinstance(others, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in others):
        raise fields.refuse("other_formats", "a list of pairs, each the name of a linear map and its format or null")
    for name in ("tensor_count", "parameter_count", "draft_vocab_size", "shared_width"):
        fields.integer(name, None, low=0, high=2**63)
    cache = fields.nested(CACHE)
    if cache is not None and not _are_numbers(cache.raw.get(SCALES)):
        raise cache.refuse(SCALES, "an object of names of tensors and lists of their numbers")
    files, sizes = manifest.get("files"), manifest.get("sizes")
    if not isinstance(files, dict) or not files or not all(isinstance(digest, str) for digest in files.values()):
        raise fields.refuse("files", "an object of file names and their SHA-256")
    if sizes is not None and not (
        isinstance(sizes, dict) and sizes.keys() == files.keys() and all(is_int(n) and n >= 0 for n in sizes.values())
    ):
        raise fields.refuse("sizes", "an object of the same file names and their sizes in bytes")


def _are_numbers(scales: Any) -> bool:
    """Whether ``scales`` is an object of names and lists of numbers, which JSON has as floats."""
    lists = scales.values() if isinstance(scales, dict) else [None]
    return all(isinstance(values, list) and all(type(number) is float for number in values) for values in lists)


def require_whole(folder: Folder, manifest: dict[str, Any], hash_all: bool = False):
    """Raise a ``Refusal`` unless a converted folder holds exactly the files of its manifest.

    Args:
      folder: the folder.
      manifest: its manifest, as ``read_manifest`` returns it.
      hash_all: whether to hash every file. If not, names, sizes and links are compared and only files of up to ``SMALL``
        bytes are hashed. That finds every change except one inside a large file that keeps its size. Of a file that was
        read already, the digest of these bytes is compared (``Folder.digests``), and it is not read again.

    Raises:
      Refusal: a file is damaged, missing, or not in the manifest.
    """
    problems = list(problems_of(folder, manifest, hash_all))
    if problems:
        more = f" ({len(problems) - 1} more; jspec-convert --check names them all)" if len(problems) > 1 else ""
        raise Refusal(f"{problems[0]}{more}; {AGAIN}")


def problems_of(folder: Folder, manifest: dict[str, Any], hash_all: bool) -> Iterator[str]:
    """One sentence for each problem: missing files first, then unexpected ones, then damaged ones."""
    expected, sizes, present = manifest["files"], manifest.get("sizes") or {}, file_names(folder.root)
    digests = folder.digests or {}
    for name in sorted(expected.keys() - set(present)):
        yield f"{folder.given}/{name}: missing"
    for name in sorted(set(present) - expected.keys()):
        yield f"{folder.given}/{name}: not in the manifest"
    for name in present:
        try:
            path = folder.below(name)
        except Refusal as refusal:
            yield str(refusal)
            continue
        size = path.stat().st_size
        if size != sizes.get(name, size):
            yield f"{folder.given}/{name}: damaged, it has {size} bytes where the manifest says {sizes[name]}"
        elif name not in expected or not (hash_all or size <= SMALL):
            continue
        elif (digests.get(path) or sha256(path)) != expected[name]:
            yield damage(folder, name)


def damage(folder: Folder, name: str) -> str:
    """The sentence that says that a file has other bytes than the manifest says."""
    return f"{folder.given}/{name}: damaged, its SHA-256 does not match"


def file_names(folder: Path) -> list[str]:
    """The sorted paths, relative to ``folder``, of every file and symbolic link in its tree; no link is followed.

    The manifest itself, hidden names and those of ``UNREAD`` at the top level are left out.
    """
    names: list[str] = []
    for at, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(at, name))]
        if Path(at) == folder:
            folders[:] = [name for name in folders if not name.startswith(".")]
            files = [name for name in files if not name.startswith(".") and name not in (NAME, *UNREAD)]
        names += [Path(at, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(names)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_digest(manifest: dict[str, Any]) -> str:
    """The SHA-256 of a manifest without the key ``manifest_sha256``, under which the manifest holds this digest."""
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
