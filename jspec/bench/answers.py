"""What became of a request: its text, and when it came."""

import dataclasses

from jspec.bench.datasets import Sample


@dataclasses.dataclass
class Answer:
    """What became of a request. Times are those of ``time.perf_counter``, in seconds.

    Attributes:
      sample: what was asked.
      sent: when the request was sent.
      told: when each chunk with text came; a chunk may have several tokens.
      ended: when the last of them came, or the chunk that says why there is no more.
      text: the answer.
      prompt_tokens, output_tokens: as the server counts them; None if it does not tell.
      error: why there is no whole answer; empty if there is one.
    """

    sample: Sample
    sent: float
    told: list[float] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""

    @property
    def first(self) -> float:
        """When the first text came. An answer without any text has nothing before its end."""
        return self.told[0] if self.told else self.ended

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def latency(self) -> float:
        """Seconds from end to end."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk with text and the next."""
        return [now - before for before, now in zip(self.told, self.told[1:], strict=False)]
