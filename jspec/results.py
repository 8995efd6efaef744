"""What a request gives back."""

import dataclasses
import operator


@dataclasses.dataclass(frozen=True)
class Stats:
    """How speculation went for one request, in vLLM's terms.

    Attributes:
      num_steps: verify passes of the target that this request took part in.
      num_draft_tokens: drafts that were verified.
      num_accepted_draft_tokens: those that the target accepted.
      acceptance_histogram: entry j counts the steps that accepted exactly j drafts, j = 0..K.
      accepted_per_position: entry i counts the steps that accepted draft i, i = 0..K-1.
      drafted_per_position: entry i counts the steps that drafted it.
      num_steps_past_draft_limit: steps at a text that was longer than the drafter has positions for, so that nothing
        could be drafted.

    Where K varies it is the largest here. A completion of n tokens has n = num_steps + num_accepted_draft_tokens, less
    what its last step emitted past the end.
    """

    num_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_histogram: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    drafted_per_position: tuple[int, ...]
    num_steps_past_draft_limit: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verify pass, the bonus or correction token included: 1.0 for plain decoding."""
        return 1.0 + self.num_accepted_draft_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0.0 if nothing was drafted."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_draft_tokens(self) -> float:
        """Drafts per verify pass: K, less where the drafter had fewer, and the mean of K where it varies."""
        return self.num_draft_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Of the steps that drafted draft i, the share that accepted it and those before it; 0.0 if none drafted it."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return tuple(accepted / max(drafted, 1) for accepted, drafted in pairs)

    @staticmethod
    def of(
        K: int, drafted: list[int], accepted: list[int], prompt_length: int = 0, longest_text: int | None = None
    ) -> "Stats":
        """Count up the steps of one request.

        Args:
          K: the largest number of drafts of a step.
          drafted, accepted: valid and accepted drafts of each step.
          prompt_length: tokens of the prompt.
          longest_text: ``Drafter.longest_text``.
        """
        histogram, length, past_limit = [0] * (K + 1), prompt_length, 0
        for n in accepted:
            histogram[n] += 1
            past_limit += longest_text is not None and length > longest_text
            length += n + 1  # the drafts and the token that the target drew; only the last step may emit fewer
        return Stats(
            num_steps=len(accepted),
            num_draft_tokens=sum(drafted),
            num_accepted_draft_tokens=sum(accepted),
            acceptance_histogram=tuple(histogram),
            accepted_per_position=tuple(sum(histogram[i + 1 :]) for i in range(K)),
            drafted_per_position=tuple(sum(n > i for n in drafted) for i in range(K)),
            num_steps_past_draft_limit=past_limit,
        )

    def __add__(self, other: "Stats") -> "Stats":
        """Both requests' steps together."""
        return Stats(
            self.num_steps + other.num_steps,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_draft_tokens + other.num_accepted_draft_tokens,
            tuple(map(operator.add, self.acceptance_histogram, other.acceptance_histogram)),
            tuple(map(operator.add, self.accepted_per_position, other.accepted_per_position)),
            tuple(map(operator.add, self.drafted_per_position, other.drafted_per_position)),
            self.num_steps_past_draft_limit + other.num_steps_past_draft_limit,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """One completion.

    Attributes:
      text: the new text, without a stop string or stop token; None if the checkpoint has no tokenizer.
      token_ids: the new tokens, the one that ended the completion included.
      prompt_token_ids: the prompt as it was read.
      finish_reason: ``stop``, ``length``, or ``error`` if the target's logits were not finite.
      stop_reason: the stop string or the id in ``stop_token_ids`` that ended it; None for an end-of-sequence token and
        for ``length``; what went wrong for ``error``.
      stats: how speculation went.
      accepted: for each new token, whether it was drafted and accepted (else the target drew it).
      reproducible: whether the same seed gives the same text again. Not under ``num_draft_tokens="auto"``, because K
        follows from measured times and from what else was decoded, unless ``match`` with ``coupled`` drafts at a pinned
        width makes the text the same for every K.
    """

    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    stats: Stats
    accepted: list[bool] = dataclasses.field(repr=False)
    reproducible: bool = True
