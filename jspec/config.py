"""What a model is, how to speculate with it, and what the engine may use: frozen dataclasses, validated when built.

Dimension letters have one meaning in code, comments and einsums everywhere in jspec:

    B rows of the batch              K drafts of a round              T = K + 1 query tokens of a verify pass
    S cache slots of a row           M pages of a row                 P slots of a page
    N attention heads                G key/value heads                R = N / G attention heads that share one
    H dimension of a head            D width of the model             F width of the MLP
    L layers                         V tokens of the vocabulary       Vd tokens of a draft vocabulary
    E numbers of a feature           C tokens of a prefill chunk
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar, Literal, Self

from jspec._arguments import LARGEST_INT, LARGEST_NUMBER, is_int, is_number, named_arguments, require
from jspec.parameters import Declared, Parameter, language_model

VERIFY_RULES = ("match", "rejection", "block")
DRAFT_SAMPLINGS = ("sample", "argmax", "coupled", "auto")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
QUANTIZATIONS = ("int8", "fp8")

# A noise key packs (position, index of the draft, stream) into one 32-bit word: see sampling/streams.py.
MAX_POSITIONS = 2**22
MAX_DRAFTS = 255
MAX_NGRAM = 64  # tokens of a suffix; each of them costs a pass over the text in every round
MAX_ROUNDS = 2**16  # rounds of a call

NULL_PAGE = 0  # the page of the KV cache that page tables are padded with; nothing is ever written there

# Every K that ``auto`` may choose, up to its limit. A program is compiled for each of them, so the list has gaps: a K in
# a gap is hardly better than its neighbours in the list.
DRAFT_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
DEFAULT_MAX_DRAFT_TOKENS = 8


def count(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'s' * (number != 1)}"


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) and its long-context scalings.

    ``kind`` is one of these: ``default``; ``linear``, which divides every frequency by ``factor``; ``dynamic``, which is
    ``default`` up to the trained length, and jspec goes no further; ``llama3`` (Meta, 2024); ``yarn`` (Peng et al., 2023).
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin (yarn)
    truncate: bool = True

    def __post_init__(self):
        require(self.kind in ROPE_KINDS, "rope.kind", self.kind, f"one of {', '.join(ROPE_KINDS)}")
        scales = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
        for name in ("theta", *scales, "original_max_position", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, f"rope.{name}", value, "a positive number")
        if self.kind == "llama3":
            ordered = self.low_freq_factor < self.high_freq_factor
            require(
                ordered,
                "rope.high_freq_factor",
                self.high_freq_factor,
                f"above low_freq_factor, {self.low_freq_factor}",
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig(Declared):
    """The architecture of a dense pre-norm decoder. It says nothing about devices, kernels or sampling.

    It has every property of ``jspec.heads.DraftConfig``, because a language model can draft too.

    ``windows`` has one entry for each layer: None for full attention, or W for a sliding window of W cache slots, the
    query token's own included. ``quantization`` is the type in which linear maps and the output head are stored
    (``jspec.models.quantized``); with None they are stored as all other weights are.
    """

    architecture: str
    vocab_size: int  # V
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # N, attention heads
    num_kv_heads: int  # G
    head_dim: int  # H
    max_position: int
    rms_norm_eps: float = 1e-5
    rope: Rope = Rope()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Literal["int8", "fp8"] | None = None

    # What ``DraftConfig`` asks for: the drafting method, and that a round may ask it for any number of drafts.
    method = "draft_model"
    max_drafts = None
    trained_drafts = None
    borrowable = ()

    def __post_init__(self):
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        )
        for name in sizes:
            value = getattr(self, name)
            require(is_int(value) and 1 <= value < 2**31, name, value, "an integer of at least 1 and below 2^31")
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads, {self.num_heads}",
        )
        require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number (rotary pairs)")
        require(
            is_number(self.rms_norm_eps) and self.rms_norm_eps > 0,
            "rms_norm_eps",
            self.rms_norm_eps,
            "a positive number",
        )
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        require(
            len(self.windows) == self.num_layers, "windows", self.windows, f"{self.num_layers} entries, one a layer"
        )
        for window in self.windows:
            require(window is None or (is_int(window) and window >= 1), "windows", window, "None or at least 1")
        for token in self.eos_token_ids:
            require(
                is_int(token) and 0 <= token < self.vocab_size, "eos_token_ids", token, f"in 0..{self.vocab_size - 1}"
            )
        known = (None, *QUANTIZATIONS)
        require(self.quantization in known, "quantization", self.quantization, f"one of {', '.join(map(str, known))}")

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Dimension letter -> size."""
        return {
            "V": self.vocab_size,
            "D": self.hidden_size,
            "F": self.intermediate_size,
            "L": self.num_layers,
            "N": self.num_heads,
            "G": self.num_kv_heads,
            "H": self.head_dim,
        }

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, declared once: see ``jspec.parameters``."""
        return language_model(self)

    @property
    def decoder(self) -> "ModelConfig":
        """The decoder layers that keys and values are kept for, which are its own."""
        return self

    @property
    def language_model(self) -> "ModelConfig":
        """The language model that drafts, which is this one."""
        return self

    @property
    def summary(self) -> str:
        """Its sizes in a few words, ``2 layers, vocabulary 97`` for example."""
        return f"{count(self.num_layers, 'layer')}, vocabulary {self.vocab_size}"

    def require_fit(self, target: "ModelConfig"):
        """Accept any target: whether token ids mean the same tokens is seen in tokenizers and not in configs."""

    def with_quantization(self, quantization: str) -> Self:
        """The same config, with linear maps and output head stored in eight bits."""
        return dataclasses.replace(self, quantization=quantization)  # pyright: ignore[reportArgumentType]

    def kv_bytes(self, slots: int, itemsize: int) -> int:
        """How many bytes keys and values of ``slots`` cache slots take, at ``itemsize`` bytes a number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * slots * itemsize


@named_arguments(
    num_speculative_tokens="num_draft_tokens", rejection_sample_method="verify", draft_sample_method="draft_sampling"
)
@dataclasses.dataclass(frozen=True)
class Speculation:
    """How many drafts a round makes, how they are drawn, and how they are verified.

    Every combination that ``jspec.load`` accepts leaves the target's distribution unchanged.

    Args:
      num_draft_tokens: K, the drafts of a round. 0 is plain decoding, for which ``load`` does not load the draft. With
        ``auto`` the engine chooses K between calls to the device, from the acceptance so far and from what rounds cost,
        and chooses 0 where drafts would not pay. Alias ``num_speculative_tokens``.
      verify: the verification rule: ``match``, which accepts a draft that equals the target's own sample; ``rejection``
        (Leviathan et al., 2023; Chen et al., 2023); or ``block`` (Sun et al., 2024). Alias ``rejection_sample_method``.
      draft_sampling: how drafts are drawn from the drafter's distribution: ``sample``, with noise of their own;
        ``argmax``, its most probable token; ``coupled``, with the noise of the target's own sample, for ``match`` only;
        or ``auto``, which is argmax for requests whose temperature is below ``argmax_below`` and ``sample`` for others.
        N-gram drafts are looked up and not drawn, so it does not concern them. Alias ``draft_sample_method``.
      argmax_below: the temperature below which ``auto`` takes the argmax. None takes the one that was measured for the
        drafting method, in docs/drafters.md.
      draft_temperature: the temperature of the drafter's distribution. None takes the request's. Any value is lossless.
      ngram_min, ngram_max: the lengths of the shortest and the longest suffix that the n-gram drafter looks up, in
        tokens.
      synthetic_acceptance: for benchmarks with random weights, whose models never agree. It is the probability that a
        draft is accepted if those before it were: one number for all drafts, or a tuple with one for each, and 0 for
        drafts past its end. The rule does its work, and then its decision is replaced. The text does not follow the
        target then, so ``load`` refuses it.
      max_draft_tokens: the largest K that ``auto`` may choose. None takes 8, or as many as the drafter has weights for.
    """

    aliases: ClassVar[dict[str, str]]

    num_draft_tokens: int | Literal["auto"] = 4
    verify: Literal["match", "rejection", "block"] = "rejection"
    draft_sampling: Literal["sample", "argmax", "coupled", "auto"] = "auto"
    argmax_below: float | None = None
    draft_temperature: float | None = None
    ngram_min: int = 1
    ngram_max: int = 4
    synthetic_acceptance: float | tuple[float, ...] | None = None
    max_draft_tokens: int | None = None

    def __post_init__(self):
        self._check_num_draft_tokens()
        require(self.verify in VERIFY_RULES, "verify", self.verify, f"one of {', '.join(VERIFY_RULES)}")
        require(
            self.draft_sampling in DRAFT_SAMPLINGS,
            "draft_sampling",
            self.draft_sampling,
            f"one of {', '.join(DRAFT_SAMPLINGS)}",
        )
        if self.draft_sampling == "coupled" and self.verify != "match":
            raise ValueError(
                f"draft_sampling='coupled' with verify={self.verify!r} is biased, because the accept test "
                "would see noise that chose the draft; use verify='match' or draft_sampling='sample'"
            )
        if self.draft_sampling == "coupled" and self.draft_temperature is not None:
            raise ValueError(
                f"draft_temperature={self.draft_temperature!r} has no place under draft_sampling='coupled', "
                "which follows the request's temperature; leave it out"
            )
        below = self.argmax_below
        expected = f"None or a number in 0..{LARGEST_NUMBER:g}"
        ok = below is None or (is_number(below) and 0 <= below <= LARGEST_NUMBER)
        require(ok, "argmax_below", below, expected)
        t = self.draft_temperature
        require(t is None or (is_number(t) and 0 <= t <= LARGEST_NUMBER), "draft_temperature", t, expected)
        lo, hi = self.ngram_min, self.ngram_max
        require(is_int(lo) and 1 <= lo <= MAX_NGRAM, "ngram_min", lo, f"an integer in 1..{MAX_NGRAM}")
        ok = is_int(hi) and lo <= hi <= MAX_NGRAM
        require(ok, "ngram_max", hi, f"an integer of at least ngram_min, {lo}, and at most {MAX_NGRAM}")
        self._check_synthetic_acceptance()

    @property
    def auto(self) -> bool:
        """Whether the engine chooses K."""
        return self.num_draft_tokens == "auto"

    @property
    def most_draft_tokens(self) -> int:
        """K; under ``auto``, the largest K that may be chosen."""
        if self.num_draft_tokens == "auto":
            return DEFAULT_MAX_DRAFT_TOKENS if self.max_draft_tokens is None else self.max_draft_tokens
        return self.num_draft_tokens

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Every K that may be chosen, in ascending order."""
        most = self.most_draft_tokens
        return (*(K for K in DRAFT_LENGTHS if most > K), most) if self.auto else (most,)

    def fixed(self, num_draft_tokens: int) -> "Speculation":
        """The same settings with this K, which is an integer, so that nothing is left to choose."""
        return dataclasses.replace(self, num_draft_tokens=num_draft_tokens, max_draft_tokens=None)

    def _check_num_draft_tokens(self):
        K, most = self.num_draft_tokens, self.max_draft_tokens
        ok = (isinstance(K, str) and K == "auto") or (is_int(K) and 0 <= K <= MAX_DRAFTS)
        require(ok, "num_draft_tokens", K, f"an integer in 0..{MAX_DRAFTS}, or 'auto'")
        ok = most is None or (is_int(most) and 1 <= most <= MAX_DRAFTS)
        require(ok, "max_draft_tokens", most, f"None or an integer in 1..{MAX_DRAFTS}")
        if most is not None and K != "auto":
            raise ValueError(
                f"max_draft_tokens={most!r} has no place with num_draft_tokens={K!r}, which leaves nothing to choose; "
                "leave it out or use num_draft_tokens='auto'"
            )

    def _check_synthetic_acceptance(self):
        rates, K = self.synthetic_acceptance, self.most_draft_tokens
        if rates is None:
            return
        expected = f"None, a number in 0..1, or a tuple of 1 to {K} of them, one for each draft"
        each = rates if isinstance(rates, tuple) else (rates,)
        ok = 1 <= len(each) <= K and all(is_number(rate) and 0 <= rate <= 1 for rate in each)
        require(ok, "synthetic_acceptance", rates, expected)


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
        of them, of one prompt or of many, share a pass.
      prefill_tokens: the most tokens of such a pass, padding included. None takes 512 if ``reproducible``, where every
        pass has that many, and 2,048 if not.
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
    """

    max_batch: int = 8
    max_len: int = 2048
    dtype: str = "float32"
    page_size: int = 64
    num_pages: int | None = None
    prefill_chunk: int = 32
    prefill_tokens: int | None = None
    rounds: int = 4
    width: int | None = None
    reproducible: bool = True
    prefix_cache: bool = True
    swap_space: float = 4.0
    max_waiting: int | None = None
    read_ahead: int | None = None

    def __post_init__(self):
        most = {
            "max_batch": LARGEST_INT,
            "page_size": MAX_POSITIONS,
            "prefill_chunk": MAX_POSITIONS,
            "rounds": MAX_ROUNDS,
        }
        for name, high in most.items():
            value = getattr(self, name)
            require(is_int(value) and 1 <= value <= high, name, value, f"an integer in 1..{high}")
        n = self.max_len
        require(is_int(n) and 2 <= n <= MAX_POSITIONS, "max_len", n, f"an integer in 2..{MAX_POSITIONS}")
        known = isinstance(self.dtype, str) and self.dtype in ("float32", "bfloat16")
        require(known, "dtype", self.dtype, "'float32' or 'bfloat16'")
        least = {"num_pages": 1, "width": 1, "prefill_tokens": self.prefill_chunk, "max_waiting": 1, "read_ahead": 0}
        for name, low in least.items():
            value = getattr(self, name)
            ok = value is None or (is_int(value) and low <= value <= LARGEST_INT)
            require(ok, name, value, f"None or an integer in {low}..{LARGEST_INT}")
        for name in ("reproducible", "prefix_cache"):
            require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        space = self.swap_space
        require(is_number(space) and 0 <= space <= LARGEST_NUMBER, "swap_space", space, "a number of GiB, at least 0")

    @property
    def pages_per_row(self) -> int:
        """M, how many pages a row of max_len tokens needs."""
        return math.ceil(self.max_len / self.page_size)

    @property
    def batch_buckets(self) -> tuple[int, ...]:
        """How many rows the decode programs have, in ascending order: 1, 4, 16, .. and ``max_batch``, or that alone."""
        smaller = [] if self.reproducible else [4**i for i in range(32) if 4**i < self.max_batch]
        return *smaller, self.max_batch

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
        return min(self.prefill_chunk, self.max_len)

    @property
    def segment_buckets(self) -> tuple[int, ...]:
        """How many segments the prefill programs read, in ascending order: doubling from 64 tokens on, or the most."""
        c = self.chunk
        longest = -(-self.max_len // c) * self.num_rows  # segments of as many prompts as there are places
        most = min(max((self.prefill_tokens or (512 if self.reproducible else 2048)) // c, 1), longest)
        smaller = [] if self.reproducible else [2**i for i in range(32) if 2**i * c >= 64 and 2**i < most]
        return *smaller, most

    @property
    def pool_pages(self) -> int:
        """How many pages the pool has, the null page included."""
        return 1 + (self.max_batch * self.pages_per_row if self.num_pages is None else self.num_pages)
