"""Runs every program once before the first request, and says how far that is."""

from collections.abc import Sequence

import jax
import numpy as np

from jspec.engine.request import Request
from jspec.engine.runner.compile import Program, require_wanted
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.program_inputs import ProgramInputs
from jspec.engine.runner.programs import EngineProgram
from jspec.engine.runner.state import Admission
from jspec.engine.runner.step_io import DecodeRows
from jspec.sampling.params import SamplingParams


class WarmupProgress:
    """The stage of a warm-up and its programs, for messages; any thread may read it.

    Args:
      programs: all that are compiled and then run, in that order.
      runs: how often each of them runs.

    Attributes:
      measuring: whether the costs of rounds are being measured.
    """

    def __init__(self, programs: Sequence[Program] = (), runs: int = 1):
        self._programs, self._runs = programs, runs
        self.measuring = False

    def __str__(self) -> str:
        """``compiling 12 of 31 programs (prefill_4x32)`` for example: how many are compiled, and one that is not yet."""
        total, missing = len(self._programs), [program for program in self._programs if not program.compiled]
        idle = [program for program in self._programs if program.calls < self._runs]
        for stage, left in (("compiling", missing), ("running", idle)):
            if left:
                return f"{stage} {total - len(left)} of {total} programs ({left[0].name})"
        if self.measuring:
            return "measuring the costs of rounds"
        return f"all {total} programs have run"


def run_each(
    batch: DeviceBatch,
    inputs: ProgramInputs,
    programs: Sequence[tuple[EngineProgram, tuple]],
    pages: Sequence[int],
    runs: int,
):
    """Run each program to its end, until all have been sent ``runs`` times. The batch is idle before and afterwards.

    A program that was only sent would still be running when the first request comes, which would wait for it. Rounds end
    before the first where no row is live, and what they compute would run for the first time then, so one row has a request
    of one token.

    Args:
      batch: has the state.
      inputs: makes the inputs.
      programs: the compiled programs, with arguments that leave an idle batch as it is.
      pages: free pages for that row.
      runs: how often.

    Raises:
      NotWanted: nobody waits for that any more.
    """
    config, every = inputs.config, batch.programs
    rounds: dict[Program, tuple] = {}
    for b in config.batch_buckets:
        call = DecodeRows.of(config, b, [0], [pages], 1)
        decode = [every.processing_decode[b], *(program for (rows, *_), program in every.decode.items() if rows == b)]
        rounds |= {program: (program.packing.pack(call),) for program in decode}
    request = Request(0, [0], SamplingParams(max_tokens=1), np.zeros(2, np.uint32))
    (admission,) = inputs.admissions([Admission(0, request, request.prompt)])
    for program, args in programs:
        while program.calls < runs:
            require_wanted(batch.is_wanted)
            if program in rounds:
                batch.send_packed(every.admit, admission)
            result = batch.send(program, *rounds.get(program, args))
            jax.block_until_ready((result, batch.state))
