"""Other values of the keys of a config.json, and what jspec reads of them."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import decoder_config, read_fields
from jspec.checkpoints.huggingface.multimodal import has_text_config
from jspec.checkpoints.huggingface.unread_keys import unread_keys


def other_values(value):
    """Values that a key may have instead, of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, 0]
    if isinstance(value, float):
        return [1.5 * value + 0.1]
    if isinstance(value, str):
        return ["gelu", "relu"]
    if isinstance(value, list):
        return [value[::-1], value[:1]]
    if isinstance(value, dict):
        return [{**value, key: new} for key, held in value.items() for new in other_values(held)]
    return [True, 5, 0.5] if value is None else []


def read(folder, raw: dict):
    """What jspec reads: the config, or None if it refuses it; and the keys that it warns of."""
    (folder / "config.json").write_text(json.dumps(raw))
    try:
        fields = read_fields(Folder(folder))
        return decoder_config(Folder(folder), fields), unread_keys(fields, has_text_config(fields))
    except Refusal:
        return None, []


def assert_none_is_ignored(
    folder, base: dict, changes: Iterable[tuple[str, dict]], logits: Callable[[dict], Any], least: int
):
    """That what jspec reads changes, or a key is warned of, wherever what transformers computes changes.

    Args:
      base: config.json.
      changes: others, and behind which key they have another value.
      logits: what transformers computes by a config.json; None if it refuses it, or needs other weights.
      least: so many changes at least have to change that.
    """
    expected, (config, unread) = logits(base), read(folder, base)
    assert expected is not None
    assert config is not None
    assert unread == []
    ignored, changed = [], 0
    for key, raw in changes:
        found = logits(raw)
        if found is None or found.equal(expected):
            continue
        changed += 1
        now, warned = read(folder, raw)
        if now == config and not {key, f"text_config.{key}"} & set(warned):
            ignored.append((key, raw.get(key)))
    assert changed >= least, "no value was tried that changes anything"
    assert ignored == []
