"""Checkpoints that NVIDIA Model Optimizer has quantised: what config.json or ``hf_quant_config.json`` says of them.

Both files hold the same keys: in config.json they are in ``quantization_config`` with ``quant_method: modelopt``, and in the
other file, which older versions wrote alone, in ``quantization``."""

import dataclasses
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.config_fields import Modules, read_modules
from jspec.checkpoints.quantized.e2m1 import NVFP4, read_nvfp4_of_model_optimizer
from jspec.checkpoints.quantized.fp8 import FP8Blocks, Scaled, blocks_of_model_optimizer
from jspec.checkpoints.quantized.known_keys import KEYS, require_known
from jspec.quantization.formats import INSTEAD

METHOD, FILE, KEY = "modelopt", "hf_quant_config.json", "quantization_config"
LISTS = ("exclude_modules", "ignore")  # of modules that are not quantised
_SCALES: dict[str, Any] = {"FP8": "tensor", "FP8_PER_CHANNEL_PER_TOKEN": "channel"}
_BLOCKS = "FP8_PB_WO"
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
# Letters of a wildcard -> those of a pattern; those that are escaped occur in no name, and are refused there.
_WILDCARDS = str.maketrans({letter: rf"\{letter}" for letter in ".+()|^${}\\"} | {"*": ".*", "?": "."})


def with_model_optimizer(folder: Folder, fields: Fields) -> Fields:
    """The config.json ``fields`` with the ``quantization_config`` that ``hf_quant_config.json`` stands for, if it lacks one.

    Raises:
      Refusal: the algorithm is not read, or the two files name different ones.
    """
    if not folder.has(FILE):
        return fields
    whole = Fields(folder.json(FILE), f"{folder.given}/{FILE}")
    described = whole.nested("quantization")
    is_read = described is not None and described.text("quant_algo", None) is not None
    if described is not None and is_read:
        read_model_optimizer(described)
    require_known(whole, {"producer": None, "quantization": KEYS[METHOD]})
    if described is None or not is_read:
        return fields
    own = fields.nested(KEY)
    if own is None:
        return dataclasses.replace(fields, raw={**fields.raw, KEY: {**described.raw, "quant_method": METHOD}})
    said, other = own.raw.get("quant_algo"), described.raw["quant_algo"]
    if own.raw.get("quant_method") != METHOD or (isinstance(said, str) and said.upper() != other.upper()):
        raise described.refuse("quant_algo", f"what {KEY} of config.json says; remove the one that is wrong")
    return fields


def read_model_optimizer(fields: Fields) -> Scaled | NVFP4 | FP8Blocks:
    """How the linear maps of a checkpoint are quantised.

    Args:
      fields: the object that says so.

    Raises:
      Refusal: in a way that is not read.
    """
    algorithm = fields.text("quant_algo").upper()
    if algorithm in _NVFP4:
        return read_nvfp4_of_model_optimizer(fields, *LISTS)
    if algorithm == _BLOCKS:
        return blocks_of_model_optimizer(fields, *LISTS)
    if algorithm not in _SCALES:
        raise Refusal(
            f"{fields.where}: {fields.prefix}quant_algo={fields.raw['quant_algo']!r}, of NVIDIA Model Optimizer, is not "
            f"read; {INSTEAD}"
        )
    return Scaled.of("fp8", _SCALES[algorithm], _read_wildcards(fields), fields.where)


def _read_wildcards(fields: Fields) -> Modules:
    """The modules that are not quantised: names, in which ``*`` stands for any letters, ``?`` for one, and ``[..]`` for one
    of those in it."""
    key = next((key for key in LISTS if fields.raw.get(key) is not None), LISTS[0])
    listed = fields.raw.get(key)
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        patterns = ["re:" + name.translate(_WILDCARDS).replace("[!", "[^") + "$" for name in listed if _is_wild(name)]
        names = [name for name in listed if not _is_wild(name)]
        fields = dataclasses.replace(fields, raw={**fields.raw, key: names + patterns})
    return read_modules(fields, key)


def _is_wild(name: str) -> bool:
    return any(letter in name for letter in "*?[")
