"""Requests from asyncio get the texts that they would get alone, whoever else comes, leaves, fails or closes."""

import asyncio
import contextlib
import dataclasses
import gc
import threading
import time

import pytest
from async_callers import LONG, ask, checked, collect, model, params_of, prompt_of, run, slow_model, texts, until
from loops import in_a_loop
from openai_server import assert_nothing_is_held

import jspec
from jspec.engine.core import EngineCore
from jspec.serving.async_engine import WORKERS


def test_many_callers_get_the_texts_of_one():
    llm, seeds = model(), range(24)

    async def serve():
        async with jspec.AsyncEngine(llm) as engine:
            return await asyncio.gather(*(ask(engine, seed) for seed in seeds))

    assert run(serve()) == texts(llm, seeds)
    assert_nothing_is_held(llm)


def test_a_few_threads_prepare_for_all_callers():
    names = set()

    def work():
        names.add(threading.current_thread().name)
        time.sleep(0.01)
        return len(names)

    async def serve():
        engine = jspec.AsyncEngine(model())
        found = await asyncio.gather(*(engine.prepare(work) for _ in range(50)))
        await engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await engine.prepare(work)
        return found

    assert max(run(serve())) == len(names) == WORKERS


@in_a_loop
async def test_an_exception_of_prepare_reaches_its_caller():
    def work():
        raise KeyError("lost")

    async with jspec.AsyncEngine(model()) as engine:
        with pytest.raises(KeyError, match="lost"):
            await engine.prepare(work)


def test_deltas_come_before_the_end():
    async def serve():
        async with jspec.AsyncEngine(slow_model()) as engine:
            return await collect(engine.generate("abc", max_tokens=50, seed=3))

    deltas = run(serve())
    assert len(deltas) > 25
    checked(deltas)


@in_a_loop
async def test_bad_arguments_reach_their_caller():
    """``test_requests.py`` has all of them."""

    async with jspec.AsyncEngine(model()) as engine:
        with pytest.raises(ValueError, match=r"priority=0\.5: expected an integer"):
            await anext(engine.generate("a", priority=0.5))
        with pytest.raises(TypeError, match="did you mean 'temperature'"):
            await anext(engine.generate("a", temprature=1))
        assert await ask(engine, 1)


def test_something_else_than_a_model_is_refused():
    with pytest.raises(ValueError, match=r"llm='folder': expected a model that jspec.load\(\) returned"):
        jspec.AsyncEngine("folder")  # pyright: ignore[reportArgumentType]


@in_a_loop
async def test_no_more_wait_than_may(monkeypatch):
    llm = slow_model()
    limited = dataclasses.replace(llm.engine.config, max_waiting=2)
    monkeypatch.setattr(llm.engine, "config", limited)
    monkeypatch.setattr(llm.engine.scheduler, "_config", limited)

    async with jspec.AsyncEngine(llm) as engine:
        decoding = [engine.generate("a", LONG) for _ in range(3)]
        for generator in decoding:
            await anext(generator)  # each is in a row before the next one comes
        waiting = [asyncio.ensure_future(anext(engine.generate("a", LONG))) for _ in range(2)]
        await until(lambda: llm.engine.metrics().num_waiting == 2)
        with pytest.raises(jspec.QueueFull, match="max_waiting=2 requests wait already"):
            await anext(engine.generate("a", LONG))
        for task in waiting:
            task.cancel()
        await until(lambda: llm.engine.metrics().num_waiting == 0)
        for generator in decoding:
            await generator.aclose()
    assert_nothing_is_held(llm)


def waits(active) -> bool:
    return active.row is None


def is_read(active) -> bool:
    return active.num_prefilled > 0 and not active.decoding


def decodes(active) -> bool:
    return len(active.tokens) > 10


@pytest.mark.parametrize("how", ["cancel", "close", "collect"])
@pytest.mark.parametrize("state", [waits, is_read, decodes])
def test_callers_that_leave_change_no_other_text(state, how):
    """And changes nothing for those who stay."""
    llm = slow_model()
    neighbours = 3 if state is waits else 2  # of three rows
    options = {"max_tokens": 300 if state is waits else 100}
    prompt = "a" * 460 if state is is_read else "abc"
    expected = [jspec.generate(llm, "xyz", seed=seed, **options).text for seed in range(neighbours)]

    async def serve():
        async with jspec.AsyncEngine(llm) as engine:
            staying = [engine.generate("xyz", seed=seed, **options) for seed in range(neighbours)]
            first = [await anext(generator) for generator in staying]
            tasks = [asyncio.ensure_future(collect(generator)) for generator in staying]
            leaving = engine.generate(prompt, max_tokens=400 if state is not is_read else 10, seed=9)
            step = asyncio.ensure_future(anext(leaving))
            await until(lambda: len([one for one in engine._subscribers if one.unfinished]) == neighbours + 1)
            (active,) = max(engine._subscribers, key=lambda one: one.number).unfinished.values()
            await until(lambda: state(active))
            if how == "cancel":
                step.cancel()
                if state is decodes:  # whose first step is over: the task that goes on is cancelled
                    step = asyncio.ensure_future(collect(leaving))
                    await asyncio.sleep(0)
                    step.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await step
            elif state is decodes:
                await step
                if how == "close":
                    await leaving.aclose()
            else:  # a generator that waits cannot be closed, but what waits for it can be lost or cancelled
                step.cancel()
                await asyncio.wait([step])
            del leaving, step
            gc.collect()
            await until(lambda: active.outcome != 0)
            assert not all(task.done() for task in tasks)  # it was not their end that made room
            assert active.row is None
            assert not active.pages
            rest = await asyncio.gather(*tasks)
            return [checked([delta, *deltas]).text for delta, deltas in zip(first, rest, strict=True)]

    assert run(serve()) == expected
    assert_nothing_is_held(llm)


@in_a_loop
async def test_a_loop_that_breaks_gives_its_request_up():
    llm = slow_model()

    engine = jspec.AsyncEngine(llm)
    async with contextlib.aclosing(engine.generate("abc", LONG)) as deltas:
        async for delta in deltas:
            assert not delta.finished
            break
    await until(lambda: llm.engine.metrics().num_running == 0)
    async for _ in engine.generate("abc", LONG):
        break
    await until(lambda: llm.engine.metrics().num_running == 0)
    await engine.close()
    assert_nothing_is_held(llm)


@in_a_loop
async def test_closing_gives_up_what_is_under_way():
    llm = slow_model()

    engine = jspec.AsyncEngine(llm)
    tasks = [asyncio.ensure_future(collect(engine.generate("abc", LONG))) for _ in range(5)]
    # Prompts are encoded by other threads, and a request that arrives after the engine was closed is refused.
    await until(lambda: (llm.engine.metrics().num_running, llm.engine.metrics().num_waiting) == (3, 2))
    await engine.close()
    results = [checked(deltas) for deltas in await asyncio.gather(*tasks)]
    assert [result.finish_reason for result in results] == ["abort"] * 5
    assert_nothing_is_held(llm)
    await engine.close()
    with pytest.raises(RuntimeError, match="the AsyncEngine is closed"):
        await anext(engine.generate("abc"))
    async with jspec.AsyncEngine(llm) as another:
        assert checked(await collect(another.generate("abc", max_tokens=3))).finish_reason == "length"


@in_a_loop
async def test_an_engine_that_was_never_used_is_closed():
    async with jspec.AsyncEngine(model()):
        pass


@in_a_loop
async def test_the_thread_sleeps_while_there_is_nothing_to_do(monkeypatch):
    llm = model()

    async with jspec.AsyncEngine(llm) as engine:
        await ask(engine, 1)
        await until(lambda: not engine._subscribers)
        await asyncio.sleep(0.05)
        served, serve_once = [], EngineCore.serve
        monkeypatch.setattr(EngineCore, "serve", lambda *args: served.append(1) or serve_once(*args))
        await asyncio.sleep(0.2)
        assert not served
        await ask(engine, 2)
        assert served


def test_two_engines_and_calls_of_generate_and_add_beside_each_other():
    llm = model()
    expected = texts(llm, range(30))
    got = {}

    async def serve(seeds):
        async with jspec.AsyncEngine(llm) as engine:
            got.update(zip(seeds, await asyncio.gather(*(ask(engine, seed) for seed in seeds)), strict=True))

    def generate():
        seeds = range(20, 26)
        results = jspec.generate(llm, list(map(prompt_of, seeds)), list(map(params_of, seeds)))
        got.update(zip(seeds, [result.text for result in results], strict=True))

    def add():
        ids = {llm.engine.add(prompt_of(seed), params_of(seed)): seed for seed in range(26, 30)}
        while llm.engine.unfinished:
            got.update({ids[delta.id]: delta.result.text for delta in llm.engine.step() if delta.result is not None})

    threads = [threading.Thread(target=target) for target in (generate, add)]
    threads += [threading.Thread(target=run, args=(serve(range(start, start + 10)),)) for start in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got.get(seed) for seed in range(30)] == expected
    assert_nothing_is_held(llm)


def test_event_loops_of_several_threads_share_an_engine():
    llm, engine = model(), jspec.AsyncEngine(model())
    got = {}

    async def serve(seeds):
        got.update(zip(seeds, await asyncio.gather(*(ask(engine, seed) for seed in seeds)), strict=True))

    threads = [threading.Thread(target=run, args=(serve(range(start, start + 4)),)) for start in (0, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    run(engine.close())
    assert [got.get(seed) for seed in range(12)] == texts(llm, range(12))


def test_slow_callers_hold_nobody_up():
    """Not even one who blocks his event loop."""
    llm = slow_model()

    async def serve():
        async with jspec.AsyncEngine(llm) as engine:
            slow = engine.generate("abc", LONG)
            first = await anext(slow)
            finished = llm.engine.metrics().num_finished
            while llm.engine.metrics().num_finished == finished:
                time.sleep(0.01)
            return checked([first, *await collect(slow)])

    assert run(serve()).text == jspec.generate(llm, "abc", LONG).text


def no_room_beside(most: int):
    """``require_room`` of an engine that takes so many."""

    def require_room(count: int = 1, tenant: str = ""):
        del tenant
        if count > most:
            raise jspec.QueueFull("no room")

    return require_room


@in_a_loop
async def test_requests_that_are_started_together():
    """All of them wait, or none; each delta comes with the number of its request; lost, they are given up."""
    llm = slow_model()

    async with jspec.AsyncEngine(llm) as engine:
        requests = [llm.engine.request("abc", max_tokens=3, seed=seed) for seed in range(5)]
        group, deltas = engine.start(requests), [[] for _ in requests]
        async for index, delta in group:
            deltas[index].append(delta)
        expected = [jspec.generate(llm, "abc", max_tokens=3, seed=seed).text for seed in range(5)]
        assert [checked(some).text for some in deltas] == expected
        group.close()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine, "require_room", no_room_beside(4))
            engine.start(requests[:4]).close()
            with pytest.raises(jspec.QueueFull):
                engine.start(requests)
            await until(lambda: not llm.engine.handle.arriving and not llm.engine.scheduler.unfinished)
        lost = engine.start([llm.engine.request("abc", LONG) for _ in range(4)])
        await anext(lost)
        del lost
        await until(lambda: llm.engine.metrics().num_running == 0)
    assert engine.closed
    with pytest.raises(RuntimeError, match="the AsyncEngine is closed"):
        engine.start(requests)
    assert_nothing_is_held(llm)
