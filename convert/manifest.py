"""Writes the manifest of a converted folder, which ``jspec.checkpoints.converted.manifest`` reads and checks."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jspec
from jspec.checkpoints.converted.manifest import FORMAT, NAME, VERSION, file_names, own_digest, sha256

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
