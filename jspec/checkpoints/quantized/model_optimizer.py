"""Checkpoints that NVIDIA Model Optimizer has quantised: what config.json or ``hf_quant_config.json`` says of them.

Both files hold the same keys: in config.json they are in ``quantization_config`` with ``quant_method: modelopt``, and in the
other file, which older versions wrote alone, in ``quantization``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.quantized.config_fields import Modules, quantization_of, read_modules, require_one_of
from jspec.checkpoints.quantized.e2m1 import read_floats, read_nvfp4_of_model_optimizer
from jspec.checkpoints.quantized.format import BlockFormat, StoredFormats, read_plain
from jspec.checkpoints.quantized.known_keys import KEYS, require_known
from jspec.checkpoints.quantized.mixed import read_mixed
from jspec.checkpoints.quantized.scaled import FP8Blocks, Scaled
from jspec.checkpoints.quantized.scaled_inputs import read_awq_of_model_optimizer
from jspec.quantization.formats import INSTEAD

METHOD, FILE, KEY = "modelopt", "hf_quant_config.json", "quantization_config"
LISTS = ("exclude_modules", "ignore")  # of modules that are not quantised
# Algorithms with a scale for each weight or output channel -> what the numbers are, and which of these has one.
_SCALES: dict[str, tuple[Any, Any]] = {
    "FP8": ("fp8", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8", "channel"),
    "W8A16": ("int8", "channel"),
}
# Algorithms whose groups of inputs have scales -> the function that reads the rest, given the object that names the
# algorithm and what its list of modules that are not quantised may be called.
_IN_GROUPS: dict[str, Callable[..., BlockFormat]] = {
    "FP8_PB_WO": lambda fields, *lists: FP8Blocks(plain=read_plain(fields, *lists), block=(128, 128)),
    "MXFP8": functools.partial(read_floats, "mxfp8"),
    "NVFP4": read_nvfp4_of_model_optimizer,
    "W4A16_AWQ": read_awq_of_model_optimizer,
    "W4A16_NVFP4": read_nvfp4_of_model_optimizer,
    "W4A8_AWQ": read_awq_of_model_optimizer,
}
_MIXED, _LAYERS = "MIXED_PRECISION", "quantized_layers"  # whose modules have an algorithm each
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
    own = next(iter(quantization_of(fields)), None)
    if own is None:
        return dataclasses.replace(fields, raw={**fields.raw, KEY: {**described.raw, "quant_method": METHOD}})
    said, other = own.raw.get("quant_algo"), described.raw["quant_algo"]
    if own.raw.get("quant_method") != METHOD or (isinstance(said, str) and said.upper() != other.upper()):
        raise described.refuse("quant_algo", f"what {KEY} of config.json says; remove the one that is wrong")
    if own.raw.get(_LAYERS) != described.raw.get(_LAYERS):
        raise described.refuse(_LAYERS, f"what {KEY} of config.json says; remove the one that is wrong")
    size = {key: value for key, value in described.raw.items() if key == "group_size"}  # config.json may lack it
    return dataclasses.replace(fields, raw={**fields.raw, KEY: {**size, **own.raw}})


def read_model_optimizer(fields: Fields) -> StoredFormats:
    """How the linear maps of a checkpoint are quantised.

    Args:
      fields: the object that says so.

    Raises:
      Refusal: in a way that is not read.
    """
    if fields.text("quant_algo").upper() != _MIXED:
        return _read_alike(fields)
    if fields.nested(_LAYERS) is None:
        raise fields.refuse(_LAYERS, "an object of modules and their quant_algo, which no other module has")
    plain = {key: fields.raw.get(key) for key in LISTS}

    def read(own: Fields) -> BlockFormat:
        return _read_alike(dataclasses.replace(own, raw={**plain, **own.raw}))

    return read_mixed(fields, _LAYERS, read, lambda module: module, None)


def _read_alike(fields: Fields) -> BlockFormat:
    """How modules are quantised that have the same algorithm."""
    algorithm = fields.text("quant_algo").upper()
    if not algorithm.endswith("_AWQ"):  # of which alone numbers that multiply inputs are read
        require_one_of(fields, "pre_quant_scale", False, absent=False)
    if algorithm in _IN_GROUPS:
        return _IN_GROUPS[algorithm](fields, *LISTS)
    if algorithm not in _SCALES:
        raise Refusal(
            f"{fields.where}: {fields.prefix}quant_algo={fields.raw['quant_algo']!r}, of NVIDIA Model Optimizer, is not "
            f"read; {INSTEAD}"
        )
    return Scaled.of(*_SCALES[algorithm], _read_wildcards(fields), fields.where)


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
