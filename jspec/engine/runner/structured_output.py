"""Rounds of requests whose tokens a grammar restricts: two programs, with the host in between.

The host has to see the drafts before it can say which tokens may come behind them. So one program drafts, the host walks
through the grammar along the drafts, and another program verifies them under what the grammar allows.

A draft that the grammar refuses stays in its place. The verification rule rejects it, because its probability under the
target's restricted distribution p is 0, and draws the token there from what is left of p, as behind any rejected draft. Had
it been taken out, that token would be drawn from p itself, and texts in which the drafter would have proposed what the
grammar allows would come too often.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest, Constraint
from jspec.engine.runner.programs import Programs
from jspec.engine.runner.step_io import Call, CallLogs, Drafting, Judging, every_token
from jspec.sampling.verify import Proposal

Failure = tuple[ActiveRequest, BaseException]
Send = Callable[..., Any]


class Judged(NamedTuple):
    """What became of the drafts of some requests.

    Attributes:
      actives: the requests.
      places: the row of the call that each of them had.
      logs: of the round, on the way to the host.
    """

    actives: list[ActiveRequest]
    places: list[int]
    logs: CallLogs


class _Proposed(NamedTuple):
    """What was drafted: for whom, in the order of the program's rows, how many rows it has, and what, on the device."""

    actives: list[ActiveRequest]
    bucket: int
    proposal: Proposal


class Constrained:
    """Drafts for constrained requests, and has the drafts judged.

    Args:
      programs: the engine's.
      config: what may be used.
      most: K, the most drafts of a round.
    """

    def __init__(self, programs: Programs, config: EngineConfig, most: int):
        self._programs, self._config, self._most = programs, config, most
        self._proposed: _Proposed | None = None
        self._failures: list[Failure] = []

    def draft(self, actives: Sequence[ActiveRequest], send: Send):
        """Send the program that drafts for requests. What was drafted before, and not judged, is forgotten.

        Args:
          actives: the requests.
          send: sends a program with arguments, and returns what it gives beside the state.
        """
        if not actives:
            return
        self._proposed = None
        asked = [(active, self._forced(active)) for active in actives]
        able = [(active, forced) for active, forced in asked if forced is not None]
        if not able:
            return
        bucket, drafted = self._config.bucket(len(able)), [active for active, _ in able]
        told = Drafting.of(self._call(bucket, drafted), self._most, [forced for _, forced in able])
        program = self._programs.draft[bucket]
        proposal = send(program, program.packing.pack(told))
        on_the_way((proposal.tokens, proposal.count))
        self._proposed = _Proposed(drafted, bucket, proposal)

    def judge(self, actives: Sequence[ActiveRequest], send: Send) -> Judged | None:
        """Wait for the drafts of requests, and send the program that judges them under what their constraints allow.

        Arguments as for ``draft``.

        Returns:
          what will become of them; None if there is nobody left.
        """
        if not actives or self._proposed is None:
            return None
        (drafted, bucket, proposal), self._proposed = self._proposed, None
        drafts, count = np.asarray(proposal.tokens), np.asarray(proposal.count)
        allowed = every_token(bucket, *self._programs.judge_shape)
        able = [
            active in actives and self._allow(active, drafts[i, : count[i]].tolist(), allowed[i])
            for i, active in enumerate(drafted)
        ]
        if not any(able):
            return None
        program = self._programs.judge[bucket]
        told = Judging(self._call(bucket, [a if ok else None for a, ok in zip(drafted, able, strict=True)]), allowed)
        logs = send(program, proposal, program.packing.pack(told))
        places = [i for i, ok in enumerate(able) if ok]
        return Judged([drafted[i] for i in places], places, on_the_way(logs))

    def failures(self) -> list[Failure]:
        """The requests whose constraints have raised since this was last asked, and what they raised."""
        failures, self._failures = self._failures, []
        return failures

    def forget(self):
        """Forget what was drafted, and who failed."""
        self._proposed, self._failures = None, []

    def _call(self, bucket: int, actives: Sequence[ActiveRequest | None]) -> Call:
        """A call of one round for the rows of requests; None is no row."""
        rows = [self._config.num_rows if one is None or one.row is None else one.row for one in actives]
        pages = [() if one is None else one.pages for one in actives]
        return Call.of(self._config, bucket, rows, pages, 1)

    def _forced(self, active: ActiveRequest) -> list[int] | None:
        """The forced drafts of a request; None if its constraint fails."""
        try:
            return list(_constraint(active).forced(self._most))[: self._most]
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of Rust code is no Exception
            self._failures.append((active, error))
            return None

    def _allow(self, active: ActiveRequest, drafts: list[int], flags: np.ndarray) -> bool:
        """Clear the flags of what may not come; whether its constraint did not fail."""
        try:
            _constraint(active).allow(drafts, flags)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            self._failures.append((active, error))
            return False
        return True


def on_the_way(arrays: Any) -> Any:
    """The same arrays, whose copies to the host have begun."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays


def _constraint(active: ActiveRequest) -> Constraint:
    assert active.request.constraint is not None
    return active.request.constraint
