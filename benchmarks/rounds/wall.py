"""Wall time of ``jspec.generate``: how long a caller waits, the work of the host included."""

import statistics
import time

import jax
import numpy as np

import jspec
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from jspec.config import EngineConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.llm import LLM

WARM = 8  # tokens of the shorter text


def generate_seconds(bench: Bench, what: Decoding) -> float:
    """Seconds per token of one request's plain decoding, with as many rounds in a call to the device as the engine makes
    by default.

    Two texts after the same prompt are timed, one of ``WARM`` tokens and one of ``what.new`` more. The difference of the two
    times contains no prefill, and on average about as many slots are live as in the rounds that it is compared with."""
    config = EngineConfig(max_batch=1, max_len=what.capacity, dtype=bench.dtype)
    llm = LLM(
        bench.target, None, drafter_for(None, bench.pair.target, Speculation()), None, None, Speculation(), config
    )
    llm.warmup()
    prompt = (np.arange(what.start - WARM) % bench.pair.target.vocab_size).tolist()

    def seconds(tokens: int) -> float:
        params = jspec.SamplingParams(max_tokens=tokens, ignore_eos=True)
        times = []
        for _ in range(bench.repeats + 1):
            started = time.perf_counter()
            result = jspec.generate(llm, prompt, params, key=jax.random.key(0))
            times.append(time.perf_counter() - started)
            assert not isinstance(result, list)
            assert len(result.token_ids) == tokens
        return statistics.median(times[1:])

    return (seconds(WARM + what.new) - seconds(WARM)) / what.new
