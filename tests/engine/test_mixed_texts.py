"""10,000 texts of the shipped models, and 2,000 of large layers on a GPU: each has the same tokens and the same bits of
log-probabilities alone, and mixed at random with others in engines that draft, run, cache and preempt in other ways."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import key_of, shared
from mixed_texts import Difference, alone, mixed, second_turns

import jspec
from benchmarks.random_modules import random_module
from benchmarks.shapes import LLAMA_8B, head_for
from jspec.config import EngineConfig, Speculation
from jspec.config.engine import UnpinnedConfig
from jspec.doctor.exact import Written
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.models.one_order import unpinned
from jspec.sampling.params import SamplingParams

MODELS = Path(jspec.__file__).parent / "demo_models"
MAX_LEN, MAX_TOKENS = 128, 16
FEW = {"max_batch": 3, "page_size": 8, "prefill_chunk": 8, "prefill_tokens": 32}
MANY = {"max_batch": 9, "page_size": 4, "prefill_chunk": 16, "prefill_tokens": 64, "rounds": 3}
SHORT_OF_PAGES = {**MANY, "num_pages": 80}
COUPLED = {"verify": "match", "draft_sampling": "coupled"}
WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {  # the draft, and arguments of ``jspec.load``
    "plain": (None, MANY),
    "plain, few pages": (None, SHORT_OF_PAGES),
    "lookup": ("ngram", FEW | COUPLED | {"num_draft_tokens": 2}),
    "draft model": ("draft", SHORT_OF_PAGES | COUPLED | {"num_draft_tokens": 4}),
    "EAGLE-3, 7 drafts, width 12": ("eagle3", FEW | COUPLED | {"num_draft_tokens": 7, "width": 12}),
    "EAGLE, 1 draft": ("eagle", MANY | COUPLED | {"num_draft_tokens": 1}),
    "EAGLE-3, K auto": ("eagle3", FEW | COUPLED | {"num_draft_tokens": "auto", "max_draft_tokens": 3}),
    "EAGLE-3, a budget": ("eagle3", MANY | COUPLED | {"num_draft_tokens": 4, "verify_budget": 2.5}),
    "EAGLE-3, rejection": ("eagle3", MANY | {"num_draft_tokens": 4, "verify": "rejection"}),
    "DSpark, block": ("dspark", FEW | {"num_draft_tokens": 3, "verify": "block"}),
}
TEXTS = 10_000 // len(WAYS)  # of each way; half of them are second turns
PER_ROUND = 50
assert TEXTS * len(WAYS) == 10_000
assert TEXTS % PER_ROUND == 0


class AnyShape:
    """Stands in for a controller: K and budget are chosen at random."""

    trying = False

    def __init__(self, shapes):
        self._shapes, self._rng = shapes, np.random.default_rng(0)

    def choose(self, rows: int, _):
        return self._shapes[rows][self._rng.integers(len(self._shapes[rows]))]

    def observe(self, *_):
        pass


@shared
def loaded(way: str) -> LLM:
    draft, how = WAYS[way]
    draft = draft if draft in (None, "ngram") else MODELS / draft
    llm = jspec.load(MODELS / "target", draft, max_len=MAX_LEN, dtype="float32", compilation_cache=False, **how)
    if how.get("num_draft_tokens") == "auto":
        loop = llm.engine.loop
        loop.controller = AnyShape(loop._shapes)  # pyright: ignore[reportAttributeAccessIssue]
    assert type(llm.engine.config) is UnpinnedConfig
    return llm


@shared
def plain_alone() -> LLM:
    sizes = {"max_batch": 1, "page_size": 64, "prefill_chunk": 32, "prefill_tokens": 32, "prefix_cache": False}
    return jspec.load(MODELS / "target", max_len=MAX_LEN, dtype="float32", compilation_cache=False, **sizes)


@functools.cache
def code() -> list[int]:
    """Tokens of Python, such as the models were trained to write."""
    text = "\n".join(path.read_text() for path in sorted(Path(jspec.__file__).parent.glob("engine/*.py")))
    tokenizer = plain_alone().tokenizer
    assert tokenizer is not None
    return list(tokenizer.encode(text, add_special_tokens=False))


def requests(seed: int, count: int, greedy: bool) -> list[Request]:
    """Prompts that begin anywhere in the code, every third where another one does."""
    rng = np.random.default_rng(seed)
    warm = {"temperature": 1.0}, {"temperature": 0.7, "top_k": 40}, {"temperature": 1.3, "top_p": 0.9}, {"min_p": 0.02}
    kinds = itertools.cycle([{"temperature": 0.0}] if greedy else warm)
    starts = rng.integers(len(code()) - MAX_LEN, size=count)
    starts[2::3] = starts[1::3][: len(starts[2::3])]
    prompts = [code()[start : start + length] for start, length in zip(starts, rng.integers(1, 64, count), strict=True)]
    base = SamplingParams(max_tokens=MAX_TOKENS, logprobs=0)
    return [
        Request(i, prompt, dataclasses.replace(base, **next(kinds)), key_of(10_000 * seed + i))
        for i, prompt in enumerate(prompts)
    ]


@functools.cache
def turns_of(seed: int, count: int, greedy: bool) -> list[tuple[list[Request], dict[int, Written]]]:
    """The requests of first and second turns, and their answers alone."""
    first = requests(seed, count, greedy)
    answers = alone(plain_alone().engine, first)
    second = second_turns(first, answers, MAX_LEN - MAX_TOKENS - 1)
    return [(first, answers), (second, alone(plain_alone().engine, second))]


def scores(llm: LLM, some: list[Request], answers: dict[int, Written]) -> dict[int, Written]:
    """The answers with the log-probabilities that the target gives them as prompts."""
    params = [SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)] * len(some)
    texts, found = [[*one.prompt, *answers[one.index].tokens] for one in some], {}
    for i, _, result in llm.completions(texts, params, [key_of(0)] * len(some)):
        given = result.prompt_logprobs
        assert given is not None
        new = answers[some[i].index].tokens
        behind = given[len(some[i].prompt) :]
        numbers = [each[token].logprob for each, token in zip(behind, new, strict=True) if each]
        found[some[i].index] = Written(new, numbers)
    return found


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_texts_of_the_shipped_models_mixed_at_random(way):
    llm, verify = loaded(way), WAYS[way][1].get("verify", "match")
    differences, scored = [Difference(), Difference()], Difference()
    for seed in range(TEXTS // PER_ROUND):
        turns = turns_of(seed, PER_ROUND // 2, greedy=verify != "match")
        for difference, (some, expected) in zip(differences, turns, strict=True):
            found, given = mixed(llm.engine, some, seed, silent=0.4), scores(llm, some, expected)
            for one in some:
                difference.count(one, expected[one.index], found[one.index])
                scored.count(one, expected[one.index], given[one.index])
    metrics = llm.engine.metrics()
    print(f"{way}: {[str(one) for one in (*differences, scored)]}", flush=True)
    assert metrics.num_cached_tokens > 0 < metrics.num_preemptions
    assert sum(one.of_texts for one in differences) == scored.of_texts == TEXTS
    assert not any(one.requests for one in (*differences, scored))


LAYERS_OF_8B = dataclasses.replace(LLAMA_8B, num_layers=2, vocab_size=32_768, max_position=2048, windows=())
ON_A_CARD = {"max_batch": 24, "max_len": 1024, "page_size": 64, "num_pages": 241, "prefill_tokens": 512}
WAYS_ON_A_CARD: dict[str, tuple[str | None, dict[str, Any]]] = {  # the method, and settings of drafts
    "plain": (None, {}),
    "EAGLE": ("eagle", {"num_draft_tokens": 4} | COUPLED),
    "EAGLE-3, 7 drafts": ("eagle3", {"num_draft_tokens": 7} | COUPLED),
    "draft model, rejection": ("draft_model", {"num_draft_tokens": 3, "verify": "rejection"}),
}


@shared
def large_engine(quantization: str, method: str | None, settings: tuple, **sizes) -> Engine:
    """An engine over two layers of an 8B shape with random weights."""
    config = dataclasses.replace(LAYERS_OF_8B, quantization=quantization or None)
    target, speculation, draft = random_module(config), Speculation(**dict(settings)), None
    if method is not None:
        head: Any = LAYERS_OF_8B if method == "draft_model" else head_for(config, method)
        fields = {"aux_layers": (0, 1, 2)} if method == "eagle3" else {}
        draft = random_module(dataclasses.replace(head, **fields), 1)
    of_draft = None if draft is None else draft.config
    decoding = Decoding(drafter_for(of_draft, config, speculation), speculation.verify)
    made = unpinned(EngineConfig(dtype="bfloat16", **ON_A_CARD | sizes), target, draft)
    assert type(made) is UnpinnedConfig
    engine = Engine(target, draft, decoding, made, method=method)
    engine.warmup()  # compiles on all cores
    return engine


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS_ON_A_CARD)
@pytest.mark.parametrize("quantization", ["", "int4"], ids=["bf16", "int4"])
def test_texts_of_large_layers_mixed_at_random(quantization, way):
    """Of 250 texts of each kind some have all of a prompt of 600 tokens before them, which is cut anywhere."""
    method, settings = WAYS_ON_A_CARD[way]
    engine = large_engine(quantization, method, tuple(settings.items()))
    one = large_engine(quantization, None, (), max_batch=1, num_pages=None, prefix_cache=False)
    rng, difference, greedy = np.random.default_rng(0), Difference(), settings.get("verify", "match") != "match"
    some = []
    for i, length in enumerate(rng.integers(1, 600, 125)):
        params = SamplingParams(max_tokens=MAX_TOKENS, logprobs=0, temperature=0.0 if greedy or i % 3 == 0 else 0.9)
        some.append(Request(i, rng.integers(LAYERS_OF_8B.vocab_size, size=length).tolist(), params, key_of(i)))
    for turn in range(2):
        expected, found = alone(one, some), mixed(engine, some, turn, silent=0.4)
        for each in some:
            difference.count(each, expected[each.index], found[each.index])
        some = second_turns(some, expected, 900)
    print(f"{quantization or 'bf16'}, {way}: {difference}", flush=True)
    assert difference.of_texts == 250
    assert not difference.requests
