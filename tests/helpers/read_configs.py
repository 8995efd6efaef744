"""What jspec reads of a config.json, and other values of its keys."""

import json

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.huggingface.config import decoder_config, read_fields
from jspec.checkpoints.huggingface.multimodal import has_text_config
from jspec.checkpoints.huggingface.unread_keys import unread_keys
from jspec.config import ModelConfig


def read(folder, raw: dict) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    fields = read_fields(Folder(folder))
    config = decoder_config(Folder(folder), fields)
    assert unread_keys(fields, has_text_config(fields)) == []
    return config


def found(config: ModelConfig, *names: str) -> tuple:
    return tuple(getattr(config, name) for name in names)
