"""``manifest.json`` of a converted folder: where it came from, and the SHA-256 of every file."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jspec.checkpoints.folder import Folder
from jspec.checkpoints.refusal import Refusal

NAME = "manifest.json"
PARAMS = "params"  # the Orbax checkpoint, beside it
FORMAT = "jspec-checkpoint"
VERSION = 1


def is_converted(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a folder that ``convert`` wrote, whole or damaged."""
    return os.path.isfile(os.path.join(path, NAME)) and os.path.isdir(os.path.join(path, PARAMS))


def read_manifest(folder: Folder) -> dict[str, Any]:
    """The manifest of a converted folder.

    Raises:
      Refusal: it is absent, unreadable, altered, or of a later format.
    """
    where, manifest = f"{folder.given}/{NAME}", folder.json(NAME)
    if manifest.get("format") != FORMAT:
        raise Refusal(f"{where}: format={manifest.get('format')!r}: expected {FORMAT!r}")
    if manifest.get("format_version") != VERSION:
        raise Refusal(
            f"{where}: format_version={manifest.get('format_version')!r}: this jspec reads {VERSION}; convert again"
        )
    if manifest.get("manifest_sha256") != own_digest(manifest) or not isinstance(manifest.get("files"), dict):
        raise Refusal(f"{where}: damaged, its own SHA-256 does not match")
    return manifest


def check(path: str | os.PathLike) -> list[str]:
    """Hash a converted folder again; one sentence for each damaged, missing or extra file, none if all is well.

    Raises:
      Refusal: ``path`` is no converted folder.
    """
    folder = Folder(path)
    if not folder.has(NAME):
        raise Refusal(f"{folder.given}/{NAME}: missing, so this is no converted folder")
    try:
        expected = read_manifest(folder)["files"]
    except Refusal as refusal:
        return [str(refusal)]
    found = file_names(folder.root)
    problems = [f"{name}: missing" for name in sorted(set(expected) - set(found))]
    problems += [f"{name}: not in the manifest" for name in sorted(set(found) - set(expected))]
    for name in found:
        at = folder.root / name
        if at.is_symlink() or not at.is_file():
            problems.append(f"{name}: not a regular file")
        elif name in expected and sha256(at) != expected[name]:
            problems.append(f"{name}: damaged, its SHA-256 does not match")
    return [f"{folder.given}/{problem}" for problem in problems]


def file_names(folder: Path) -> list[str]:
    """Everything in the tree that is no folder, as POSIX names relative to it, the manifest left out."""
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())
    return sorted(name for name in names if name != NAME)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def own_digest(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
