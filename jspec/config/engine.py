"""What the engine may use, and the shapes of its programs."""

import dataclasses
import math

from jspec._validation import LARGEST_INT, LARGEST_NUMBER, is_int, is_number, require
from jspec.config.model import ModelConfig

MAX_POSITIONS = 2**22  # a noise key has 22 bits for the position: see sampling/streams.py
MAX_ROUNDS = 2**16  # rounds of a call
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")

PASS_TOKENS = {"reproducible": 512, "dense": 4096, "mixture": 8192}  # what prefill_tokens=None stands for
CHUNK, CHUNK_OF_LATENTS = 32, 128  # what prefill_chunk=None stands for
NULL_PAGE = 0  # the page of the KV cache that page tables are padded with; nothing is ever written there


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """What the engine may use, and the shapes of its programs.

    Args:
      max_batch: B, how many requests are decoded together.
      max_len: S, the longest prompt plus completion, in tokens.
      dtype: the type of weights, cache and stored logits: ``float32`` or ``bfloat16``.
      page_size: P, how many cache slots a page of the KV cache has.
      num_pages: how many pages the pool has, without the null page. None gives every row room for max_len tokens.
      prefill_chunk: c, the tokens of a segment. Prompts are read in segments that begin at multiples of c, and several
        of them, of one prompt or of many, share a pass. None takes 32, or 128 for a target with latents (``for_target``),
        whose attention reads prompts 128 tokens at a time.
      prefill_tokens: the most tokens of such a pass, padding included. None takes 512 if ``reproducible``, where every
        pass has that many, and otherwise 4,096, or 8,192 for a target that is a mixture of experts (``for_target``).
      rounds: the most rounds that the device makes between two visits of the host. It makes fewer while requests wait.
        Callers get the tokens of all of them at once, and who arrives meanwhile waits. More than a few are of use only to
        models so small that a round takes less time than the host's work for a call.
      width: how many query tokens the target reads for each row in a round, at least K + 1 for the largest K; None takes
        K + 1. Logits depend on it in their last bits. So where texts of one seed are to be compared, with different K,
        different drafters or no drafter, all of them need the same width.
      reproducible: True has one program for rounds and one for prefill, so that the numbers of a request do not depend
        on what else the engine does. False has several sizes of both, and takes the smallest that will do.
      prefix_cache: whether pages of prompts are kept, for later prompts that begin with the same tokens.
      swap_space: how many GiB of host memory may hold requests that were preempted because the pool ran out of pages.
        Requests enter only while that cannot lead to a standstill, so a small number makes them wait longer.
      max_waiting: how many requests may wait; None is any number.
      read_ahead: how many prompts may be read, or have been read, while all rows decode, so that a row never waits for
        its next request's prompt. None is half of ``max_batch``, but at most 16, and 0 below 4 rows.
      expand_latents: whether prefill may compute keys and values of all heads from latents, on GPUs that have a kernel for
        it (``jspec.pallas.mla.prefill``). Passes then read texts of no more than ``pages_of_prefill`` pages.
      logprobs_mode: which distribution log-probabilities are of: ``raw_logprobs``, the target's own, or
        ``processed_logprobs``, the one that tokens are drawn from (at temperature 0: that of temperature 1).
    """

    max_batch: int = 8
    max_len: int = 2048
    dtype: str = "float32"
    page_size: int = 64
    num_pages: int | None = None
    prefill_chunk: int | None = None
    prefill_tokens: int | None = None
    rounds: int = 4
    width: int | None = None
    reproducible: bool = True
    prefix_cache: bool = True
    swap_space: float = 4.0
    max_waiting: int | None = None
    read_ahead: int | None = None
    expand_latents: bool = False
    logprobs_mode: str = "raw_logprobs"

    def __post_init__(self):
        most = {
            "max_batch": LARGEST_INT,
            "page_size": MAX_POSITIONS,
            "rounds": MAX_ROUNDS,
        }
        for name, high in most.items():
            value = getattr(self, name)
            require(is_int(value) and 1 <= value <= high, name, value, f"an integer in 1..{high}")
        chunk, n = self.prefill_chunk, self.max_len
        known = chunk is None or (is_int(chunk) and 1 <= chunk <= MAX_POSITIONS)
        require(known, "prefill_chunk", chunk, f"None or an integer in 1..{MAX_POSITIONS}")
        require(is_int(n) and 2 <= n <= MAX_POSITIONS, "max_len", n, f"an integer in 2..{MAX_POSITIONS}")
        known = isinstance(self.dtype, str) and self.dtype in ("float32", "bfloat16")
        require(known, "dtype", self.dtype, "'float32' or 'bfloat16'")
        least = {"num_pages": 1, "width": 1, "prefill_tokens": chunk or CHUNK, "max_waiting": 1, "read_ahead": 0}
        for name, low in least.items():
            value = getattr(self, name)
            ok = value is None or (is_int(value) and low <= value <= LARGEST_INT)
            require(ok, name, value, f"None or an integer in {low}..{LARGEST_INT}")
        for name in ("reproducible", "prefix_cache", "expand_latents"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        mode = self.logprobs_mode
        require(mode in LOGPROBS_MODES, "logprobs_mode", mode, f"one of {', '.join(map(repr, LOGPROBS_MODES))}")
        space = self.swap_space
        require(is_number(space) and 0 <= space <= LARGEST_NUMBER, "swap_space", space, "a number of GiB, at least 0")

    def for_target(self, target: ModelConfig) -> "EngineConfig":
        """The same with what is best for a target, where nothing else was asked for.

        A mixture of experts reads prompts in larger passes: every pass reads all of its experts, and has some padding for
        each of them. Latents are expanded, in segments of what a block of attention has."""
        config, tokens = self, self.prefill_tokens
        if target.latent is not None:
            chunk = self.prefill_chunk or min(CHUNK_OF_LATENTS, tokens or CHUNK_OF_LATENTS)
            config = dataclasses.replace(config, prefill_chunk=chunk, expand_latents=True)
        if target.experts is None or self.reproducible or tokens is not None:
            return config
        return dataclasses.replace(config, prefill_tokens=max(PASS_TOKENS["mixture"], config.chunk))

    @property
    def pages_per_row(self) -> int:
        """M, how many pages a row of max_len tokens needs."""
        return math.ceil(self.max_len / self.page_size)

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """How many rows the decode programs have, in ascending order: 1, 4, 16, .. and ``max_batch``, or that alone."""
        smaller = [] if self.reproducible else [4**i for i in range(32) if 4**i < self.max_batch]
        return *smaller, self.max_batch

    def bucket(self, rows: int) -> int:
        """The rows of the smallest decode program that can decode so many."""
        return next(b for b in self.batch_buckets if b >= rows)

    @property
    def most_ahead(self) -> int:
        """``read_ahead``, or what None stands for."""
        usual = min(self.max_batch // 2, 16) if self.max_batch >= 4 else 0
        return usual if self.read_ahead is None else self.read_ahead

    @property
    def num_rows(self) -> int:
        """How many requests have a place in the state on the device: those that decode, and those read ahead."""
        return self.max_batch + self.most_ahead

    @property
    def chunk(self) -> int:
        """c, the tokens of a segment: ``prefill_chunk``, or less where no text is so long."""
        return min(self.prefill_chunk or CHUNK, self.max_len)

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """How many segments the prefill programs read, in ascending order: doubling from 64 tokens on, or the most."""
        c = self.chunk
        longest = -(-self.max_len // c) * self.num_rows  # segments of as many prompts as there are places
        usual = PASS_TOKENS["reproducible" if self.reproducible else "dense"]
        most = min(max((self.prefill_tokens or usual) // c, 1), longest)
        smaller = [] if self.reproducible else [2**i for i in range(32) if 2**i * c >= 64 and 2**i < most]
        return *smaller, most

    def pages_of_prefill(self, segments: int) -> int | None:
        """How many pages the texts of a pass of so many segments may have up to where it ends; None is any number."""
        if not self.expand_latents:
            return None
        return self.pages_per_row + math.ceil(segments * self.chunk / self.page_size)

    @property
    def logprob_chunks(self) -> int:
        """How many segments the prefill program reads that finds log-probabilities: some 512 tokens, or the only number."""
        return max((n for n in self.chunk_buckets if n * self.chunk <= 512), default=self.chunk_buckets[0])

    @property
    def pool_pages(self) -> int:
        """How many pages the pool has, the null page included."""
        return 1 + (self.max_batch * self.pages_per_row if self.num_pages is None else self.num_pages)
