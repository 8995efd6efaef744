"""The config of the engine: its resources, and the shapes of its programs."""

import dataclasses
import math

from jspec._validation import LARGEST_INT, LARGEST_NUMBER, FieldChecks, is_int, is_number, is_one_of, require
from jspec.config.model import ModelConfig

MAX_POSITIONS = 2**22  # a noise key has 22 bits for the position: see sampling/streams.py
MAX_ROUNDS = 2**16  # rounds of a call
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
FP8_CACHES = ("fp8", "fp8_per_token_head")
KV_CACHE_DTYPES = ("auto", "bfloat16", "float32", *FP8_CACHES)
ACTIVATION_DTYPES = ("auto", "int8", "fp8")

_FEW_ROWS = 8  # with fewer, rounds of a single row are not worth a program of their own
PASS_TOKENS = {"pinned": 512, "dense": 4096, "mixture": 8192}  # defaults of prefill_tokens
CHUNK, CHUNK_OF_LATENTS, CHUNK_OF_STATES = 32, 128, 64  # defaults of prefill_chunk
SNAPSHOT_EVERY = 1024  # tokens, the default of snapshot_every
NULL_PAGE = 0  # the page of the KV cache that page tables are padded with; it is never written


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """The resources of the engine, and the shapes of its programs.

    Args:
      max_batch: B, how many requests are decoded together.
      max_len: S, the longest prompt plus completion, in tokens.
      dtype: the type of weights, cache and stored logits: ``float32`` or ``bfloat16``.
      kv_cache_dtype: the type of the target's cached keys and values, or latents. ``fp8`` rounds them to eight bits when
        they are written, with the scales in the checkpoint, and ``fp8_per_token_head`` with a scale for each token and KV
        head. A pool then has about twice the pages in the same memory (docs/guides/quantization.md). ``bfloat16`` and
        ``float32`` are allowed where they are ``dtype``. ``auto`` is ``dtype``, and in ``jspec.load`` ``fp8`` for a
        checkpoint that is made for it. A drafter's own cache has ``dtype`` in any case.
      activation_dtype: the type to which the target's linear maps round their inputs. ``auto`` leaves them in ``dtype``.
        ``int8`` and ``fp8`` round them as W8A8 does, with a scale for each token, in every layer where weights are stored
        in that type with a scale for each output channel, so that tensor cores multiply numbers of eight bits. The target
        is another model then (docs/guides/quantization.md).
      page_size: P, how many cache slots a page of the KV cache has.
      num_pages: how many pages the pool has, without the null page. None gives every row room for max_len tokens.
      prefill_chunk: c, the tokens of a prefill chunk. Chunks begin at multiples of c, and several of them, of one prompt
        or of many, share a prefill batch. None takes 32, or 128 for a target with latents (``for_target``), whose
        attention reads prompts 128 tokens at a time, or 64 for one with gated delta nets, or with such a draft model, whose
        chunks have to be multiples of 64 tokens.
      prefill_tokens: the most tokens of a prefill batch, padding included. None takes 512 where every batch has that
        many (``pins_shapes``), and otherwise 4,096, or 8,192 for a target that is a mixture of experts (``for_target``);
        ``jspec.load`` takes 512 where there is no GPU.
      rounds: the most rounds of one call to the device. There are fewer while requests wait. Clients get the tokens of a
        call together, and new requests wait for its end. More than a few pay only for models so small that a round takes
        less time than the host's work for a call.
      width: how many query tokens the target reads for each row in a round, at least K + 1 for the largest K; None takes
        K + 1. Logits depend on it in their last bits. To compare texts of one seed with different K, different drafters
        or no drafter, all of them need the same width.
      reproducible: True has one program for rounds and one for prefill, so that the numbers of a request do not depend
        on other requests, unless all kernels of the models keep these the same in any program (``UnpinnedConfig``). False,
        the default of ``jspec.load`` with trees of drafts, has several sizes of both, and takes the smallest that suffices.
      prefix_cache: whether pages of prompts are cached for later prompts that begin with the same tokens.
      swap_space: GiB of host memory for requests that were preempted because the pool ran out of pages. Requests are
        admitted only while no deadlock is possible, so a small number makes them wait longer.
      snapshot_every: how many tokens of a prompt lie between two snapshots of the recurrent states of a target or draft
        model with gated delta nets, at whose ends alone later prompts can go on; one more is made near the end of each
        prompt. None takes 1,024 for such a model (``for_target``). Without one there are no snapshots.
      snapshot_space: GiB of host memory for snapshots. The one that was used longest ago makes room for a new one.
      max_waiting: how many requests may wait; None is any number.
      read_ahead: how many prompts may be prefilled while all rows decode, so that a row never waits for the prefill of its
        next request. None is half of ``max_batch``, but at most 16, and 0 below 4 rows.
      expand_latents: whether prefill may compute keys and values of all heads from latents, or those in bfloat16 from eight
        bits, on GPUs that have a kernel for it (``jspec.pallas.mla.prefill``, ``jspec.pallas.attention.widened``). The texts
        of a prefill batch then have at most ``pages_of_prefill`` pages.
      peer_packets: whether GPUs of one process that share a target add up and gather small arrays by storing packets into
        each other's memory (``jspec.pallas.collectives``), where they can. False leaves every exchange to XLA.
      logprobs_mode: which distribution log-probabilities are of where a request leaves it open
        (``SamplingParams.logprobs_mode``): ``raw_logprobs``, the target's own, or ``processed_logprobs``, the one that
        tokens are drawn from (at temperature 0: that of temperature 1).

    Example::

        engine = EngineConfig(max_batch=16, max_len=4096, dtype="bfloat16", page_size=64)
    """

    max_batch: int = 8
    max_len: int = 2048
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    page_size: int = 64
    num_pages: int | None = None
    prefill_chunk: int | None = None
    prefill_tokens: int | None = None
    rounds: int = 4
    width: int | None = None
    reproducible: bool = True
    prefix_cache: bool = True
    swap_space: float = 4.0
    snapshot_every: int | None = None
    snapshot_space: float = 8.0
    max_waiting: int | None = None
    read_ahead: int | None = None
    expand_latents: bool = False
    peer_packets: bool = True
    logprobs_mode: str = "raw_logprobs"

    def __post_init__(self):
        check, chunk, n = FieldChecks(self), self.prefill_chunk, self.max_len
        for name, most in (("max_batch", LARGEST_INT), ("page_size", MAX_POSITIONS), ("rounds", MAX_ROUNDS)):
            value = getattr(self, name)
            check.require(name, is_int(value) and 1 <= value <= most, f"an integer in 1..{most}")
        known = chunk is None or (is_int(chunk) and 1 <= chunk <= MAX_POSITIONS)
        check.require("prefill_chunk", known, f"None or an integer in 1..{MAX_POSITIONS}")
        check.require("max_len", is_int(n) and 2 <= n <= MAX_POSITIONS, f"an integer in 2..{MAX_POSITIONS}")
        known = isinstance(self.dtype, str) and self.dtype in ("float32", "bfloat16")
        check.require("dtype", known, "'float32' or 'bfloat16'")
        cached, others = self.kv_cache_dtype, ("bfloat16" if self.dtype == "float32" else "float32",)
        known = isinstance(cached, str) and cached in KV_CACHE_DTYPES and cached not in others
        names = ", ".join(repr(name) for name in KV_CACHE_DTYPES if name not in others)
        check.require("kv_cache_dtype", known, f"one of {names} with dtype={self.dtype!r}")
        activations = self.activation_dtype
        known = isinstance(activations, str) and activations in ACTIVATION_DTYPES
        check.require("activation_dtype", known, f"one of {', '.join(map(repr, ACTIVATION_DTYPES))}")
        least = {"prefill_tokens": chunk or CHUNK, "read_ahead": 0}  # of the others 1
        for name in ("num_pages", "width", "prefill_tokens", "max_waiting", "read_ahead", "snapshot_every"):
            value, low = getattr(self, name), least.get(name, 1)
            ok = value is None or (is_int(value) and low <= value <= LARGEST_INT)
            check.require(name, ok, f"None or an integer in {low}..{LARGEST_INT}")
        check.flags("reproducible", "prefix_cache", "expand_latents", "peer_packets")
        known = is_one_of(self.logprobs_mode, LOGPROBS_MODES)
        check.require("logprobs_mode", known, f"one of {', '.join(map(repr, LOGPROBS_MODES))}")
        for name in ("swap_space", "snapshot_space"):
            space = getattr(self, name)
            check.require(name, is_number(space) and 0 <= space <= LARGEST_NUMBER, "a number of GiB, at least 0")

    def for_target(self, target: ModelConfig, draft: ModelConfig | None = None) -> "EngineConfig":
        """This config with the best defaults for a target and a draft model, where the user has not set a value.

        A mixture of experts has larger prefill batches, because each batch reads all experts and pads each of them.
        Latents are expanded, in chunks as long as a block of the attention kernel. Chunks for gated delta nets, of target or
        draft model, are cut where their own chunks are.

        Raises:
          ValueError: one of both has gated delta nets, and ``prefill_chunk`` is no multiple of 64; or neither has, and
            ``snapshot_every`` is a number.
        """
        config, tokens = self, self.prefill_tokens
        if target.delta_nets is not None or (draft is not None and draft.delta_nets is not None):
            config = self._for_states()
        else:
            expected = "None without recurrent states of the target or a draft model"
            require(self.snapshot_every is None, "snapshot_every", self.snapshot_every, expected)
        if target.latent is not None:
            chunk = self.prefill_chunk or min(CHUNK_OF_LATENTS, tokens or CHUNK_OF_LATENTS)
            config = dataclasses.replace(config, prefill_chunk=chunk, expand_latents=True)
        return config if self.pins_shapes else config._with_passes_for(target)

    def _with_passes_for(self, target: ModelConfig) -> "EngineConfig":
        """With the default of ``prefill_tokens`` for a target, where there may be many."""
        if target.experts is None or self.prefill_tokens is not None:
            return self
        return dataclasses.replace(self, prefill_tokens=max(PASS_TOKENS["mixture"], self.chunk))

    def _for_states(self) -> "EngineConfig":
        size = CHUNK_OF_STATES
        chunk = size if self.prefill_chunk is None else self.prefill_chunk
        whole = chunk % size == 0
        require(whole, "prefill_chunk", chunk, f"a multiple of {size}, for a model with gated delta nets")
        fits = self.prefill_tokens is None or self.prefill_tokens >= chunk
        require(fits, "prefill_tokens", self.prefill_tokens, f"at least prefill_chunk, {chunk}")
        every = self.snapshot_every or SNAPSHOT_EVERY
        return dataclasses.replace(self, prefill_chunk=chunk, snapshot_every=every if self.prefix_cache else None)

    @property
    def snapshot_step(self) -> int:
        """Snapshots are made behind multiples of so many tokens, where chunks and pages end."""
        return math.lcm(self.page_size, self.chunk)

    def next_snapshot(self, start: int, last: int) -> int | None:
        """How many tokens of a prompt the next snapshot of its states covers, if ``start`` of them have been read, and the
        text that others may share has ``last``; None if there is none any more."""
        if self.snapshot_every is None:
            return None
        step = self.snapshot_step
        every = -(-self.snapshot_every // step) * step
        end = min((start // every + 1) * every, last // step * step)
        return end if end > start else None

    @property
    def pages_per_row(self) -> int:
        """M, the pages of a row of max_len tokens."""
        return math.ceil(self.max_len / self.page_size)

    @property
    def pins_shapes(self) -> bool:
        """Whether one program has to serve all rounds, and one all prefill, because another could give other numbers."""
        return self.reproducible

    @property
    def one_order(self) -> bool:
        """Whether programs have kernels of one order of sums, though others may be faster."""
        return self.reproducible and not self.pins_shapes

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """The numbers of rows of the decode programs, ascending: 1, 4, 16, .. and ``max_batch``, or only that."""
        smaller = [] if self._has_one_bucket else [4**i for i in range(32) if 4**i < self.max_batch]
        return *smaller, self.max_batch

    @property
    def _has_one_bucket(self) -> bool:
        return self.reproducible and (self.pins_shapes or self.max_batch < _FEW_ROWS)

    def bucket(self, rows: int) -> int:
        """The number of rows of the smallest decode program with at least ``rows`` rows."""
        return next(b for b in self.batch_buckets if b >= rows)

    @property
    def most_ahead(self) -> int:
        """``read_ahead``, or its default."""
        usual = min(self.max_batch // 2, 16) if self.max_batch >= 4 else 0
        return usual if self.read_ahead is None else self.read_ahead

    @property
    def num_rows(self) -> int:
        """Rows of the state on the device: of requests that decode, and of those prefilled ahead."""
        return self.max_batch + self.most_ahead

    @property
    def chunk(self) -> int:
        """c, the tokens of a prefill chunk: ``prefill_chunk``, at most ``max_len``."""
        return min(self.prefill_chunk or CHUNK, self.max_len)

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """The numbers of chunks of the prefill programs, ascending: doubling from 64 tokens on, or only the largest."""
        c = self.chunk
        longest = -(-self.max_len // c) * self.num_rows  # chunks of the longest prompts in all rows
        usual = PASS_TOKENS["pinned" if self.pins_shapes else "dense"]
        most = min(max((self.prefill_tokens or usual) // c, 1), longest)
        smaller = [] if self.pins_shapes else [2**i for i in range(32) if 2**i * c >= 64 and 2**i < most]
        return *smaller, most

    def pages_of_prefill(self, segments: int) -> int | None:
        """The most pages of the texts in a prefill batch of ``segments`` chunks, up to its end; None is any number."""
        if not self.expand_latents:
            return None
        return self.pages_per_row + math.ceil(segments * self.chunk / self.page_size)

    @property
    def logprob_chunks(self) -> int:
        """Number of chunks of the prefill program with log-probabilities: about 512 tokens, or the only number."""
        return max((n for n in self.chunk_buckets if n * self.chunk <= 512), default=self.chunk_buckets[0])

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return 1 + (self.max_batch * self.pages_per_row if self.num_pages is None else self.num_pages)


class UnpinnedConfig(EngineConfig):
    """That of an engine whose models give a request the same numbers in programs of any shape
    (``jspec.models.one_order``): ``reproducible`` pins nothing."""

    @classmethod
    def of(cls, config: EngineConfig, target: ModelConfig) -> EngineConfig:
        """The same settings for a target, and the defaults of what is not pinned."""
        settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        return cls(**settings)._with_passes_for(target)

    @property
    def pins_shapes(self) -> bool:
        return False
