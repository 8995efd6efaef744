"""The results of a request: completion, deltas, log-probabilities and the statistics of speculation."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np  # which the command does without

# The source of a token: an accepted draft; the recovered token after a rejected draft (``correction``); the bonus token
# where no draft follows those that were accepted; the target alone, in a round without drafts.
DRAFT, CORRECTION, BONUS, TARGET = SOURCES = ("draft", "correction", "bonus", "target")


def accepted_of(sources: Sequence[str]) -> list[bool]:
    """For each token, whether it is an accepted draft."""
    return [source == DRAFT for source in sources]


def sources_of(drafted: int, accepted: int, count: int, rejects: bool) -> list[str]:
    """The sources of the ``count`` tokens of a round with ``drafted`` drafts, ``accepted`` of them accepted.

    ``rejects`` says whether others followed these."""
    last = TARGET if not drafted else CORRECTION if rejects else BONUS
    return [DRAFT] * min(accepted, count) + [last] * (count - accepted)


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of speculation for one request, in vLLM's terms.

    Attributes:
      num_steps: how many rounds this request took part in; vLLM calls a round a step. Each is one verify pass of the
        target.
      num_draft_tokens: how many drafts were verified; of a tree, all of them count.
      num_accepted_draft_tokens: how many of these were accepted.
      acceptance_histogram: entry j counts the rounds that accepted exactly j drafts, j = 0..K.
      accepted_per_position: entry i counts the rounds that accepted draft i, i = 0..K-1.
      drafted_per_position: entry i counts the rounds that had a draft i; of a tree, one behind i others.
      num_steps_past_draft_limit: how many rounds drafted nothing because the text was longer than the drafter has
        positions for.

    If the engine chose K, then K is the largest here. A completion has num_steps + num_accepted_draft_tokens tokens, less
    those that its last round emitted past its end.

    Example::

        stats = jspec.Stats.of(K=4, drafted=[4, 4], accepted=[2, 4])
        assert stats.mean_acceptance_length == 4.0  # 6 accepted drafts, and a token behind those of each round
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
        """Tokens per round, the recovered or bonus token included: 1.0 for plain decoding."""
        return 1.0 + self.num_accepted_draft_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over verified drafts; 0.0 if nothing was drafted."""
        return self.num_accepted_draft_tokens / max(self.num_draft_tokens, 1)

    @property
    def mean_draft_tokens(self) -> float:
        """Drafts per round. That is K, or its mean where the engine chose it, and less where the drafter had fewer."""
        return self.num_draft_tokens / max(self.num_steps, 1)

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Entry i is the share of the rounds with a draft i that accepted it and all before it; 0.0 if there were none."""
        pairs = zip(self.accepted_per_position, self.drafted_per_position, strict=True)
        return tuple(accepted / max(drafted, 1) for accepted, drafted in pairs)

    @staticmethod
    def of(
        K: int,
        drafted: list[int],
        accepted: list[int],
        prompt_length: int = 0,
        longest_text: int | None = None,
        deepest: list[int] | None = None,
    ) -> "Stats":
        """The statistics of one request.

        Args:
          K: the most drafts of a round.
          drafted, accepted: how many drafts were valid, and how many of them accepted, one entry for each round.
          prompt_length: how many tokens the prompt has.
          longest_text: ``Drafter.longest_text``.
          deepest: how many drafts could have been accepted, in each round; None for all, which is so of chains.
        """
        histogram, length, past_limit = [0] * (K + 1), prompt_length, 0
        for count, n in zip(drafted, accepted, strict=True):
            histogram[n] += 1
            past_limit += longest_text is not None and length > longest_text and not count
            length += n + 1  # with the recovered or bonus token; only the last round may emit fewer
        return Stats(
            num_steps=len(accepted),
            num_draft_tokens=sum(drafted),
            num_accepted_draft_tokens=sum(accepted),
            acceptance_histogram=tuple(histogram),
            accepted_per_position=tuple(sum(histogram[i + 1 :]) for i in range(K)),
            drafted_per_position=tuple(sum(n > i for n in deepest or drafted) for i in range(K)),
            num_steps_past_draft_limit=past_limit,
        )

    def __add__(self, other: "Stats") -> "Stats":
        """The statistics of both requests together."""

        def added(one: Any, another: Any) -> Any:
            return tuple(map(operator.add, one, another)) if isinstance(one, tuple) else one + another

        return Stats(*map(added, dataclasses.astuple(self), dataclasses.astuple(other)))


def total_stats(stats: Iterable[Stats]) -> Stats:
    """The statistics of several requests together, of one at least."""
    return functools.reduce(operator.add, stats)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, under vLLM's names.

    Attributes:
      logprob: the natural logarithm of its probability; minus infinity for a token of probability 0.
      rank: 1 for the likeliest token of the vocabulary, and one more for each token that was likelier.
      decoded_token: its text by itself; None if the checkpoint has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One completion.

    Attributes:
      text: the new text, without the stop string or stop token; None if the checkpoint has no tokenizer.
      token_ids: the new tokens, with the token that ended the completion.
      prompt_token_ids: the tokens of the prompt.
      finish_reason: ``stop`` after a stop token or stop string, ``length`` at the length limit, ``abort`` if it was
        aborted, or ``error`` if the target's logits were not finite or an exception ended it.
      stop_reason: for ``stop``, the stop string or the id in ``stop_token_ids`` that ended the completion, or None if an
        end-of-sequence token did; for ``length`` and ``abort``, None; for ``error``, what went wrong.
      stats: the statistics of speculation.
      sources: for each new token, ``draft`` for an accepted draft, ``correction`` for the recovered token after a rejected
        draft, ``bonus`` for the token after drafts that no other followed, or ``target`` in a round without drafts.
      reproducible: whether the same seed gives the same text again, whatever else the engine does. With
        ``jspec.load(reproducible=False)``, the default with a tree, it need not. Under ``num_draft_tokens="auto"`` it does
        not, because K depends on measured times and on other requests, nor where other weights drafted from some token on.
        The exception is ``match`` with ``coupled`` chains at a pinned width, whose text is the same whatever is drafted.
      weights_versions: the versions of the weights that the new tokens are of: for each range of tokens the version, and the
        number of its first token. Several only where weights were replaced under way (``LLM.update_weights``), so that
        the text is of several laws; one otherwise, and none without tokens. A first range without tokens means that
        the prompt was read with the weights of that version.
      num_cached_tokens: how many tokens of the prompt the prefix cache had, so that they were not prefilled.
      logprobs: for each new token, its ``Logprob`` and those of the likeliest tokens, by token id, the new token's first.
        None if ``SamplingParams.logprobs`` did not ask for them.
      prompt_logprobs: the same for each token of the prompt, None for the first one, which nothing precedes. None if
        ``SamplingParams.prompt_logprobs`` did not ask for them, or if the request ended before prefill did.
      token_logprobs: float32 ``[n]``, the natural logarithm of the probability of each of the n new tokens, as ``logprobs``
        has it. None if ``SamplingParams.logprobs`` did not ask for any. Results are compared without it.

    Example::

        result = jspec.generate(jspec.load("path/to/target"), "def main(", max_tokens=32)
        print(result.text, result.finish_reason, result.stats.mean_acceptance_length)
    """

    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    stats: Stats
    sources: list[str] = dataclasses.field(repr=False)
    reproducible: bool = True
    weights_versions: tuple[tuple[int | str, int], ...] = ()
    num_cached_tokens: int = 0
    logprobs: list[dict[int, Logprob]] | None = dataclasses.field(default=None, repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = dataclasses.field(default=None, repr=False)
    token_logprobs: "np.ndarray | None" = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def accepted(self) -> list[bool]:
        """For each new token, whether it is an accepted draft; if not, the target sampled it."""
        return accepted_of(self.sources)

    @property
    def was_cut(self) -> bool:
        """Whether a limit, a stop string or one of ``stop_token_ids`` ended the text, and not the model."""
        return self.finish_reason != "stop" or self.stop_reason is not None


@dataclasses.dataclass(frozen=True)
class Delta:
    """The new tokens and text of one request.

    Attributes:
      id: the number that ``add`` gave the request.
      token_ids: its new tokens. A round commits several at once, and a delta has those of one call to the device.
      text: its new text; None if the checkpoint has no tokenizer. Text is held back while a later token may still change
        it, or cut it off as the beginning of a stop string. All texts of a request joined are the text of its result.
      finished: whether the request has ended, so that this is its last delta.
      result: the complete result, if it has ended; else None.
      sources: ``Result.sources`` of the new tokens.
      logprobs: ``Result.logprobs`` of the new tokens.
      prompt_logprobs: ``Result.prompt_logprobs``, in the first delta with a token; else None.

    Example::

        for delta in jspec.stream(jspec.load("path/to/target"), "def main(", max_tokens=32):
            print(delta.text, end="", flush=True)
    """

    id: int
    token_ids: list[int]
    text: str | None
    finished: bool
    result: Result | None = None
    sources: list[str] = dataclasses.field(default_factory=list, repr=False)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = dataclasses.field(default=None, repr=False)

    @property
    def accepted(self) -> list[bool]:
        """``Result.accepted`` of the new tokens."""
        return accepted_of(self.sources)
