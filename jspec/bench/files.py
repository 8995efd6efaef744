"""Writes JSON files of results."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any


def write_json(file: pathlib.Path, content: Mapping[str, Any]):
    """Write ``content`` atomically.

    Raises:
      ValueError: the file cannot be written.
    """
    partial = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, file)
    except OSError as error:
        raise ValueError(f"{str(file)!r} cannot be written ({error.strerror}): expected a path for a file") from None
