"""Writes the manifest of a converted folder, which ``jspec.checkpoints.converted.manifest`` reads, and checks by it."""

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import jspec
from jspec.checkpoints.converted.manifest import (
    FORMAT,
    NAME,
    VERSION,
    file_names,
    own_digest,
    problems_of,
    read_manifest,
    sha256,
)
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal

_PACKAGES = {"jax": "jax", "flax": "flax", "orbax": "orbax-checkpoint", "numpy": "numpy"}


def write_manifest(folder: Path, description: dict[str, Any]):
    """Write ``manifest.json`` with the size and the SHA-256 of every file in ``folder``.

    Args:
      folder: the folder, complete but for its manifest.
      description: further entries, which say what the folder was made from and what it holds.
    """
    names = file_names(folder)
    manifest = {
        "format": FORMAT,
        "format_version": VERSION,
        **description,
        "versions": {
            "jspec": jspec.__version__,
            **{name: importlib.metadata.version(package) for name, package in _PACKAGES.items()},
        },
        "files": {name: sha256(folder / name) for name in names},
        "sizes": {name: (folder / name).stat().st_size for name in names},
    }
    manifest["manifest_sha256"] = own_digest(manifest)
    (folder / NAME).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def check(path: str | os.PathLike) -> list[str]:
    """One sentence for each damaged, missing or extra file of a converted folder, after every file was hashed again.

    An empty list means that the folder is what was written.

    Raises:
      Refusal: ``path`` is no converted folder.

    Example::

        assert check("path/to/converted") == []  # every file is as it was written
    """
    folder = Folder(path)
    if not folder.has(NAME):
        raise Refusal(f"{folder.given}/{NAME}: missing, so this is no converted folder")
    try:
        manifest = read_manifest(folder)
    except Refusal as refusal:
        return [str(refusal)]
    return list(problems_of(folder, manifest, hash_all=True))
