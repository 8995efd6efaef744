"""What rounds cost: seconds of every round shape, from the cache or measured on an idle batch."""

import statistics
import time

import jax
import numpy as np

from jspec.engine.adaptive.cost_table import RoundShape
from jspec.engine.aot_cache.costs import Seconds, cached_or_measured
from jspec.engine.request import Request
from jspec.engine.round_log import RoundLog
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.engine.runner.program_inputs import ProgramInputs
from jspec.engine.runner.state import Admission
from jspec.engine.runner.step_io import DecodeRows
from jspec.sampling.params import SamplingParams

TIMED_CALLS = 5  # of a decode program, when its cost is measured
LONGEST_TEXT = 1024  # tokens; texts that fill a long context would make attention most of every measured round


def round_costs(batch: DeviceBatch) -> Seconds:
    """Rows of each decode program -> round shape -> seconds per round, as an earlier process has cached or measured now.

    The batch is idle. Measuring overwrites the contents of all pages.
    """
    builder, config = batch.builder, batch.builder.config
    shapes = {b: builder.round_shapes(b) for b in config.batch_buckets}
    arrays = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in batch.leaves]
    method = type(builder.step(batch.leaves, builder.usual).drafter).__name__
    shards = batch.sharding and batch.sharding.shards
    key = method, builder.decoding.rule, config, shapes, arrays, shards

    def measure():
        return {b: {shape: measured(batch, b, shape) for shape in shapes[b]} for b in shapes}

    return cached_or_measured(key, method, shapes, measure)


def measured(batch: DeviceBatch, rows: int, shape: RoundShape) -> float:
    """Seconds of a round of so many rows: the median of a few calls, after warm-up, on an idle batch in which the text of
    every row has half of ``max_len`` tokens, but at most ``LONGEST_TEXT``. The contents of all pages are lost."""
    seconds, programs, config = [], batch.programs, batch.builder.config
    prompt, endless = [0] * min(max(config.max_len // 2, 1), LONGEST_TEXT), SamplingParams(max_tokens=config.max_len)
    request = Request(0, prompt, endless, np.zeros(2, np.uint32))
    places = np.arange(rows * config.pages_per_row).reshape(rows, -1)
    pages = (1 + places % (config.pool_pages - 1)).tolist()  # rows may share pages: their contents are not used
    call = DecodeRows.of(config, rows, range(rows), pages, config.rounds)
    inputs = ProgramInputs(programs, config, batch.builder.vocab_size)
    for _ in range(TIMED_CALLS + 1):
        for admission in inputs.admissions([Admission(row, request, prompt) for row in range(rows)]):
            batch.send_packed(programs.admit, admission)
        jax.block_until_ready(batch.state.outcome)
        started = time.perf_counter()
        logs = batch.send_packed(programs.decode[rows, shape], call)
        log = RoundLog.unpacked(jax.tree.map(np.asarray, logs))
        seconds.append((time.perf_counter() - started) / log.num_rounds)
    return statistics.median(seconds[1:])
