"""How weights are quantised by files beside config.json, where AutoGPTQ and AutoAWQ said it in 2023."""

import dataclasses
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.quantized.awq import read_awq
from jspec.checkpoints.quantized.config_fields import KEYS, quantization_of
from jspec.checkpoints.quantized.gptq import read_gptq
from jspec.checkpoints.quantized.known_keys import KEYS as KNOWN_KEYS
from jspec.checkpoints.quantized.known_keys import require_known

FILES = ("quantize_config.json", "quant_config.json")  # the first is AutoGPTQ's, and both were AutoAWQ's
_RENAMED: dict[str, str] = {"w_bit": "bits", "q_group_size": "group_size"}  # keys of AutoAWQ


def with_older_file(folder: Folder, fields: Fields) -> Fields:
    """The config.json ``fields`` with the ``quantization_config`` that one of ``FILES`` stands for, if it lacks one.

    Raises:
      Refusal: that file says something that is not read.
    """
    name = next(filter(folder.has, FILES), None)
    if name is None or quantization_of(fields):
        return fields
    held: dict[str, Any] = folder.json(name)
    raw = {_RENAMED.get(key, key): value for key, value in held.items()}
    described = Fields(raw, f"{folder.given}/{name}")
    method, read = ("awq", read_awq) if "zero_point" in raw else ("gptq", read_gptq)
    read(described)
    require_known(described, KNOWN_KEYS[method])
    return dataclasses.replace(fields, raw={**fields.raw, KEYS[0]: {**raw, "quant_method": method}})
