"""Which programs a schedule needs, and their inputs in arrays on the host."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jspec.config import EngineConfig
from jspec.engine.adaptive.cost_table import RoundShape
from jspec.engine.request import row_of
from jspec.engine.runner.programs import PackedProgram, Programs
from jspec.engine.runner.split_rounds import processes
from jspec.engine.runner.state import Admission, AdmitInputs
from jspec.engine.runner.step_io import PrefillInputs, empty_prefill, page_tables
from jspec.engine.scheduler.prefill_batching import Chunk
from jspec.engine.scheduler.schedule import Schedule


class ProgramInputs:
    """Chooses the programs of a schedule, and makes their inputs.

    Args:
      programs: the engine's.
      config: sizes of the programs.
      vocab_size: V of the target.

    Attributes:
      config: as given.
    """

    def __init__(self, programs: Programs, config: EngineConfig, vocab_size: int):
        self._programs, self.config, self._vocab_size = programs, config, vocab_size

    def programs_of(self, schedule: Schedule, shape: RoundShape, behind: bool) -> list[PackedProgram]:
        """The packed programs that a schedule needs, but for verify programs; with ``behind``, the drafter catches up."""
        programs = [self._prefill_program(schedule.chunks)[1]] if schedule.chunks else []
        programs += [self._programs.admit] if schedule.admitted else []
        if schedule.decoding:
            programs.append(self.decode_program(schedule, shape)[0])
        programs += [self._programs.catch_up] if behind else []
        if schedule.drafting:
            bucket = self.config.bucket(len(schedule.drafting))
            how = bucket, processes(schedule.drafting, self.config)
            programs += [self._programs.draft[how], self._programs.grammar[bucket]]
        return programs

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[PackedProgram, PrefillInputs]:
        """The prefill program for these chunks, and its inputs."""
        config = self.config
        n, program = self._prefill_program(chunks)
        inputs = empty_prefill(config, n)
        start, count = inputs.start.copy(), inputs.count.copy()
        for i, (active, begin, length) in enumerate(chunks):
            inputs.tokens[i, : length + 1] = active.prefix[begin : begin + length + 1]
            start[i], count[i], inputs.request_row[i] = begin, length, row_of(active)
            if begin + length == active.num_to_prefill:
                inputs.row[i] = row_of(active)
        table = page_tables([chunk.active.pages for chunk in chunks], n, config)
        return program, dataclasses.replace(inputs, start=start, count=count, table=table)

    def decode_program(self, schedule: Schedule, shape: RoundShape) -> tuple[PackedProgram, int]:
        """The program of a schedule's rounds, and its number of rows."""
        bucket = self.config.bucket(len(schedule.decoding))
        if schedule.needs_processing:
            return self._programs.processing_decode[bucket], bucket
        return self._programs.decode[bucket, shape], bucket

    def admissions(self, requests: Sequence[Admission]) -> Iterator[AdmitInputs]:
        """Inputs of ``admit`` for requests, as many at a time as the program takes."""
        most = self._programs.most_admitted
        for first in range(0, len(requests), most):
            yield AdmitInputs.of(self.config, self._vocab_size, most, requests[first : first + most])

    def page_groups(self, pages: Sequence[int]) -> list[np.ndarray]:
        """The pages in groups that one program moves, the last one padded with the null page; at least one group."""
        size = self._programs.most_moved
        groups = [pages[i : i + size] for i in range(0, max(len(pages), 1), size)]
        return [np.array([*group, *[0] * (size - len(group))], np.int32) for group in groups]

    def _prefill_program(self, chunks: Sequence[Chunk]) -> tuple[int, PackedProgram]:
        """The smallest prefill program for these chunks, after its number of chunks."""
        config = self.config
        if any(chunk.active.request.params.prompt_logprobs is not None for chunk in chunks):
            return config.logprob_chunks, self._programs.prefill_with_logprobs
        n = next(n for n in config.chunk_buckets if n >= len(chunks))
        return n, self._programs.prefill[n]
