"""Callers of ``AsyncEngine``, and models for them whose requests take long."""

import asyncio
import dataclasses

from engines import CONFIG, Letters, bigram, drafting, shared, successor_table, table_llm

import jspec
from jspec.config import Speculation
from jspec.llm import LLM

TABLES = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
LONG = jspec.SamplingParams(max_tokens=400, seed=5)  # of a prompt that is far from its end when a test looks at it
PROMPTS = ["a", "bcdefghijklmnopqrst", "xyz", "hello"]


@shared
def model() -> LLM:
    return table_llm(*TABLES, Letters())


@shared
def slow_model() -> LLM:
    """One token a call and one segment a pass, so that every request takes hundreds of steps."""
    settings = Speculation(num_draft_tokens=0)
    config = dataclasses.replace(CONFIG, rounds=1, max_len=480, page_size=16, prefill_tokens=8)
    table = bigram(successor_table() / 10, max_position=480)
    return LLM(table, None, drafting(None, settings), None, Letters(), settings, config)


def run(coroutine, seconds: float = 60):
    """Its result; an error if it hangs."""

    async def limited():
        return await asyncio.wait_for(coroutine, seconds)

    return asyncio.run(limited())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def collect(generator) -> list[jspec.Delta]:
    return [delta async for delta in generator]


def params_of(seed: int) -> jspec.SamplingParams:
    return jspec.SamplingParams(temperature=0.5 + 0.1 * (seed % 7), max_tokens=3 + seed % 20, seed=seed)


def prompt_of(seed: int) -> str:
    return PROMPTS[seed % len(PROMPTS)]


def texts(llm, seeds) -> list[str]:
    """What ``jspec.generate`` says to each seed alone."""
    return [jspec.generate(llm, prompt_of(seed), params_of(seed)).text for seed in seeds]


async def ask(engine, seed: int) -> str:
    deltas = await collect(engine.generate(prompt_of(seed), params_of(seed)))
    return checked(deltas).text


def checked(deltas) -> jspec.Result:
    """The result, after a look at the deltas before it."""
    result = deltas[-1].result
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert "".join(delta.text for delta in deltas) == result.text
    assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
    assert len({delta.id for delta in deltas}) == 1
    return result
