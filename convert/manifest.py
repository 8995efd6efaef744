"""Writing the manifest of a converted folder; ``jspec.checkpoints.manifest`` reads and checks it."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jspec
from jspec.checkpoints.manifest import FORMAT, NAME, VERSION, file_names, own_digest, sha256

_PACKAGES = {"jax": "jax", "flax": "flax", "orbax": "orbax-checkpoint", "numpy": "numpy"}


def write_manifest(folder: Path, description: dict[str, Any]):
    """Measure and hash every file in ``folder`` and write its manifest; ``description`` says what the files are."""
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
