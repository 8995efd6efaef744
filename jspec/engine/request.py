"""A request as the engine sees it, and what became of it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jspec.config import EngineConfig
from jspec.engine.state import BROKEN, FULL, LIVE, STOPPED, RequestArrays
from jspec.engine.step import RoundLog
from jspec.sampling.distribution import Warp
from jspec.sampling.params import MAX_STOP_TOKENS, SamplingParams

FINISH_REASONS = {STOPPED: "stop", FULL: "length", BROKEN: "error"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request as the engine sees it.

    Attributes:
      index: what the caller knows it by.
      prompt: its tokens, at least one.
      params: how to sample.
      key_data: uint32 ``[2]``, its Threefry key.
      stop_tokens: ids that end it.
      find_stop: given the new tokens and how many of them were looked at before, how many to keep if the text they
        make contains a stop string, else None.
    """

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    key_data: np.ndarray
    stop_tokens: tuple[int, ...] = ()
    find_stop: Callable[[list[int], int], int | None] | None = None

    def padded(self, config: EngineConfig) -> np.ndarray:
        """The prompt, int32 ``[S]``."""
        prompt = np.zeros(config.max_len, np.int32)
        prompt[: len(self.prompt)] = self.prompt
        return prompt

    def arrays(self, config: EngineConfig, table: np.ndarray) -> RequestArrays:
        """What a row needs to know of it, given its pages, int32 ``[M]``."""
        params, length = self.params, len(self.prompt)
        stop_tokens = [*self.stop_tokens, *[-1] * (MAX_STOP_TOKENS - len(self.stop_tokens))]
        return RequestArrays(
            length=_array(length, np.int32),
            limit=_array(length + params.most_tokens(config.max_len - length), np.int32),
            min_length=_array(length + params.min_tokens, np.int32),
            stop_tokens=_array(stop_tokens, np.int32),
            key_data=_array(self.key_data, np.uint32),
            table=_array(table, np.int32),
            warp=Warp(
                temperature=_array(0.0 if params.greedy else params.temperature, np.float32),
                top_k=_array(max(params.top_k, 0), np.int32),
                top_p=_array(params.top_p, np.float32),
                min_p=_array(params.min_p, np.float32),
            ),
        )


@dataclasses.dataclass
class ActiveRequest:
    """A job in flight, and after its end what became of it: ``outcome`` is STOPPED, FULL or BROKEN by then."""

    request: Request
    pages: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    from_draft: list[bool] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    outcome: int = LIVE

    def follow(self, log: RoundLog):
        """Add what its row did in a call, fields ``[rounds]`` and tokens ``[rounds, K + 1]``, up to its end.

        Rounds that ran past a stop which only the host can see are left out.
        """
        for i in range(log.count.shape[0]):
            if self.outcome != LIVE or log.accepted[i] < 0:
                break
            count, accepted = int(log.count[i]), int(log.accepted[i])
            looked_at = len(self.tokens)
            self.tokens += log.tokens[i, :count].tolist()
            self.from_draft += [j < accepted for j in range(count)]
            self.drafted.append(int(log.drafted[i]))
            self.accepted.append(accepted)
            self.outcome = int(log.outcome[i])
            keep = self.request.find_stop(self.tokens, looked_at) if self.request.find_stop else None
            if keep is not None:
                del self.tokens[keep:], self.from_draft[keep:]
                self.outcome = STOPPED


def _array(value, dtype) -> Any:
    """A host array that enters a program as an argument, without a transfer of its own."""
    return np.asarray(value, dtype)
