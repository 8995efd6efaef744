"""Checkpoints of one file of weights with other keys, or with other tensors."""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file


def set_keys(path: Path, within: str | None = None, **changes) -> Path:
    """Set keys of a JSON file, or of the object at its key ``within``; ``...`` removes a key.

    Args:
      path: the file, or the folder of a config.json.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = json.loads(file.read_text())
    own = fields if within is None else fields[within]
    own |= changes
    for key in [key for key, value in own.items() if value is ...]:
        del own[key]
    file.write_text(json.dumps(fields))
    return path


def resave(folder: Path, rename=lambda name: name, add=None, drop=(), **keys) -> Path:
    """``folder`` with its tensors renamed, added to or dropped, and keys of config.json set (``...`` removes one).

    Args:
      rename: function of the name of a tensor.
      add: name -> array, or a function of all tensors that gives such.
    """
    [file] = folder.glob("*.safetensors")
    stored = load_file(file)
    added = add(stored) if callable(add) else add or {}
    tensors = {rename(name): array for name, array in stored.items() if name not in drop}
    save_file({**tensors, **added}, file, metadata={"format": "pt"})
    return set_keys(folder, **keys)
