"""The response to one request of a benchmark: its text, and when each chunk came."""

import dataclasses

from jspec.bench.datasets import Sample


@dataclasses.dataclass
class Response:
    """The response to one request. Times are those of ``time.perf_counter``, in seconds.

    Attributes:
      sample: the prompt.
      sent: when the request was sent.
      chunk_times: when each chunk with text came; a chunk may have several tokens.
      ended: when the last of them came, or the chunk with the finish reason.
      text: the generated text.
      prompt_tokens, output_tokens: as the server counts them; None if it does not report them.
      error: why the response is incomplete; empty if it is complete.
    """

    sample: Sample
    sent: float
    chunk_times: list[float] = dataclasses.field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""

    @property
    def first(self) -> float:
        """When the first text came; the end of a response without text."""
        return self.chunk_times[0] if self.chunk_times else self.ended

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
        return [now - before for before, now in zip(self.chunk_times, self.chunk_times[1:], strict=False)]
