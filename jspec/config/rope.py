"""Rotary position embeddings and their long-context scalings."""

import dataclasses

from jspec._validation import FieldChecks, is_int, is_number

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., 2021) and its long-context scalings.

    ``kind`` is one of these: ``default``; ``linear``, which divides every frequency by ``factor``; ``dynamic``, which is
    ``default`` up to the trained length, and jspec goes no further; ``llama3`` (Meta, 2024); ``yarn`` (Peng et al., 2023);
    ``longrope`` (Ding et al., 2024), which divides each frequency by a number of its own; ``proportional`` (Gemma 4, 2026).

    ``proportional`` pairs each number of the first half of a head with one of the second half, as a rotation of the whole
    head does, and divides by ``factor``; but only ``fraction`` of the pairs turn, those of the highest frequencies.

    ``longrope`` has two lists of divisors, ``short_factors`` for texts of up to ``original_max_position`` tokens and
    ``long_factors`` for longer ones. Keys that were cached with one list are of no use to queries with the other, so a
    text cannot change lists as it grows. ``long_texts`` says which list is used, for all texts; see ``for_length``.

    With a ``query_growth`` of b, queries at position p are also multiplied by
    ``1 + b ln(1 + floor(p / original_max_position))`` (Ministral 3, 2025).

    Example::

        llama_3 = Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192)
    """

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    truncate: bool = True
    fraction: float = 1.0  # how much of a head is rotated: its first numbers; the others stay as they are
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long_texts: bool = False
    query_growth: float = 0.0

    def __post_init__(self):
        check, part, growth = FieldChecks(self, "rope."), self.fraction, self.query_growth
        check.require("kind", self.kind in ROPE_KINDS, f"one of {', '.join(ROPE_KINDS)}")
        check.positive("theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor")
        check.positive("original_max_position", "beta_fast", "beta_slow")
        ordered = self.kind != "llama3" or self.low_freq_factor < self.high_freq_factor
        check.require("high_freq_factor", ordered, f"above low_freq_factor, {self.low_freq_factor}")
        check.require("fraction", is_number(part) and 0 < part <= 1, "a number above 0 and at most 1")
        check.flags("long_texts")
        check.require("query_growth", is_number(growth) and growth >= 0, "a number of at least 0")
        longrope = self.kind == "longrope"
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            positive = isinstance(factors, tuple) and all(is_number(factor) and factor > 0 for factor in factors)
            wanted = (
                "a tuple of positive numbers, one for each rotary pair" if longrope else "() for a rope of this kind"
            )
            check.require(name, positive and bool(factors) == longrope, wanted)

    def rotary_dim(self, head_dim: int) -> int:
        """Numbers of a head that are rotated. A rotary pair has one of their first half and one of their second half."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.fraction)

    def require_fit(self, head_dim: int):
        """Raise a ValueError unless heads of ``head_dim`` numbers can be rotated."""
        rotated, check = self.rotary_dim(head_dim), FieldChecks(self, "rope.")
        even = rotated >= 2 and rotated % 2 == 0
        check.require("fraction", even, f"an even number of rotated numbers of the {head_dim} of a head")
        for name in ("short_factors", "long_factors") if self.kind == "longrope" else ():
            fits = len(getattr(self, name)) == rotated // 2
            check.require(name, fits, f"{rotated // 2} numbers, one a rotary pair")

    def for_length(self, max_len: int) -> "Rope":
        """The rope of an engine with texts of up to ``max_len`` tokens.

        Only ``longrope`` depends on it: it takes ``long_factors`` for all texts if they may grow past
        ``original_max_position``, as vLLM does. transformers decides by the current length of a text, so it agrees for
        texts of up to ``original_max_position`` tokens in an engine with no longer ones, and for longer texts in any other
        engine.
        """
        if self.kind != "longrope":
            return self
        return dataclasses.replace(self, long_texts=is_int(max_len) and max_len > self.original_max_position)
