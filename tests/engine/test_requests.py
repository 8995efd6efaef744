"""One way in: whatever makes a request of its arguments, the text is the same, and so is the error."""

import asyncio

import jax
import pytest
from engines import Letters, V, bigram, shared, successor_table, table_llm

import jspec
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams


@shared
def model() -> LLM:
    return table_llm(bigram(successor_table() / 10), None, Letters())


def by_adding(llm: LLM, *args, **options) -> jspec.Result:
    id = llm.engine.add(*args, **options)
    deltas = [delta for _ in range(50) for delta in llm.engine.step()]
    assert {delta.id for delta in deltas} == {id}
    return last(deltas)


def by_streaming(llm: LLM, *args, **options) -> jspec.Result:
    return last(list(jspec.stream(llm, *args, **options)))


def from_asyncio(llm: LLM, *args, **options) -> jspec.Result:
    async def ask():
        async with jspec.AsyncEngine(llm) as engine:
            return [delta async for delta in engine.generate(*args, **options)]

    return last(asyncio.run(asyncio.wait_for(ask(), 60)))


def last(deltas: list[jspec.Delta]) -> jspec.Result:
    result = deltas[-1].result
    assert result is not None
    return result


WAYS = [by_adding, by_streaming, from_asyncio]


@pytest.mark.parametrize("way", WAYS)
def test_each_way_answers_as_generate_does(way):
    llm, params = model(), SamplingParams(temperature=1.5, max_tokens=9, seed=3)
    expected = jspec.generate(llm, "abc", params)
    assert way(llm, "abc", params) == expected
    assert way(llm, {"prompt_token_ids": [0, 1, 2]}, params, priority=4, salt="tenant") == expected
    assert way(llm, ["abc"], temperature=1.5, max_new_tokens=9, seed=3) == expected
    keyed = jspec.generate(llm, "abc", key=jax.random.key(7), max_tokens=9, temperature=1.5)
    assert way(llm, "abc", key=jax.random.key(7), max_tokens=9, temperature=1.5) == keyed != expected


@pytest.mark.parametrize("way", WAYS)
def test_each_way_takes_defaults_from_the_checkpoint(way, monkeypatch):
    llm = model()
    monkeypatch.setattr(llm, "default_sampling_params", SamplingParams(temperature=0, max_tokens=7))
    assert way(llm, "a").text == jspec.generate(llm, "a").text == "bcdefgh"
    assert way(llm, "a", max_tokens=2).text == "bc"
    with pytest.raises(ValueError, match="default_sampling_params=None: expected SamplingParams"):
        llm.default_sampling_params = None  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("args", "options", "error", "words"),
    [
        (([],), {}, ValueError, "prompt has 0 prompts: expected one"),
        ((["a", "b"],), {}, ValueError, r"prompt has 2 prompts: expected one; jspec.generate\(\) takes several"),
        (("",), {}, ValueError, "prompt 0 is empty"),
        (([V],), {}, ValueError, "prompt 0 has token id 29: expected 0..28"),
        (([1] * 40,), {}, ValueError, "prompt 0 has 40 tokens, but max_len=40"),
        (("a", 3), {}, ValueError, "params=3: expected SamplingParams or None"),
        (("a", {"top_k": 3}), {}, ValueError, r"expected SamplingParams or None: SamplingParams\(\*\*{'top_k': 3}\)"),
        (("a",), {"priority": 0.5}, ValueError, "priority=0.5: expected an integer"),
        (("a",), {"salt": None}, ValueError, "salt=None: expected a string"),
        (("a",), {"key": 3}, ValueError, "key=3: expected a JAX key"),
        (("a",), {"key": jax.random.PRNGKey(1), "seed": 1}, ValueError, "key and SamplingParams.seed are both given"),
        (("a",), {"temperature": -1}, ValueError, "temperature=-1: expected a number"),
        (("a",), {"temprature": 1}, TypeError, "a request has no argument 'temprature'; did you mean 'temperature'"),
        (("a",), {"max_tokens": 1, "max_new_tokens": 2}, TypeError, "are the same argument; give one of them"),
        (("a",), {"max_len": 9}, TypeError, r"it is chosen when a model is loaded: give it to jspec.load\(\)"),
        (("a",), {"n": 2}, ValueError, "n=2: a request has one completion here"),
        (("a", SamplingParams()), {"seed": 1}, TypeError, "seed: give either params or its fields, not both"),
    ],
)
def test_each_way_refuses_with_the_same_words(args, options, error, words):
    llm, messages = model(), set()
    for way in WAYS:
        with pytest.raises(error, match=words) as refused:
            way(llm, *args, **options)
        messages.add(str(refused.value))
    assert len(messages) == 1
    assert not llm.engine.scheduler.unfinished


def test_a_stream_refuses_before_it_starts():
    with pytest.raises(ValueError, match="prompt 0 has 40 tokens"):
        jspec.stream(model(), [1] * 40)
