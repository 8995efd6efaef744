"""A request as the engine sees it, and its progress. Nothing here needs JAX."""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jspec._validation import LARGEST_INT, require
from jspec.outputs import sources_of
from jspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jspec.engine.round_log import RoundLog

# Outcomes: the request still decodes; or it was ended by a stop token or stop string, the length limit, logits that are not
# finite, its subscriber, or an exception. The device knows the first four.
LIVE, STOPPED, FULL, BROKEN, ABORTED, FAILED = range(6)
FINISH_REASONS = {STOPPED: "stop", FULL: "length", BROKEN: "error", ABORTED: "abort", FAILED: "error"}


class Watcher(Protocol):
    """Reads the tokens of a request as the host learns of them: ``jspec.text.stop_strings.Completion``."""

    def add(self, tokens: Sequence[int]) -> int | None:
        """Read new tokens. Returns the length of the completion in tokens if it ends with them, else None."""
        ...


class Constraint(Watcher, Protocol):
    """Restricts the tokens of one request, as a grammar does, which has a state for the completion so far.

    ``add`` receives the tokens of the completion. An exception ends its request alone.
    """

    def jump_forward(self, most: int) -> Sequence[int]:
        """At most so many tokens with which the completion will very probably go on; they become drafts."""
        ...

    def allow(self, drafts: Sequence[int], flags: np.ndarray):
        """Clear the flags of tokens that may not come at each position, if all drafts before it stand.

        Args:
          drafts: of a round, in the order of their positions.
          flags: uint32 ``[positions, ceil(V / 32)]``, more positions than drafts, with all bits set. Bit v % 32 of word
            v // 32 is to be cleared if token v may not come. Positions behind a draft that may not come, or behind the
            end of the completion, stay as they are.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to complete, and its settings.

    Attributes:
      index: the number by which the caller knows this request.
      prompt: its tokens, at least one.
      params: how to sample, and when to end.
      key_data: uint32 ``[2]``, the data of the request's Threefry key.
      stop_tokens: ids of the tokens that end it.
      watcher: looks for stop strings. It is given every new token once, but the stop token that ends the request only if
        the text is to include it.
      priority: requests with a lower number are admitted first, and are preempted last.
      salt: only requests with the same salt share cached pages of their prompts.
      bad_words: the tokens of each of ``params.bad_words``.
      constraint: restricts the tokens; None if every token may come.
      tenant: whose request it is. Tenants take turns where requests of the same priority wait.
      replays: whether the constraint repeats a given text, whose log-probabilities are those without the constraint.

    Raises:
      ValueError: a value that the arrays of a row cannot hold.

    Example::

        request = Request(0, [1, 2, 3], SamplingParams(max_tokens=8, seed=7), np.array([0, 7], np.uint32))
    """

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    key_data: np.ndarray
    stop_tokens: tuple[int, ...] = ()
    watcher: Watcher | None = None
    priority: int = 0
    salt: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    tenant: str = ""
    replays: bool = False

    def __post_init__(self):
        # ``SamplingParams`` bounds the rest by what arrays hold.
        name, largest = f"prompt {self.index}", LARGEST_INT
        for token in self.stop_tokens:
            require(0 <= token <= largest, f"{name}: stop_tokens", token, f"token ids in 0..{largest}")
        key = np.asarray(self.key_data)
        ok = key.dtype == np.uint32 and key.shape == (2,)
        require(ok, f"{name}: key_data", self.key_data, "a Threefry key, uint32 of shape (2,)")

    @functools.cached_property
    def needs_processing(self) -> bool:
        """Whether rounds have to process logits for it, or to compute log-probabilities."""
        return self.params.needs_processing

    @property
    def max_drafts(self) -> int:
        """The most drafts of a round that it wants."""
        most = self.params.max_drafts
        return LARGEST_INT if most is None else most

    def limit(self, max_len: int) -> int:
        """The length, prompt included, at which the request is complete."""
        length = len(self.prompt)
        return length + self.params.most_tokens(max_len - length)


@dataclasses.dataclass(eq=False)
class ActiveRequest:
    """A request that the engine has accepted, and its progress.

    Attributes:
      request: the request.
      order: its number among all requests of the engine, in the order in which they came.
      subscriber: who has submitted it; neither the scheduler nor the loop looks into it.
      turn: its turn among those of all tenants; of one tenant, each request has the turn behind that of the one before.
      limit: the length at which it is complete.
      most_slots: the most cache slots that it may ever use.
      row: its batch row; None while it waits, while it is swapped out, and while its last rounds are under way.
      pages: the pages that it holds, in the order of its tokens.
      num_read_again: how many tokens of its completion are prefilled behind its prompt, because the weights were replaced
        since and their keys and values are to be those of the new ones.
      num_prefilled: how many tokens of its prefix have been prefilled into its pages, or were found there.
      num_cached_tokens: how many of them were found in the prefix cache.
      decoding: whether its prompt has been prefilled, so that rounds decode it.
      proposed: whether drafts of it wait on the device to be verified, as those of constrained requests do, and those of
        requests beside them.
      unread_rounds: how many rounds were sent for it whose logs the host has not read yet.
      largest_K: the most drafts of its last round that was sent, or 0 if the drafter has caught up since.
      misread: whether jump-forward tokens took the place of drafts of its last round, which the drafter has read as its own.
      saved: its state and pages in host memory while it is swapped out, else None; the runner's.
      num_saved_pages: how many pages are in ``saved``.
      tokens: the new tokens so far.
      versions: as in ``Result.weights_versions``.
      redrafted: whether another draft took over under way, so that the seed may mean another text.
      sources: the source of each of them, as in ``Result.sources``.
      logprobs: for each of them, a line of ``TokenLogprobs.packed``; empty if the request wants none.
      drafted: for each round that counts, how many drafts were verified.
      deepest: for each round that counts, how many of them could have been accepted, as in ``RoundLog``.
      accepted: for each round that counts, how many of them the target accepted.
      prompt_logprobs: for each prefilled chunk of its prompt, by its start: how many tokens it has, and which line of
        an array, on its way to the host, has ``TokenLogprobs.packed`` of the tokens behind them. Empty if not wanted.
      outcome: LIVE until it ends, then one of the others.
      error: the exception that ended it, if its outcome is FAILED.
      end_delivered: whether its subscriber has received its last delta.
      num_preemptions: how often it was preempted.
      times: when it arrived, was admitted, had its first and its newest token, by ``time.perf_counter``; NaN for the future.
    """

    request: Request
    order: int = 0
    subscriber: Any = None
    turn: int = 0
    limit: int = 0
    most_slots: int = 0
    row: int | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_read_again: int = 0
    num_prefilled: int = 0
    num_cached_tokens: int = 0
    decoding: bool = False
    proposed: bool = False
    unread_rounds: int = 0
    largest_K: int = 0
    misread: bool = False
    saved: Any = None
    num_saved_pages: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    versions: list[tuple[int | str, int]] = dataclasses.field(default_factory=list)
    redrafted: bool = False
    sources: list[str] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    deepest: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    prompt_logprobs: dict[int, tuple[int, Any, int]] = dataclasses.field(default_factory=dict)
    outcome: int = LIVE
    error: BaseException | None = None
    end_delivered: bool = False
    num_preemptions: int = 0
    times: "Times" = dataclasses.field(default_factory=lambda: Times(time.perf_counter()))

    @property
    def seniority(self) -> tuple[int, int, int]:
        """The sort key of requests: the smallest goes first, the largest is preempted first."""
        return self.request.priority, self.turn, self.order

    @property
    def length(self) -> int:
        """How many committed tokens the host knows of, prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def prefix(self) -> Sequence[int]:
        """The text that it begins with when it is admitted: its prompt, and tokens that are read again."""
        if not self.num_read_again:
            return self.request.prompt
        return [*self.request.prompt, *self.tokens[: self.num_read_again]]

    @property
    def num_to_prefill(self) -> int:
        """How many tokens are prefilled: all of the prefix but the last."""
        return len(self.request.prompt) + self.num_read_again - 1

    def begin_anew(self):
        """Be admitted once more, and then go on behind the tokens that it has."""
        self.num_read_again, self.num_prefilled, self.num_cached_tokens = len(self.tokens), 0, 0
        self.decoding = self.proposed = self.misread = False
        self.largest_K, self.saved, self.num_saved_pages = 0, None, 0
        if not self.tokens:  # nothing is left of weights before
            self.versions.clear()
            self.redrafted = False

    def update(self, log: "RoundLog"):
        """Add the rounds of a call, up to the request's end.

        The device knows no stop strings and may have gone on behind one. Such rounds, and the tokens behind the
        stop string in its own round, are left out. A watcher that raises ends the request as FAILED.

        Args:
          log: the rounds of this row alone, in lists, of ``RoundLog.by_row``.
        """
        for i, count in enumerate(log.count):
            accepted = log.accepted[i]
            if self.outcome != LIVE or accepted < 0:
                break
            new = log.tokens[i][:count]
            self.tokens += new
            self.sources += sources_of(log.drafted[i], accepted, count, log.rejects[i] > 0)
            if self.request.params.logprobs is not None and log.logprobs is not None:
                self.logprobs += [*log.logprobs[i, :count]]
            self.drafted.append(log.drafted[i])
            self.deepest.append(log.deepest[i])
            self.accepted.append(accepted)
            self.outcome = log.outcome[i]
            self._look_at(new)

    def _look_at(self, new: list[int]):
        """Give new tokens to the constraint and to the watcher, which may end the completion."""
        request, num_hidden = self.request, 0
        if self.outcome == STOPPED and not request.params.include_stop_str_in_output:
            num_hidden = 1  # the stop token
        if request.constraint is not None:
            before = len(self.tokens)
            self._end_if(lambda constraint=request.constraint: constraint.add(new))
            cut = before - len(self.tokens)
            new, num_hidden = new[: len(new) - cut], 0 if cut else num_hidden
        if request.watcher is not None and self.outcome != FAILED:
            self._end_if(lambda watcher=request.watcher: watcher.add(new[: len(new) - num_hidden]))

    def _end_if(self, add: Callable[[], int | None]):
        """End the completion at the length that a watcher returns, if any, or with its exception."""
        try:
            length = add()
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # Rust panics do not derive from Exception
            self.outcome, self.error = FAILED, error
            return
        if length is not None:
            del self.tokens[length:], self.sources[length:], self.logprobs[length:]
            self.outcome = STOPPED


def row_of(active: ActiveRequest) -> int:
    """The row of a request that has one."""
    assert active.row is not None
    return active.row


class Progress(NamedTuple):
    """What a step did for one request: its new tokens, whether it has ended, and the number of the first new token."""

    active: ActiveRequest
    token_ids: list[int]
    finished: bool
    start: int


@dataclasses.dataclass
class Times:
    """When something first happened to a request, in seconds of ``time.perf_counter``; NaN if it has not."""

    arrived: float
    admitted: float = float("nan")
    first_token: float = float("nan")
    newest_token: float = float("nan")
