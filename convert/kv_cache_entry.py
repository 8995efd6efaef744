"""Writes the entry of a manifest that ``jspec.checkpoints.converted.cache`` explains and reads."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.converted.manifest import NAME, SCALES
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.cache_scheme import CacheScheme, cache_scales, scales_that_count
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
