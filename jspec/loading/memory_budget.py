"""The bytes that an engine needs on its devices, computed from shapes before anything is loaded or compiled."""

import dataclasses
from collections.abc import Sequence

import jax
import psutil

from jspec.config import EngineConfig, ModelConfig, Shards
from jspec.config.heads import HeadConfig
from jspec.engine.multihost.leader import fewest
from jspec.loading.context_length import LADDER
from jspec.models.kv_cache import gathers_pages

GIB = 2**30
CPU_CACHE = 4 * GIB  # for keys and values where there is no GPU
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes that an engine needs on its device, or on each of several.

    Attributes:
      weights: the weights of target and draft.
      cache: keys and values of both, in all pages.
      work: the largest temporaries: of a round, the logits of target and draft, and one layer's keys and values where
        attention gathers them from their pages; of a prefill batch, one layer's activations, and its keys and values if
        they follow from latents.
    """

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work


def budget(
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    config: EngineConfig,
    width: int,
    shards: Sequence[Shards | None] = (None, None),
) -> Budget:
    """The bytes of an engine whose target reads ``width`` query tokens of each row in a round; ``draft`` may be None.

    ``shards`` are those of target and draft, as ``shards_of`` has them."""
    size = ITEMSIZE[config.dtype]
    models = [target] if draft is None else [target, draft]
    decoders = [
        _local(model.decoder, shard) for model, shard in zip(models, shards, strict=False) if model.decoder is not None
    ]
    weights = [
        model.weight_bytes(size)
        if shard is None or model.language_model is None
        else shard.weight_bytes(model.language_model, size)
        for model, shard in zip(models, shards, strict=False)
    ]
    slots = config.pool_pages * config.page_size
    row_slots = config.max_batch * config.pages_per_row * config.page_size
    logits = config.max_batch * width * target.vocab_size * len(models)
    gathered = max(
        decoder.kv_bytes(row_slots, size) // decoder.num_layers if gathers_pages(decoder, config.dtype, on_gpu()) else 0
        for decoder in decoders
    )
    tokens = config.chunk_buckets[-1] * config.chunk
    passes = tokens * max(3 * decoder.intermediate_size + 8 * decoder.hidden_size for decoder in decoders) * size
    passes += max(_expanded_bytes(decoder, config) for decoder in decoders)
    return Budget(
        weights=sum(weights),
        cache=sum(decoder.kv_bytes(slots, size) for decoder in decoders),
        work=max(logits * (size + 4) + gathered, passes),
    )


def _expanded_bytes(decoder: ModelConfig, config: EngineConfig) -> int:
    """Bytes of the keys and values that a layer of a prefill batch computes from latents, in bfloat16 alone."""
    pages = config.pages_of_prefill(config.chunk_buckets[-1])
    if decoder.latent is None or pages is None or config.dtype != "bfloat16":
        return 0
    numbers = decoder.num_heads * (decoder.head_dim + decoder.latent.value_dim)
    return pages * config.page_size * numbers * ITEMSIZE["bfloat16"]


def _local(config: ModelConfig, shards: Shards | None) -> ModelConfig:
    return config if shards is None else shards.local(config)


def longest_that_fits(
    lengths: Sequence[int],
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    config: EngineConfig,
    width: int,
    share: float,
    shards: Sequence[Shards | None] = (None, None),
) -> int:
    """The first of ``lengths`` that is a ``max_len`` for which there is memory, or the last of them.

    On a GPU it needs ``share`` of the free memory for weights, workspace and the pages of one text of that length: other
    requests share the pages that remain. Elsewhere the cache of ``max_batch`` such texts may have 4 GiB.
    """
    room = share * free_bytes() if on_gpu() else CPU_CACHE

    def fits(length: int) -> bool:
        sized = dataclasses.replace(config, max_len=length, num_pages=None)
        if not on_gpu():
            return budget(target, draft, sized, width, shards).cache <= room
        return _least_need(target, draft, sized, width, shards).total <= room

    length = next((length for length in lengths if fits(length)), lengths[-1])
    return length if shards[0] is None else fewest(length)


def _least_need(target, draft, config: EngineConfig, width: int, shards: Sequence[Shards | None]) -> Budget:
    """The bytes of an engine with as many pages as one row may need."""
    return budget(target, draft, dataclasses.replace(config, num_pages=config.pages_per_row), width, shards)


def with_num_pages(
    target: ModelConfig,
    draft: ModelConfig | HeadConfig | None,
    config: EngineConfig,
    width: int,
    share: float,
    shards: Sequence[Shards | None] = (None, None),
) -> EngineConfig:
    """``config`` with a number of pages, if it has none, that fits beside weights and workspace.

    On a GPU the pool takes what remains of ``share`` of the free memory. The number is rounded down to five significant
    bits, so that the next start, with nearly as much memory, finds its programs in the compilation cache. Elsewhere every
    row gets room for ``max_len`` tokens, as far as 4 GiB hold them.

    Raises:
      MemoryError: the pages that were asked for, or those that a single row needs, do not fit. The message has the
        numbers and a way out.
    """
    free = free_bytes()
    if config.num_pages is None:
        least = dataclasses.replace(config, num_pages=config.pages_per_row)
        need = budget(target, draft, least, width, shards)
        page = need.cache // least.pool_pages
        if on_gpu():
            pages = _rounded_down(int((share * free - need.weights - need.work) // max(page, 1)) - 1)
        else:
            pages = min(config.max_batch * config.pages_per_row, CPU_CACHE // max(page, 1))
        if shards[0] is not None:
            pages = fewest(pages)
        config = dataclasses.replace(least, num_pages=max(pages, config.pages_per_row))
    need = budget(target, draft, config, width, shards)
    if need.total > free:
        raise MemoryError(
            f"needs {need.total / GIB:.1f} GiB ({need.weights / GIB:.1f} of weights, {need.cache / GIB:.1f} of KV cache for "
            f"num_pages={config.num_pages} of {config.page_size} tokens, {need.work / GIB:.1f} of workspace for "
            f"max_batch={config.max_batch} x max_len={config.max_len}), but {free / GIB:.1f} GiB are free; lower max_batch, "
            f"max_len or num_pages{_fitting_length(target, draft, config, width, free, shards)}"
        )
    return config


def _fitting_length(target, draft, config: EngineConfig, width: int, free: int, shards) -> str:
    """What an error says of the longest ``max_len`` that would fit; nothing if none would."""
    lengths = [length for length in LADDER if length < config.max_len]
    fitting = (
        length
        for length in lengths
        if _least_need(target, draft, dataclasses.replace(config, max_len=length), width, shards).total <= free
    )
    length = next(fitting, None)
    return "" if length is None else f"; max_len={length} would fit"


def _rounded_down(number: int) -> int:
    """The largest number of at most five significant bits that is not above ``number``; 0 for negative ones."""
    if number <= 0:
        return 0
    shift = max(number.bit_length() - 5, 0)
    return number >> shift << shift


def on_gpu() -> bool:
    """Whether the default device has memory of its own."""
    return jax.devices()[0].platform != "cpu"


def free_bytes() -> int:
    """How many bytes of the default device's memory are free."""
    stats = jax.devices()[0].memory_stats() if on_gpu() else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available
