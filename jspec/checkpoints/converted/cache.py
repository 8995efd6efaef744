"""The entry ``kv_cache`` of a manifest: what the original checkpoint says of a cache in eight bits, and its scales.

The entry holds the key and the value of the original file, and under ``scales`` the numbers of each tensor of scales, by its
name. Both are then read as those of a Hugging Face folder are, so that they mean the same. An entry that is null says that
there was nothing of the kind. Folders that earlier versions wrote have no entry."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.converted.manifest import CACHE, NAME, SCALES
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Derived, Tensor
from jspec.checkpoints.quantized.cache_scheme import SCHEMES, CacheScheme, cache_scales, scales_that_count
from jspec.config import ModelConfig
from jspec.config.model import count


def cache_entry(
    scheme: CacheScheme | None, tensors: Mapping[str, Tensor], config: ModelConfig, where: str
) -> tuple[dict[str, Any] | None, str]:
    """The entry, and a note for the user; the note is empty if there is nothing to say.

    Args:
      scheme: what the original checkpoint says of its cache.
      tensors: those in its files, by name.
      config: of the language model in it.
      where: its folder, for messages.

    Raises:
      Refusal: the cache is to be in FP8, and scales in the files cannot be used; the message has the name of the tensor.
    """
    found = scales_that_count(tensors, config)
    is_read, left_out = scheme is not None and scheme.is_for(config), ""
    try:
        if found:
            _check(tensors, config, where)
    except Refusal as refusal:
        if is_read:
            raise
        found, left_out = {}, f"scales of the cache are left out: {refusal}"
    if scheme is None and not found:
        return None, left_out
    said = {} if scheme is None else {scheme.key: scheme.value}
    scales = {name: np.float32(tensor.read()).reshape(-1).tolist() for name, tensor in found.items()}
    cached = "keys and values" if config.latent is None else "latents"
    note = f"kept in {NAME}: {count(len(scales), 'scale')} of {cached}"
    if scheme is not None and is_read:
        note += f"; the folder turns on a cache in FP8 when it is loaded ({scheme.key})"
    return {**said, SCALES: scales}, left_out or note


def _check(tensors: Mapping[str, Tensor], config: ModelConfig, where: str):
    with warnings.catch_warnings():  # of scales that are missing, which is said when the folder is loaded
        warnings.simplefilter("ignore", UserWarning)
        cache_scales(tensors, config, where)


def scheme_of(manifest: Mapping[str, Any], folder: Folder) -> CacheScheme | None:
    """What the original checkpoint of a converted folder says of its cache, as ``cache_scheme`` returns it."""
    entry = manifest.get(CACHE) or {}
    found = ((key, entry[key]) for key in SCHEMES if key in entry)
    return next((CacheScheme(f"{folder.given}/{NAME}", key, value) for key, value in found), None)


def scales_of(manifest: Mapping[str, Any], folder: Folder) -> dict[str, Tensor]:
    """The tensors of scales that stand in the manifest, by name."""
    scales, path = (manifest.get(CACHE) or {}).get(SCALES, {}), folder.root / NAME
    with np.errstate(over="ignore"):  # infinity is no scale, and refused as such
        numbers = {name: np.array(values, np.float32) for name, values in scales.items()}
    return {name: Derived(name, NAME, path, values.shape, "float32", values) for name, values in numbers.items()}
