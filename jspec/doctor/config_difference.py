"""Keys in which two config.json differ."""

from collections.abc import Iterator, Mapping
from typing import Any

from jspec.checkpoints.files.folder import Folder

IGNORED = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")  # they change no logits
SHOWN = 60  # characters of a value


def config_differences(ours: Folder, reference: Folder) -> Iterator[str]:
    """One phrase for each key, ``rope_theta 10000.0 here and 500000.0 in the reference``."""
    here, there = (
        _flat(folder.json("config.json")) if folder.has("config.json") else {} for folder in (ours, reference)
    )
    for key in sorted(here.keys() | there.keys()):
        values = [_shown(side, key) for side in (here, there)]
        if values[0] != values[1] and key.rpartition(".")[2] not in IGNORED:
            yield f"{key} {values[0]} here and {values[1]} in the reference"


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _shown(config: Mapping[str, Any], key: str) -> str:
    text = repr(config[key]) if key in config else "nothing"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]} ..."
