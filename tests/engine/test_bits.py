"""``reproducible=True`` rests on this: a compiled program gives a row, or a chunk, the same bits in every place, beside any
others, and in every run.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import attribute
from engines import (
    CONFIG,
    MAX_LEN,
    TARGET,
    decode,
    draft,
    drafting,
    hybrid,
    hybrid_draft,
    in_bytes,
    key_of,
    latents,
    shared,
    target,
    tokens_of,
)
from engines import engine as make_engine
from flax import nnx
from mixed_texts import Difference, alone, mixed, second_turns
from requests_and_engines import chunks_of_states

from jspec.config import EngineConfig, ModelConfig, Speculation
from jspec.config.engine import UnpinnedConfig
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.engine.runner.step_io import empty_prefill
from jspec.models import Decoder, init
from jspec.pallas import sums
from jspec.pallas.attention import reference as attention
from jspec.pallas.matmul import reference, table
from jspec.pallas.norm import rms_norm
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


PLAIN_ALONE = UnpinnedConfig.of(dataclasses.replace(CONFIG, max_batch=1, prefix_cache=False), TARGET)
FEW, MANY = (
    UnpinnedConfig.of(dataclasses.replace(CONFIG, **sizes), TARGET)
    for sizes in ({"max_batch": 3, "page_size": 4}, {"max_batch": 9, "page_size": 4, "prefill_chunk": 16, "rounds": 3})
)
COUPLED = {"draft_sampling": "coupled"}
MODELS = {
    "dense": (target, draft),
    "latents": (latents, None),
    "bytes": (lambda: in_bytes(target(), "fp8"), None),
    "recurrent": (hybrid, None),
    "recurrent draft": (target, hybrid_draft),  # whose own numbers have other orders, which decide nothing
}
WAYS = {  # method, K, rule, config, and further settings; under ``rejection`` greedy texts alone are compared
    "plain": (None, 1, "match", MANY, {}),
    "one draft": ("ngram", 1, "match", FEW, COUPLED),
    "four drafts": ("draft_model", 4, "match", MANY, COUPLED),
    "eight drafts": ("draft_model", 8, "match", dataclasses.replace(FEW, width=12), COUPLED),
    "rejection": ("draft_model", 3, "rejection", FEW, {"draft_sampling": "sample"}),
}
OF_STATES = {  # the same for kinds with recurrent states, which read prompts in chunks of ``P`` tokens
    "plain, snapshots": (None, 1, "match", dataclasses.replace(MANY, snapshot_every=8), {}),
    "lookup": ("ngram", 3, "match", dataclasses.replace(FEW, prefill_chunk=16), COUPLED),
    "four drafts, snapshots": ("draft_model", 4, "match", dataclasses.replace(MANY, snapshot_every=16), COUPLED),
}
WAYS_OF = {
    "dense": WAYS,
    "latents": ["plain"],
    "bytes": ["plain"],
    "recurrent": ["plain, snapshots", "lookup"],
    "recurrent draft": ["four drafts, snapshots"],
}
IN_MAKE_TEST = {("dense", "four drafts"), ("latents", "plain"), ("recurrent", "lookup")}


class TestNothingIsPinned:
    """A request has one text and one set of log-probabilities in programs of any shape, from pages that prefill or rounds
    have written, with any drafts."""

    def requests(self, seed: int, count: int) -> list[Request]:
        """Prompts, of which some go on with what others may have written; greedy and sampled."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(TARGET.vocab_size, size=n).tolist() for n in rng.integers(1, 24, size=count)]
        base = SamplingParams(max_tokens=12, logprobs=0)
        warm = {"temperature": 1.0}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.3, "top_p": 0.8}
        kinds = ({"temperature": 0.0}, *warm)
        asked = [dataclasses.replace(base, **kinds[i % 4]) for i in range(count)]
        return [Request(i, *both, key_of(100 * seed + i)) for i, both in enumerate(zip(prompts, asked, strict=True))]

    def differing(self, kind: str, way: str, seed: int, count: int) -> tuple[list, list]:
        """The requests of first turns whose answers differ, and of second turns, whose prompts go on with the answers. With
        recurrent states these are asked twice: a snapshot behind an answer is there only then."""
        models, some, different = MODELS[kind], self.requests(seed, count), ([], [])
        method, K, verify, config, more = (WAYS | OF_STATES)[way]
        engine, one = (
            engine_over(method, K, verify, models, config, **more),
            engine_over(None, 1, "match", models, PLAIN_ALONE),
        )
        for turn in (0, 1, 1) if way in OF_STATES else (0, 1):
            expected, found, difference = alone(one, some), mixed(engine, some, seed), Difference()
            for each in some:
                if verify == "match" or each.params.temperature == 0:
                    difference.count(each, expected[each.index], found[each.index])
            different[turn].extend(difference.requests)
            some = some if turn else second_turns(some, expected, MAX_LEN - 4)
        # With drafts, or with few requests, such short texts may have no whole page that others can read.
        assert engine.metrics().num_cached_tokens > 0 or not way.startswith("plain") or count < 12
        return different

    @pytest.mark.parametrize(
        ("kind", "way"),
        [
            pytest.param(kind, way, marks=() if (kind, way) in IN_MAKE_TEST else pytest.mark.nightly)
            for kind, ways in WAYS_OF.items()
            for way in ways
        ],
    )
    def test_texts_and_bits_mixed_at_random(self, kind, way):
        with chunks_of_states():
            assert self.differing(kind, way, seed=1, count=12) == ([], [])

    @pytest.mark.nightly
    def test_ten_thousand_texts_mixed_at_random(self):
        rounds, per_round = 125, 16  # of first and second turns, by five ways
        different = [self.differing("dense", way, seed, 8) for seed in range(rounds) for way in WAYS]
        assert rounds * per_round * len(WAYS) == 10_000
        assert different == [([], [])] * (rounds * len(WAYS))

    @pytest.mark.parametrize("fault", ["parts that follow the number of tokens", "norms of one row alone"])
    def test_another_order_of_sums_is_detected(self, fault, monkeypatch):
        """A product is cut in parts that follow the number of tokens; a sum over a row has another order for few rows."""
        plain_sum = sums.row_sum

        def by_rows(x):
            return plain_sum(x) if x.size > 64 else plain_sum(x[..., :5]) + plain_sum(x[..., 5:])

        if fault.startswith("parts"):
            monkeypatch.setattr(table, "matmul_reference", in_parts_if(lambda tokens: math.prod(tokens) > 3))
        else:
            monkeypatch.setattr(rms_norm, "row_sum", by_rows)
            monkeypatch.setattr(rms_norm.norm, "__defaults__", (None, by_rows))
        broken_models(monkeypatch, 40 + 8 * fault.startswith("parts"))
        assert any(self.differing("broken", "plain", seed=1, count=6))

    def test_a_merge_of_attention_out_of_order_is_detected(self, monkeypatch):
        """Parts of a row's slots are merged forwards for few query tokens, and backwards for many."""
        plain = attention.rows_product

        def merged(x, y, axis):
            if axis == -1:
                return plain(x, y, axis)
            cuts = [slice(begin, begin + 8) for begin in range(0, x.shape[-1], 8)]
            parts = [plain(x[..., cut], y[..., cut, :], axis) for cut in cuts]
            return functools.reduce(jnp.add, parts if math.prod(x.shape[1:-1]) < 4 else parts[::-1])

        monkeypatch.setattr(attention, "rows_product", merged)
        broken_models(monkeypatch, 56)
        assert any(self.differing("broken", "plain", seed=1, count=6))

    def test_pages_of_another_order_are_detected(self, monkeypatch):
        """Rounds fill pages of answers by products of another order than prefill has: all programs of rounds agree, so
        that second turns alone show it."""
        monkeypatch.setattr(table, "matmul_reference", in_parts_if(lambda tokens: tokens[-1:] == (1,)))
        broken_models(monkeypatch, 72)
        first, second = self.differing("broken", "plain", seed=1, count=12)
        assert (first, second == []) == ([], False)

    def test_a_page_of_an_answer_that_is_not_full_is_detected(self):
        """Pages are cached whose last slot no round has written yet."""
        scheduler = engine_over(*WAYS["plain"][:3], MODELS["dense"], WAYS["plain"][3]).scheduler
        with attribute(scheduler, "_unread", scheduler._unread - 3):
            first, second = self.differing("dense", "plain", seed=1, count=12)
        scheduler.pages.forget_prefixes()
        assert (first, second == []) == ([], False)

    def test_answers_that_are_cached_with_recurrent_states_are_detected(self):
        """Pages that rounds have written are found, with a snapshot that prefill has made behind them."""
        way = OF_STATES["plain, snapshots"]
        with chunks_of_states():
            scheduler = engine_over(*way[:3], MODELS["recurrent"], way[3]).scheduler
            with attribute(scheduler, "_caches_answers", True):
                first, second = self.differing("recurrent", "plain, snapshots", seed=20, count=12)
        scheduler.pages.forget_prefixes()
        assert (first, second == []) == ([], False)


def in_parts_if(cuts):
    """Products in two parts of K if ``cuts`` says so of the shape of the tokens."""
    plain = reference.matmul_reference

    def product(x, weight, dtype=jnp.float32):
        size = x.shape[-1] // (2 if cuts(x.shape[:-1]) else 1)
        parts = [slice(begin, begin + size) for begin in range(0, x.shape[-1], size)]
        return sum(plain(x[..., part], weight[:, part], dtype) for part in parts)

    return product


def broken_models(monkeypatch, size: int):
    """Models of the kind "broken", of one layer with so many inner features: no other test has a trace of such a layer, so
    that a fault is in it that was injected before."""
    broken = Decoder(dataclasses.replace(TARGET, num_layers=1, windows=(), intermediate_size=size), rngs=nnx.Rngs(0))
    monkeypatch.setitem(MODELS, "broken", (lambda: broken, None))


@shared
def engine_over(method, K, verify, models, config, **more) -> Engine:
    """An engine that is shared by the tests above."""
    of, by = models
    return make_engine(method, K, verify, (of(), None if by is None else by()), config, **more)
