"""A program gives the same texts in every run. XLA runs it as a CUDA graph from the second run on, and a loop inside of the
loop of rounds has given other numbers then."""

import functools

import pytest
from engines import TARGET, drafting, key_of
from flax import nnx
from test_bits import LARGE

from jspec.config import EngineConfig, Speculation
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.models import init
from jspec.sampling.params import SamplingParams

SIZES = [
    pytest.param((TARGET, "float32", 40), id="small"),
    pytest.param((LARGE, "bfloat16", 256), id="large", marks=pytest.mark.gpu),
]
RUNS = 4
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}}
ASKS = {
    "nothing": [{}],
    "penalties": [PENALTIES],
    "log-probabilities": [{"logprobs": 3}],
    "some": [{}, PENALTIES | {"logprobs": 2}, {"temperature": 0.0, "allowed_token_ids": range(9)}],
}


@functools.cache
def engine_of(size, K: int) -> Engine:
    config, dtype, max_len = size
    models = [init(config, nnx.Rngs(i), dtype) for i in (0, 0)]  # the draft is the target: most drafts are accepted
    settings = EngineConfig(max_batch=4, max_len=max_len, dtype=dtype, prefill_chunk=16, rounds=3, reproducible=True)
    return Engine(*models, Decoding(drafting("draft_model", Speculation(K), config.vocab_size), "rejection"), settings)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("K", [4, 12])
@pytest.mark.parametrize("size", SIZES)
def test_every_run_of_a_program_gives_the_same_bits(size, K, ask):
    engine, asks = engine_of(size, K), ASKS[ask]

    def texts() -> list[list[int]]:
        params = [SamplingParams(max_tokens=24, ignore_eos=True, **asks[i % len(asks)]) for i in range(4)]
        every = [Request(i, [5 + i, 3, 9], one, key_of(i)) for i, one in enumerate(params)]
        found = {active.request.index: active.tokens for active in engine.run(every)}
        return [found[i] for i in range(4)]

    first = texts()
    assert all(len(text) == 24 for text in first)
    for _ in range(RUNS - 1):
        assert texts() == first
