"""Rounds in several programs with the host in between, for batches in which a grammar restricts the tokens of some requests.

The host has to see the drafts before it knows which tokens may come behind them, so a round has three parts:

1. ``draft``. Meanwhile the host reads the logs of the round before, and asks the grammars for jump-forward tokens.
2. ``verify_pass``: the target reads the drafts, the first of which are these tokens. Meanwhile the host walks through the
   grammars along the drafts.
3. ``finish``: the drafts are verified under the tokens that the grammars allow. The next ``draft`` follows at once.

So the device does not wait for the host, unless the host takes longer than the device beside it.

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
from jspec.drafting.base import FixedDrafts
from jspec.engine.adaptive.cost_table import RoundShape
from jspec.engine.request import LIVE, ActiveRequest, Constraint
from jspec.engine.round_log import CallLogs
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.programs import PackedProgram
from jspec.engine.runner.step import VerifyPass
from jspec.engine.runner.step_io import DecodeRows, VerifyInputs
from jspec.sampling.tree import Tree
from jspec.sampling.verify import Proposal

Failure = tuple[ActiveRequest, BaseException]


class Dispatched(NamedTuple):
    """Rounds that were sent, and whose logs are not read yet.

    Attributes:
      shape: theirs; None if all requests are constrained.
      decoded: the requests that they decode.
      rounds: how many were asked for.
      logs: on the way to the host.
      places: the rows of the logs that are those of the requests; None for all, in their order.
    """

    shape: RoundShape | None
    decoded: list[ActiveRequest]
    rounds: int
    logs: CallLogs
    places: list[int] | None = None


class _Proposed(NamedTuple):
    """Drafts on the device.

    Attributes:
      actives: their requests, in the order of the program's rows.
      bucket: the number of its rows.
      processing: whether its programs are those for processors and log-probabilities.
      proposal: the drafts. Of a tree, those of constrained requests are chains.
    """

    actives: list[ActiveRequest]
    bucket: int
    processing: bool
    proposal: Proposal | Tree


class _Passed(NamedTuple):
    """Drafts that the target has read.

    Attributes:
      proposed: the drafter's.
      rows: the requests in the program's rows; None for one that has ended meanwhile.
      jump_forward: of every row, the tokens that are its first drafts.
      verified: the result of the verify pass.
    """

    proposed: _Proposed
    rows: list[ActiveRequest | None]
    jump_forward: list[list[int]]
    verified: VerifyPass


class SplitRounds:
    """The three parts of such rounds; each comes before the next one of the same round, and no part comes twice.

    Args:
      batch: has the state.
      config: sizes of the programs.
      most: K, the most drafts of a round.
      rereads: whether a drafter has to read jump-forward tokens that took the place of its own drafts. A window of a draft
        head does that anyway. A draft model with recurrent states reads two tokens in the first pass of a round.

    Attributes:
      rereads: as given.
    """

    def __init__(self, batch: DeviceBatch, config: EngineConfig, most: int, rereads: bool = False):
        self._batch, self._programs, self._config, self._most = batch, batch.programs, config, most
        self.rereads = rereads
        self._proposed: _Proposed | None = None
        self._passed: _Passed | None = None
        self._failures: list[Failure] = []

    def draft(self, actives: Sequence[ActiveRequest]):
        """Send the program that drafts for requests. Earlier drafts that were not verified are dropped."""
        if not actives:
            return
        for active in actives:
            active.largest_K = self._most
        self._catch_up([active for active in actives if active.misread])
        bucket, processing = self._config.bucket(len(actives)), processes(actives, self._config)
        program = self._programs.draft[bucket, processing]
        proposal = self._batch.send(program, program.packing.pack(self._call(bucket, actives)))
        if any(active.request.constraint is not None for active in actives):
            start_host_copies((proposal.tokens, proposal.count))
        self._proposed, self._passed = _Proposed([*actives], bucket, processing, proposal), None

    def verify_pass(self):
        """Have the target read the newest drafts. All logs of their requests have been read."""
        if self._proposed is None:
            return
        proposed, self._proposed = self._proposed, None
        rows = [active if active.proposed and active.outcome == LIVE else None for active in proposed.actives]
        jump_forward = self._jump_forward(rows)
        if not any(rows):
            return
        fixed = FixedDrafts.of(proposed.bucket, self._most, jump_forward)
        program = self._programs.verify_pass[proposed.bucket]
        inputs = program.packing.pack(VerifyInputs(self._call(proposed.bucket, rows), fixed))
        self._passed = _Passed(proposed, rows, jump_forward, self._batch.send(program, proposed.proposal, inputs))

    def finish(self, actives: Sequence[ActiveRequest]) -> Dispatched | None:
        """Have the drafts of requests verified under their constraints.

        Args:
          actives: the requests, among those of the newest drafts. The drafts of others are dropped.

        Returns:
          the round that ends; None if no request is left.
        """
        if not actives or self._passed is None:
            return None
        (proposed, rows, jump_forward, verified), self._passed = self._passed, None
        rows = [active if active in actives else None for active in rows]
        allowed = self._batch.send(*self._walk(rows, proposed.proposal, jump_forward))
        if not any(rows):
            return None
        program = self._programs.finish[proposed.bucket, proposed.processing]
        logs = self._batch.send(program, verified, allowed, program.packing.pack(self._call(proposed.bucket, rows)))
        left = {i: active for i, active in enumerate(rows) if active is not None}
        are_mixed = any(active.request.constraint is None for active in left.values())
        shape = self._most if are_mixed else None
        return Dispatched(shape, [*left.values()], 1, start_host_copies(logs), places=[*left])

    def failures(self) -> list[Failure]:
        """The requests whose constraints have raised since the last call, and the exceptions."""
        failures, self._failures = self._failures, []
        return failures

    def forget(self):
        """Drop drafts and failures."""
        self._proposed, self._passed, self._failures = None, None, []

    def _catch_up(self, misread: list[ActiveRequest]):
        """Have the drafter read what these requests have in the place of its drafts."""
        if misread and self.rereads:
            program = self._programs.catch_up
            self._batch.send(program, program.packing.pack(self._call(self._config.max_batch, misread)))
        for active in misread:
            active.misread = False

    def _call(self, bucket: int, actives: Sequence[ActiveRequest | None]) -> DecodeRows:
        return decode_rows(self._config, bucket, actives, rounds=1)

    def _jump_forward(self, rows: list[ActiveRequest | None]) -> list[list[int]]:
        """The jump-forward tokens of every row for which there is room in a round."""
        tokens: list[list[int]] = [[] for _ in rows]

        def add(active: ActiveRequest, place: int):
            room = min(self._most, active.request.max_drafts, self._config.max_len - 1 - active.length)
            tokens[place] += _constraint(active).jump_forward(room)[:room] if room > 0 else ()

        self._ask(rows, add)
        return tokens

    def _walk(
        self, rows: list[ActiveRequest | None], proposal: Proposal | Tree, jump_forward: list[list[int]]
    ) -> tuple[PackedProgram, np.ndarray]:
        """Wait for the drafts, and find out which tokens may come along them.

        Returns:
          the grammar program for the constrained requests, and its inputs.
        """
        places = _constrained(rows)
        program = self._programs.grammar[self._config.bucket(max(len(places), 1))]
        packed, inputs = program.packing.views()
        inputs.restrict(places)
        if places:
            flags = dict(zip(places, inputs.allowed, strict=False))
            self._batch.wait_for((proposal.tokens, proposal.count))
            drafts, count = np.asarray(proposal.tokens), np.asarray(proposal.count)

            def walk(active: ActiveRequest, place: int):
                fixed, own = jump_forward[place], drafts[place, : count[place]].tolist()
                # As ``FixedDrafts.put_into`` has it.
                active.misread = fixed != own[: len(fixed)]
                _constraint(active).allow(fixed if active.misread else own, flags[place])

            self._ask(rows, walk)
        return program, packed

    def _ask(self, rows: list[ActiveRequest | None], question: Callable[[ActiveRequest, int], None]):
        """Ask each constraint, given its request and row. An exception takes the request out of ``rows``."""
        for place in _constrained(rows):
            active = rows[place]
            assert active is not None
            try:
                question(active, place)
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException as error:  # Rust panics do not derive from Exception
                self._failures.append((active, error))
                rows[place] = None


def processes(actives: Sequence[ActiveRequest], config: EngineConfig) -> bool:
    """Whether such rounds of these requests are made by the programs for processors and log-probabilities.

    If shapes are pinned, they always are: a neighbour must not decide which program computes a text.
    """
    return config.pins_shapes or any(active.request.needs_processing for active in actives)


def decode_rows(config: EngineConfig, bucket: int, actives: Sequence[ActiveRequest | None], rounds: int) -> DecodeRows:
    """The rows of requests, for a program of ``bucket`` rows that makes so many rounds; None is no row."""
    rows = [config.num_rows if active is None or active.row is None else active.row for active in actives]
    pages = [() if active is None else active.pages for active in actives]
    return DecodeRows.of(config, bucket, rows, pages, rounds)


def start_host_copies(arrays: Any) -> Any:
    """The same arrays, whose copies to the host have begun."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays


def _constrained(rows: Sequence[ActiveRequest | None]) -> list[int]:
    """The rows of constrained requests."""
    return [i for i, active in enumerate(rows) if active is not None and active.request.constraint is not None]


def _constraint(active: ActiveRequest) -> Constraint:
    assert active.request.constraint is not None
    return active.request.constraint
