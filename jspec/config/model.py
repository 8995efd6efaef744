"""What a language model is: its sizes, its rotation, and what each layer has."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self

from jspec._arguments import is_int, is_number, require
from jspec.parameters import Declared, Parameter, language_model

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
QUANTIZATIONS = ("int8", "fp8")


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
