"""A schedule that is decided and not sent yet, because a compilation was interrupted: who leaves then takes nobody along."""

import contextlib
import dataclasses

import pytest
from disturbances import preempting
from engines import CONFIG, Letters, bigram, drafting, ragged_prompts, shared, successor_table

import jspec
from jspec.config import Speculation
from jspec.engine.engine import Engine
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams

TABLES = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
PROMPTS = ragged_prompts((9, 17, 5, 23))  # one more than there are rows
PARAMS = [SamplingParams(temperature=1.0, max_tokens=9, seed=seed) for seed in range(len(PROMPTS))]


@shared
def model(num_pages: int | None = None) -> LLM:
    """Few rounds a call and short passes, so that a request sees many schedules."""
    settings = Speculation(num_draft_tokens=2)
    config = dataclasses.replace(CONFIG, rounds=2, prefill_tokens=16, num_pages=num_pages)
    make = drafting("draft_model", settings)
    return LLM(*TABLES, make, "draft_model", Letters(), settings, config).warmup()


def step_until_interrupted(engine: Engine, monkeypatch, deltas: list[jspec.Delta]):
    """The next step that decides something is interrupted before it sends anything, as in the middle of a compilation."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(engine.runner, "compile_for", interrupt)
        while engine.unfinished:
            deltas += engine.step()


def finish(engine: Engine, deltas: list[jspec.Delta]) -> dict[int, jspec.Result]:
    while engine.unfinished:
        deltas += engine.step()
    assert not engine.scheduler.unfinished
    return {delta.id: delta.result for delta in deltas if delta.result is not None}


@pytest.mark.parametrize("how", ["as-they-come", "preempting", "few-pages"])
@pytest.mark.parametrize("victim", [0, 2])
def test_an_abort_before_a_plan_is_sent_ends_one_request(victim, how, monkeypatch):
    llm = model(9 if how == "few-pages" else None)
    engine = llm.engine
    expected = [result.token_ids for result in jspec.generate(llm, PROMPTS, PARAMS)]
    preempted = engine.metrics().num_preemptions
    with preempting(engine) if how == "preempting" else contextlib.nullcontext():
        for steps in range(11):
            ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
            deltas = [delta for _ in range(steps) for delta in engine.step()]
            step_until_interrupted(engine, monkeypatch, deltas)
            engine.abort(ids[victim])
            results = finish(engine, deltas)
            for id, tokens in zip(ids, expected, strict=True):
                if results[id].finish_reason == "abort":
                    assert id == ids[victim]
                    assert results[id].token_ids == tokens[: len(results[id].token_ids)]
                else:
                    assert (results[id].finish_reason, results[id].token_ids) == ("length", tokens)
    assert engine.metrics().pages_used == 0
    assert (engine.metrics().num_preemptions > preempted) == (how != "as-they-come")


def test_an_abort_of_everybody_leaves_nothing(monkeypatch):
    llm = model()
    engine, expected = llm.engine, jspec.generate(llm, PROMPTS, PARAMS)
    for steps in range(5):
        ids = [engine.add(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        deltas = [delta for _ in range(steps) for delta in engine.step()]
        step_until_interrupted(engine, monkeypatch, deltas)
        for id in ids:
            engine.abort(id)
        assert engine.metrics().pages_used == 0
        assert set(finish(engine, deltas)) == set(ids)
        assert [result.token_ids for result in jspec.generate(llm, PROMPTS, PARAMS)] == [
            result.token_ids for result in expected
        ]


def test_who_gave_up_before_a_plan_was_sent_has_nothing_under_way(monkeypatch):
    """``warmup`` waits for the other thread's request, and does not speak of one that this thread has given up."""
    llm = model()
    engine = llm.engine
    mine, deltas = engine.add(PROMPTS[0], max_tokens=25), []
    other = engine.follow([engine.request(PROMPTS[1], PARAMS[1])], streams=True)
    next(other)
    step_until_interrupted(engine, monkeypatch, deltas)
    engine.abort(mine)
    with pytest.raises(RuntimeError, match="this thread has 1 request under way"):
        llm.warmup()  # the one that is followed
    assert len([progress for progress in other if progress.finished]) == 1
    llm.warmup()
    assert finish(engine, deltas)[mine].finish_reason == "abort"
