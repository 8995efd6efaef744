"""``reproducible=True`` rests on this: a compiled program gives a row, or a chunk, the same bits in every place, beside any
others, and in every run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import TARGET, decode, drafting, key_of, tokens_of
from flax import nnx

from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.engine.runner.step_io import empty_prefill
from jspec.models import init
from jspec.sampling.params import SamplingParams

LARGE = dataclasses.replace(
    TARGET,
    vocab_size=8192,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=2,
    num_heads=16,
    num_kv_heads=4,
    head_dim=128,
    max_position=1024,
    windows=(),
)
SIZES = [
    pytest.param((TARGET, "float32", 8, 40), id="small"),
    pytest.param((LARGE, "bfloat16", 32, 512), id="large", marks=pytest.mark.gpu),
]


@functools.cache
def engine_of(size: tuple[ModelConfig, str, int, int], num_pages: int | None = None) -> Engine:
    config, dtype, chunk, max_len = size
    draft = dataclasses.replace(config, num_layers=1, windows=config.windows[:1])
    models = [init(one, nnx.Rngs(i), dtype) for i, one in enumerate((config, draft))]
    settings = EngineConfig(
        max_batch=8, max_len=max_len, dtype=dtype, page_size=chunk, num_pages=num_pages, prefill_chunk=chunk, rounds=3
    )
    make = drafting("draft_model", Speculation(4), config.vocab_size)
    return Engine(*models, Decoding(make, "rejection"), settings)


def requests(size) -> list[Request]:
    config, _, _, max_len = size
    rng, room = np.random.default_rng(0), max_len // 2
    prompts = [rng.integers(config.vocab_size, size=n).tolist() for n in rng.integers(3, room, size=16)]
    params = SamplingParams(temperature=1.0, max_tokens=max_len)
    return [Request(i, prompt, params, key_of(i)) for i, prompt in enumerate(prompts)]


def texts(engine: Engine, some) -> dict[int, list[int]]:
    return {active.request.index: active.tokens for active in engine.run(some)}


@pytest.mark.parametrize("size", SIZES)
def test_a_request_has_one_text_under_any_disturbance(size):
    engine, every = engine_of(size), requests(size)
    alone: dict[int, list[int]] = {}
    for one in every:
        alone |= texts(engine, [one])
        engine.scheduler.pages.forget_prefixes()
    assert texts(engine, every) == alone  # in other rows, and other chunks of a batch
    assert engine.metrics().num_cached_tokens == 0
    assert texts(engine, every[::-1]) == alone
    assert engine.metrics().num_cached_tokens > 0
    few = engine_of(size, 3 * engine.config.pages_per_row)
    assert texts(few, every) == alone  # another pool, and in and out of host memory
    assert few.metrics().num_preemptions > 0


@pytest.mark.parametrize("size", SIZES)
def test_chunk_has_the_same_bits_in_every_place_of_a_batch(size):
    engine = engine_of(size)
    runner, config, rng = engine.runner, engine.config, np.random.default_rng(1)
    (n,), c, M = config.chunk_buckets, config.chunk, config.pages_per_row
    tokens, own = rng.integers(size[0].vocab_size, size=c + 1), np.arange(1, M + 1)

    def read(place: int, neighbours: bool) -> list[np.ndarray]:
        """The contents of the page that a first chunk fills, in all pools of target and drafter."""
        inputs = empty_prefill(config, n)
        inputs.tokens[:] = rng.integers(size[0].vocab_size, size=inputs.tokens.shape)
        inputs.tokens[place] = tokens
        count = rng.integers(1, c + 1, size=n).astype(np.int32) * neighbours
        count[place] = c
        # The neighbours are chunks of one other text, all on the same pages, somewhere in it.
        start = (c * rng.integers(0, config.max_len // c, size=n)).astype(np.int32)
        start[place] = 0
        table = np.broadcast_to(M + own, (n, M)).astype(np.int32)
        table[place] = own
        program = runner.batch.programs.prefill[n]
        runner.batch.send_packed(program, dataclasses.replace(inputs, start=start, count=count, table=table))
        pools = jax.tree.leaves((runner.batch.state.cache, runner.batch.state.draft))
        return [np.asarray(pool[:, own[0]].astype(jnp.float32)) for pool in pools]

    first = read(0, neighbours=False)
    assert all(np.abs(page).max() > 0 for page in first)
    for place in {*range(min(n, 6)), n - 1}:
        for one, other in zip(first, read(place, neighbours=True), strict=True):
            np.testing.assert_array_equal(one, other)


PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}}
ASKS = {
    "nothing": [{}],
    "penalties": [PENALTIES],
    "log-probabilities": [{"logprobs": 3}],
    "some": [{}, PENALTIES | {"logprobs": 2}, {"temperature": 0.0, "allowed_token_ids": range(9)}],
}
RUNS = 4


@functools.cache
def agreeing(size: tuple[ModelConfig, str, int, int], K: int) -> Engine:
    """An engine whose draft is the target, so that most drafts are accepted."""
    config, dtype, _, max_len = size
    models = [init(config, nnx.Rngs(0), dtype) for _ in range(2)]
    settings = EngineConfig(max_batch=4, max_len=max_len, dtype=dtype, prefill_chunk=16, rounds=3, reproducible=True)
    return Engine(*models, Decoding(drafting("draft_model", Speculation(K), config.vocab_size), "rejection"), settings)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("K", [4, 12])
@pytest.mark.parametrize("size", SIZES)
def test_every_run_of_a_program_gives_the_same_bits(size, K, ask):
    """XLA runs it as a CUDA graph from the second run on, and a loop inside of the loop of rounds has given other numbers
    then."""
    asks = [SamplingParams(max_tokens=24, ignore_eos=True, **ASKS[ask][i % len(ASKS[ask])]) for i in range(4)]
    first, *others = (
        tokens_of(decode(agreeing(size, K), [[5 + i, 3, 9] for i in range(4)], asks)) for _ in range(RUNS)
    )
    assert all(len(text) == 24 for text in first)
    assert others == [first] * (RUNS - 1)
