"""Whether an engine fits on its device, computed from shapes before anything is loaded or compiled."""

import dataclasses

import jax
import psutil

from jspec.config import EngineConfig, ModelConfig
from jspec.heads import HeadConfig

GIB = 2**30
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes that an engine needs on its device.

    Attributes:
      weights: the weights of target and draft.
      cache: keys and values of both, in all pages.
      work: the largest temporaries of a round: the logits of target and draft, and one layer's keys and values gathered
        from their pages.
    """

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work


def budget(target: ModelConfig, draft: ModelConfig | HeadConfig | None, config: EngineConfig, width: int) -> Budget:
    """What an engine needs whose target reads ``width`` query tokens for each row in a round; ``draft`` may be None."""
    size = ITEMSIZE[config.dtype]
    models = [target] if draft is None else [target, draft]
    decoders = [model.decoder for model in models if model.decoder is not None]
    slots = config.pool_pages * config.page_size
    row_slots = config.max_batch * config.pages_per_row * config.page_size
    logits = config.max_batch * width * target.vocab_size * len(models)
    gathered = max(decoder.kv_bytes(row_slots, size) // decoder.num_layers for decoder in decoders)
    return Budget(
        weights=sum(model.weight_bytes(size) for model in models),
        cache=sum(decoder.kv_bytes(slots, size) for decoder in decoders),
        work=logits * (size + 4) + gathered,
    )


def check_memory(target: ModelConfig, draft: ModelConfig | HeadConfig | None, config: EngineConfig, width: int):
    """Raise a MemoryError that gives the numbers and a way out, if the engine does not fit."""
    need, free = budget(target, draft, config, width), free_bytes()
    if need.total > free:
        raise MemoryError(
            f"needs {need.total / GIB:.1f} GiB ({need.weights / GIB:.1f} of weights, {need.cache / GIB:.1f} of KV cache for "
            f"max_batch={config.max_batch} x max_len={config.max_len}, {need.work / GIB:.1f} of workspace), but "
            f"{free / GIB:.1f} GiB are free; lower max_batch, max_len or num_pages"
        )


def free_bytes() -> int:
    """How many bytes of the default device's memory are free."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available
