"""Chooses the type of cached keys and values, or latents, and reads the scales of those in eight bits.

A target whose keys and values are rounded when they are cached is another model than the same target without that, as one
with quantised weights is. So its own checkpoint decides, unless the user does, and drafts change nothing about it. What a
drafter caches has the dtype of the model."""

import dataclasses
import warnings

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.quantized.cache_scheme import cache_scales, cache_scheme
from jspec.config import EngineConfig, ModelConfig
from jspec.config.engine import FP8_CACHES
from jspec.models.cache_pools import KVRounding

HEADS, TOKENS = FP8_CACHES


def with_kv_cache_dtype(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The config with the type of cached keys and values, or latents, that ``auto`` stands for: FP8 where the checkpoint is
    made for that, with a warning, and the dtype of the model elsewhere."""
    chosen, target = config.kv_cache_dtype, checkpoint.target_config
    if chosen in FP8_CACHES:
        return dataclasses.replace(config, expand_latents=True)
    scheme = checkpoint.cache_scheme
    if chosen != "auto" or scheme is None:
        if chosen == "auto":
            _warn_of_older_folder(checkpoint, config.dtype)
        return dataclasses.replace(config, kv_cache_dtype=config.dtype)
    if not scheme.is_for(target):
        of_heads = "that is of keys and values of heads, and latents are cached"
        why = of_heads if scheme.is_read else "jspec does not read that"
        warnings.warn(f"{scheme}: {why}, so the cache has the dtype of the model, {config.dtype}", stacklevel=4)
        return dataclasses.replace(config, kv_cache_dtype=config.dtype)
    cached = "keys and values" if target.latent is None else "latents"
    warnings.warn(
        f"{scheme}: {cached} are cached in FP8, with the scales in the files; kv_cache_dtype={config.dtype!r} leaves them "
        "as they are",
        stacklevel=4,
    )
    return dataclasses.replace(config, kv_cache_dtype=HEADS, expand_latents=True)


def _warn_of_older_folder(checkpoint: Checkpoint, dtype: str):
    """Warn if a folder was converted before the scales of the cache were taken along, of a checkpoint that has some."""
    if not checkpoint.is_converted or checkpoint.converted.says_of_cache:
        return
    scheme = cache_scheme(checkpoint.folder, checkpoint.fields)
    if scheme is not None and scheme.is_for(checkpoint.target_config):
        warnings.warn(
            f"{scheme}: the folder was converted without the scales of that, so the cache has the dtype of the model, "
            f"{dtype}; convert the checkpoint again",
            stacklevel=5,
        )


def kv_rounding(config: EngineConfig, checkpoint: Checkpoint) -> tuple[KVRounding, ...] | None:
    """How each layer of a target rounds keys and values, or latents, that it caches; None if none does.

    Raises:
      Refusal: scales in the files cannot be used.
    """
    target: ModelConfig = checkpoint.target_config
    if config.kv_cache_dtype == TOKENS:
        return (KVRounding(),) * target.num_layers
    if config.kv_cache_dtype != HEADS:
        return None
    scales = cache_scales(checkpoint.cache_scales, target, checkpoint.folder.given)
    return tuple(KVRounding(*(tuple(each.tolist()) for each in of_layer)) for of_layer in scales)
