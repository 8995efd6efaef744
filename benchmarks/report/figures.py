"""Figures of ``benchmarks.engine.serving``, beside their goals and what vLLM reaches."""

import dataclasses

from benchmarks.report import results


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the table.

    Attributes:
      line: number of its line.
      variant: what tells it from other figures of that line, empty if it is the only one.
      what: what was measured.
      unit: of the numbers: ``tokens/s``, ``ms``, ``s``, ``x`` for a ratio, ``%``.
      measured: the figure; None where it cannot be measured here.
      goal, stretch: what it is to reach, and what would be better than that; None for no goal.
      vllm: what vLLM 0.26 measures on an H200, None if that is not known.
      more: further numbers that belong to it.
    """

    line: int
    variant: str
    what: str
    unit: str
    measured: float | None
    goal: float | None = None
    stretch: float | None = None
    vllm: float | None = None
    more: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.line}, {self.variant}" if self.variant else str(self.line)

    def add_to(self, result: results.Result):
        """Put it under its key into a result, if it was measured."""
        if self.measured is None:
            return
        result.measured[self.key] = self.measured
        if self.goal is not None:
            result.goals[self.key] = {"goal": self.goal, "stretch": self.stretch}
        details = {"line": self.line, "what": self.what, "unit": self.unit, "more_is_better": self.unit == "tokens/s"}
        result.details[self.key] = details | ({"vllm": self.vllm} if self.vllm is not None else {}) | self.more


def printed(figure: Figure, verdict: str) -> str:
    """A line for people to read, and one more for further numbers."""
    vllm, goal, stretch, measured = map(shown, (figure.vllm, figure.goal, figure.stretch, figure.measured))
    text = _columns(figure.line, figure.what, vllm, goal, stretch, measured, figure.unit, verdict)
    more = ", ".join(
        f"{name.replace('_', ' ')} {value:.4g}" for name, value in figure.more.items() if name != "more_is_better"
    )
    return f"{text}\n      {more}" if more else text


def shown(x: float | None) -> str:
    """A number with three digits or more, for people to read; ``-`` for None."""
    if x is None:
        return "-"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.2f}" if abs(x) >= 10 else f"{x:.3f}"


def _columns(line, what, vllm, goal, stretch, measured, unit, verdict) -> str:
    return f"{line:>4}  {what:<66} {vllm:>7} {goal:>7} {stretch:>7} {measured:>8} {unit:<8}  {verdict}".rstrip()


HEADER = _columns("line", "what", "vLLM", "goal", "beyond", "measured", "", "")
