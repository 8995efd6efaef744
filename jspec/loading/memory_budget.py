"""The bytes that an engine needs on its devices, computed from shapes before anything is loaded or compiled."""

import dataclasses
from collections.abc import Sequence

import psutil

from jspec.config import EngineConfig, ModelConfig, Shards
from jspec.config.engine import FP8_CACHES, UnpinnedConfig
from jspec.config.heads import HeadConfig
from jspec.engine.multihost.leader import fewest
from jspec.engine.runner.shard_map import exchange_bytes
from jspec.models.cache_pools import gathers_pages
from jspec.models.placement import first_device

GIB = 2**30
CPU_CACHE = 4 * GIB  # for keys and values where there is no GPU
# ..., 8,192, 4,096, 2,048: context lengths to choose from.
LADDER = tuple(2**i for i in range(30, 10, -1))
ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes that an engine needs on its device, or on each of several.

    Attributes:
      weights: the weights of target and draft.
      cache: keys and values of both, in all pages, and the recurrent states of both, of all rows.
      states: the recurrent states among these.
      work: what exchanges between GPUs take, and the largest temporaries: of a round, the logits of target and draft, and
        one layer's keys and values where attention gathers them from their pages; of a prefill batch, one layer's
        activations, and its keys and values if they follow from latents.
    """

    weights: int
    cache: int
    states: int
    work: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.work


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """The bytes that a target and its draft need, by the engine's config.

    Attributes:
      target: its config.
      draft: its config, or None.
      width: how many query tokens of each row the target reads in a round.
      shards: those of target and draft, as ``shards_of`` has them.
      num_draft_tokens: K; None is ``width - 1``.
    """

    target: ModelConfig
    draft: ModelConfig | HeadConfig | None
    width: int
    shards: Sequence[Shards | None] = (None, None)
    num_draft_tokens: int | None = None

    def budget(self, config: EngineConfig) -> Budget:
        """The bytes of an engine of this config."""
        size = ITEMSIZE[config.dtype]
        models = [self.target] if self.draft is None else [self.target, self.draft]
        sharded = list(zip(models, self.shards, strict=False))
        decoders = [_local(model.decoder, shards) for model, shards in sharded if model.decoder is not None]
        slots = config.pool_pages * config.page_size
        row_slots = config.max_batch * config.pages_per_row * config.page_size
        logits = config.max_batch * self.width * self.target.vocab_size * len(models)
        gathered = max(
            row_slots * size * max(decoder.layer_kv_numbers(layer) for layer in range(decoder.num_layers))
            if gathers_pages(decoder, config.dtype, on_gpu())
            else 0
            for decoder in decoders
        )
        # Whether shapes are pinned is known when the models are built; where they are not, prefill batches are larger.
        largest = UnpinnedConfig.of(config, self.target) if config.reproducible else config
        tokens = largest.chunk_buckets[-1] * largest.chunk
        passes = tokens * max(3 * _widest_mlp(decoder) + 8 * decoder.hidden_size for decoder in decoders) * size
        passes += _prefill_kv_bytes(decoders, largest)
        states = self._states_bytes(config)
        return Budget(
            weights=sum(_weight_bytes(model, shards, size) for model, shards in sharded),
            cache=_rounded_kv_bytes(decoders[0], slots, config)
            + sum(decoder.kv_bytes(slots, size) for decoder in decoders[1:])
            + states,
            states=states,
            work=max(logits * (size + 4) + gathered, passes) + self._exchange_bytes(config),
        )

    def _exchange_bytes(self, config: EngineConfig) -> int:
        shards = self.shards[0]
        if shards is None or not (config.peer_packets and on_gpu()):
            return 0
        return exchange_bytes(self.target.hidden_size, config.dtype, shards.count)

    def _states_bytes(self, config: EngineConfig) -> int:
        K = self.width - 1 if self.num_draft_tokens is None else self.num_draft_tokens
        draft = None if self.draft is None else self.draft.language_model  # a target is one, too
        models = zip((self.target, draft), self.shards, (self.width, K + 1), strict=True)
        nets = [(_local(model, shards).delta_nets, width) for model, shards, width in models if model is not None]
        of_row = sum(some.row_bytes(width, ITEMSIZE[config.dtype]) for some, width in nets if some is not None)
        return config.num_rows * of_row

    def least_budget(self, config: EngineConfig) -> Budget:
        """The bytes of an engine with as many pages as one row may need."""
        return self.budget(dataclasses.replace(config, num_pages=config.pages_per_row))

    def longest_that_fits(self, lengths: Sequence[int], config: EngineConfig, share: float) -> int:
        """The first of ``lengths`` that is a ``max_len`` for which there is memory, or the last of them.

        On a GPU it needs ``share`` of the free memory for weights, workspace and the pages of one text of that length:
        other requests share the pages that remain. Elsewhere the cache of ``max_batch`` such texts may have 4 GiB.
        """
        room = share * free_bytes() if on_gpu() else CPU_CACHE

        def fits(length: int) -> bool:
            sized = dataclasses.replace(config, max_len=length, num_pages=None)
            return (self.least_budget(sized).total if on_gpu() else self.budget(sized).cache) <= room

        length = next((length for length in lengths if fits(length)), lengths[-1])
        return length if self.shards[0] is None else fewest(length)

    def with_num_pages(self, config: EngineConfig, share: float) -> EngineConfig:
        """``config`` with a number of pages, if it has none, that fits beside weights and workspace.

        On a GPU the pool takes what remains of ``share`` of the free memory. The number is rounded down to five
        significant bits, so that the next start, with nearly as much memory, finds its programs in the compilation cache.
        Elsewhere every row gets room for ``max_len`` tokens, as far as 4 GiB hold them.

        Raises:
          MemoryError: the pages that were asked for, or those that a single row needs, do not fit. The message has the
            numbers and a way out.
        """
        free = free_bytes()
        if config.num_pages is None:
            config = dataclasses.replace(config, num_pages=self._pages(config, share, free))
        need = self.budget(config)
        if need.total > free:
            states = f"{need.states / GIB:.1f} of recurrent states for {config.num_rows} rows, " if need.states else ""
            raise MemoryError(
                f"needs {need.total / GIB:.1f} GiB ({need.weights / GIB:.1f} of weights, {states}"
                f"{(need.cache - need.states) / GIB:.1f} of KV cache "
                f"for num_pages={config.num_pages} of {config.page_size} tokens, {need.work / GIB:.1f} of workspace for "
                f"max_batch={config.max_batch} x max_len={config.max_len}), but {free / GIB:.1f} GiB are free; lower "
                f"max_batch, max_len or num_pages{self._fitting_length(config, free)}"
            )
        return config

    def _pages(self, config: EngineConfig, share: float, free: int) -> int:
        """How many pages fit, and at least those that one row may need."""
        least = dataclasses.replace(config, num_pages=config.pages_per_row)
        need = self.budget(least)
        page = (need.cache - need.states) // least.pool_pages
        if on_gpu():
            room = share * free - need.weights - need.work - need.states
            pages = _rounded_down(int(room // max(page, 1)) - 1)
        else:
            pages = min(config.max_batch * config.pages_per_row, CPU_CACHE // max(page, 1))
        if self.shards[0] is not None:
            pages = fewest(pages)
        return max(pages, config.pages_per_row)

    def _fitting_length(self, config: EngineConfig, free: int) -> str:
        """What an error says of the longest ``max_len`` that would fit; nothing if none would."""
        for length in (length for length in LADDER if length < config.max_len):
            if self.least_budget(dataclasses.replace(config, max_len=length)).total <= free:
                return f"; max_len={length} would fit"
        return ""


def _weight_bytes(model: ModelConfig | HeadConfig, shards: Shards | None, size: int) -> int:
    """The bytes of a model's weights, or of a shard's part of them, where a number takes ``size`` unless quantised."""
    if shards is None or model.language_model is None:
        return model.weight_bytes(size)
    return shards.weight_bytes(model.language_model, size)


def _rounded_kv_bytes(target: ModelConfig, slots: int, config: EngineConfig) -> int:
    """Bytes of the target's keys and values, or latents, in so many slots, in the type that the config says, scales of
    tokens included."""
    numbers = [target.layer_kv_numbers(layer) for layer in range(target.num_layers)]
    if config.kv_cache_dtype not in FP8_CACHES:
        return target.kv_bytes(slots, ITEMSIZE[config.dtype])
    if config.kv_cache_dtype == "fp8":
        return sum(numbers) * slots
    heads = sum(count // target.layer(layer).head_dim for layer, count in enumerate(numbers))
    scales = heads if target.latent is None else target.num_layers
    return (sum(numbers) + scales * ITEMSIZE["float32"]) * slots


def _prefill_kv_bytes(decoders: Sequence[ModelConfig], config: EngineConfig) -> int:
    """Bytes of a layer's keys and values that a prefill batch computes in bfloat16: of all heads from latents, and of a
    target with a cache in eight bits as many as it caches."""
    pages, target = config.pages_of_prefill(config.chunk_buckets[-1]), decoders[0]
    if pages is None or config.dtype != "bfloat16":
        return 0
    latents = [(decoder, decoder.latent) for decoder in decoders if decoder.latent is not None]
    numbers = max((decoder.num_heads * (decoder.head_dim + its.value_dim) for decoder, its in latents), default=0)
    if target.latent is None and config.kv_cache_dtype in FP8_CACHES:
        numbers += max(target.layer_kv_numbers(layer) for layer in range(target.num_layers))
    return pages * config.page_size * numbers * ITEMSIZE["bfloat16"]


def _widest_mlp(decoder: ModelConfig) -> int:
    return max(decoder.layer(layer).intermediate_size for layer in range(decoder.num_layers))


def _local(config: ModelConfig, shards: Shards | None) -> ModelConfig:
    return config if shards is None else shards.local(config)


def _rounded_down(number: int) -> int:
    """The largest number of at most five significant bits that is not above ``number``; 0 for negative ones."""
    if number <= 0:
        return 0
    shift = max(number.bit_length() - 5, 0)
    return number >> shift << shift


def on_gpu() -> bool:
    """Whether the first device has memory of its own."""
    return first_device().platform != "cpu"


def free_bytes() -> int:
    """How many bytes of the first device's memory are free."""
    stats = first_device().memory_stats() if on_gpu() else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return psutil.virtual_memory().available


def lengths_up_to(longest: int) -> list[int]:
    """The context lengths that an engine may choose from, in descending order: ``longest``, and the steps of ``LADDER``
    below it."""
    return [longest, *(step for step in LADDER if step < longest)]
