"""What rounds cost: seconds of every round shape, from the cache or measured on an idle batch."""

import statistics
import time
from typing import TYPE_CHECKING

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.engine.adaptive.cost_table import RoundShape, budget_of, drafts_of
from jspec.engine.aot_cache.costs import Seconds, cached_or_measured
from jspec.engine.request import Request
from jspec.engine.runner.program_inputs import ProgramInputs
from jspec.engine.runner.programs import StepBuilder
from jspec.engine.runner.step_io import Call
from jspec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from jspec.engine.runner.model_runner import ModelRunner

TIMED_CALLS = 5  # of a decode program, when its cost is measured
LONGEST_TEXT = 1024  # tokens; texts that fill a long context would make attention most of every measured round


def round_costs(runner: "ModelRunner", builder: StepBuilder, config: EngineConfig) -> Seconds:
    """Rows of each decode program -> round shape -> seconds per round, as an earlier process has cached or measured now.

    Measuring overwrites the contents of all pages.
    """
    shapes = {b: runner.round_shapes(b) for b in config.batch_buckets}
    arrays = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in runner.leaves]
    method = type(builder.step(runner.leaves, runner.num_draft_tokens).drafter).__name__
    shards = runner.sharding and runner.sharding.shards
    key = method, builder.decoding.rule, config, runner.draft_lengths, arrays, shards

    def measure():
        return {b: {shape: measured(runner, builder, config, b, shape) for shape in shapes[b]} for b in shapes}

    return cached_or_measured(key, method, shapes, measure)


def measured(
    runner: "ModelRunner", builder: StepBuilder, config: EngineConfig, bucket: int, shape: RoundShape
) -> float:
    """Seconds of a round of ``bucket`` rows: the median of a few calls, after warm-up, on an idle batch in which the text
    of every row has half of ``max_len`` tokens, but at most ``LONGEST_TEXT``. The contents of all pages are lost."""
    seconds, programs = [], runner.programs
    prompt, endless = [0] * min(max(config.max_len // 2, 1), LONGEST_TEXT), SamplingParams(max_tokens=config.max_len)
    request = Request(0, prompt, endless, np.zeros(2, np.uint32))
    places = np.arange(bucket * config.pages_per_row).reshape(bucket, -1)
    pages = (1 + places % (config.pool_pages - 1)).tolist()  # rows may share pages: their contents are not used
    call = Call.of(config, bucket, range(bucket), pages, config.rounds)
    inputs = ProgramInputs(programs, config, builder.vocab_size)
    for _ in range(TIMED_CALLS + 1):
        for admission in inputs.admissions([(row, request) for row in range(bucket)]):
            runner.send_packed(programs.admit, admission)
        jax.block_until_ready(runner.state.outcome)
        started = time.perf_counter()
        program = programs.decode[bucket, drafts_of(shape), budget_of(shape)]
        logs = runner.read(runner.send_packed(program, call))
        seconds.append((time.perf_counter() - started) / logs.num_rounds)
    return statistics.median(seconds[1:])
