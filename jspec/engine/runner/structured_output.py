"""Rounds of requests whose tokens a grammar restricts: two programs, with the host in between.

The host has to see the drafts before it knows which tokens may come behind them. So one program drafts, the host walks
through the grammar along the drafts, and another program verifies them under the tokens that the grammar allows.

A draft that the grammar rejects stays in its place. The verification rule rejects it, because its probability under the
target's restricted distribution p is 0, and draws the recovered token from the residual of p, as behind any rejected draft.
Had the draft been taken out, that token would be drawn from p itself, and tokens that the drafter proposes and the grammar
allows would come too often.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest, Constraint
from jspec.engine.runner.programs import Programs
from jspec.engine.runner.step_io import Call, CallLogs, DraftInputs, VerifyInputs, every_token
from jspec.sampling.verify import Proposal

Failure = tuple[ActiveRequest, BaseException]
Send = Callable[..., Any]


class VerifiedDrafts(NamedTuple):
    """The verified drafts of some requests.

    Attributes:
      actives: the requests.
      places: the row of the call that each of them had.
      logs: of the round, on the way to the host.
    """

    actives: list[ActiveRequest]
    places: list[int]
    logs: CallLogs


class _Proposed(NamedTuple):
    """Drafts on the device: their requests, in the order of the program's rows, its number of rows, and the proposal."""

    actives: list[ActiveRequest]
    bucket: int
    proposal: Proposal


class ConstrainedRounds:
    """Drafts and verifies for constrained requests.

    Args:
      programs: the engine's.
      config: sizes of the programs.
      most: K, the most drafts of a round.
    """

    def __init__(self, programs: Programs, config: EngineConfig, most: int):
        self._programs, self._config, self._most = programs, config, most
        self._proposed: _Proposed | None = None
        self._failures: list[Failure] = []

    def draft(self, actives: Sequence[ActiveRequest], send: Send):
        """Send the program that drafts for requests. Earlier drafts that were not verified are dropped.

        Args:
          actives: the requests.
          send: sends a program with arguments, and returns its result beside the state.
        """
        if not actives:
            return
        self._proposed = None
        known = {active: self._jump_forward(active) for active in actives}
        tokens = {active: tokens for active, tokens in known.items() if tokens is not None}
        if not tokens:
            return
        bucket, drafted = self._config.bucket(len(tokens)), list(tokens)
        inputs = DraftInputs.of(self._call(bucket, drafted), self._most, list(tokens.values()))
        program = self._programs.draft[bucket]
        proposal = send(program, program.packing.pack(inputs))
        start_host_copies((proposal.tokens, proposal.count))
        self._proposed = _Proposed(drafted, bucket, proposal)

    def verify(self, actives: Sequence[ActiveRequest], send: Send) -> VerifiedDrafts | None:
        """Wait for the drafts of requests, and send the program that verifies them under their constraints.

        Arguments as for ``draft``.

        Returns:
          the verified drafts; None if no request is left.
        """
        if not actives or self._proposed is None:
            return None
        (drafted, bucket, proposal), self._proposed = self._proposed, None
        drafts, count = np.asarray(proposal.tokens), np.asarray(proposal.count)
        allowed = every_token(bucket, *self._programs.verify_shape)
        sound = [
            active in actives and self._allow(active, drafts[i, : count[i]].tolist(), allowed[i])
            for i, active in enumerate(drafted)
        ]
        if not any(sound):
            return None
        program = self._programs.verify[bucket]
        verified = [active if ok else None for active, ok in zip(drafted, sound, strict=True)]
        logs = send(program, proposal, program.packing.pack(VerifyInputs(self._call(bucket, verified), allowed)))
        places = [i for i, ok in enumerate(sound) if ok]
        return VerifiedDrafts([drafted[i] for i in places], places, start_host_copies(logs))

    def failures(self) -> list[Failure]:
        """The requests whose constraints have raised since the last call, and the exceptions."""
        failures, self._failures = self._failures, []
        return failures

    def forget(self):
        """Drop drafts and failures."""
        self._proposed, self._failures = None, []

    def _call(self, bucket: int, actives: Sequence[ActiveRequest | None]) -> Call:
        """A call of one round for the rows of requests; None is no row."""
        no_row = self._config.num_rows
        rows = [no_row if active is None or active.row is None else active.row for active in actives]
        pages = [() if active is None else active.pages for active in actives]
        return Call.of(self._config, bucket, rows, pages, 1)

    def _jump_forward(self, active: ActiveRequest) -> list[int] | None:
        """The jump-forward tokens of a request; None if its constraint fails."""
        try:
            return list(_constraint(active).jump_forward(self._most))[: self._most]
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # Rust panics do not derive from Exception
            self._failures.append((active, error))
            return None

    def _allow(self, active: ActiveRequest, drafts: list[int], flags: np.ndarray) -> bool:
        """Clear the flags of tokens that may not come; returns whether the constraint did not fail."""
        try:
            _constraint(active).allow(drafts, flags)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            self._failures.append((active, error))
            return False
        return True


def start_host_copies(arrays: Any) -> Any:
    """The same arrays, whose copies to the host have begun."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays


def _constraint(active: ActiveRequest) -> Constraint:
    assert active.request.constraint is not None
    return active.request.constraint
