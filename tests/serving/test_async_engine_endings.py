"""Event loops, processes, devices and threads that end or fail while requests of ``AsyncEngine`` are under way."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from async_callers import LONG, TABLES, ask, checked, collect, params_of, prompt_of, run, slow_model, texts, until
from engines import ARMED, Fragile, Letters, table_llm
from openai_server import assert_nothing_is_held

import jspec


def test_an_event_loop_that_is_closed_before_its_requests_end():
    llm = slow_model()
    engine, loop = jspec.AsyncEngine(llm), asyncio.new_event_loop()
    generator = engine.generate("abc", LONG)
    loop.run_until_complete(asyncio.wait_for(anext(generator), 60))
    loop.close()

    async def another():
        await until(lambda: llm.engine.metrics().num_running == 0)
        assert await ask(engine, 1) == texts(llm, [1])[0]
        await engine.close()

    run(another())
    del generator
    gc.collect()
    assert_nothing_is_held(llm)


def test_asyncio_run_that_ends_before_its_requests():
    llm = slow_model()
    engine = jspec.AsyncEngine(llm)

    async def forget():
        generator = engine.generate("abc", LONG)
        await anext(generator)
        forgotten.append(generator)
        tasks.append(asyncio.ensure_future(collect(engine.generate("abc", LONG))))
        await until(lambda: llm.engine.metrics().num_running == 2)

    forgotten, tasks = [], []
    run(forget())

    async def another():
        await until(lambda: llm.engine.metrics().num_running == 0)
        await engine.close()

    run(another())
    assert_nothing_is_held(llm)


ABRUPT = """
import asyncio, jspec
from async_callers import LONG, slow_model

generator = jspec.AsyncEngine(slow_model()).generate("abc", LONG)
asyncio.new_event_loop().run_until_complete(anext(generator))
print("exits")
"""


def test_a_process_that_ends_before_its_requests():
    """A daemon thread inside of XLA would abort it."""
    folders = [Path(jspec.__file__).parents[1], Path(__file__).parents[1] / "helpers", Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run([sys.executable, "-c", ABRUPT], env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "exits\n"), ended.stderr


def test_an_error_of_the_device_ends_each_request(monkeypatch):
    llm = table_llm(Fragile(TABLES[0].table, TABLES[0].config), None, Letters())
    expected = texts(llm, range(6))

    async def serve():
        async with jspec.AsyncEngine(llm) as engine:
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setitem(ARMED, "when it runs", True)
                    generators = [engine.generate(prompt_of(seed), params_of(seed)) for seed in range(6)]
                    results = [checked(deltas) for deltas in await asyncio.gather(*map(collect, generators))]
                assert [result.finish_reason for result in results] == ["error"] * 6
                assert all("a broken device" in result.stop_reason for result in results)
                assert await asyncio.gather(*(ask(engine, seed) for seed in range(6))) == expected

    run(serve())
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("name", ["step", "submit", "abort"])
@pytest.mark.parametrize("error", [ZeroDivisionError("unexpected"), SystemExit("unexpected")])
def test_an_exception_in_the_thread_reaches_every_caller(name, error, monkeypatch):
    llm = slow_model()

    def fail(*_, **__):
        raise error

    async def serve():
        async with jspec.AsyncEngine(llm) as engine:
            leaving = engine.generate("abc", LONG)
            await anext(leaving)
            tasks = [asyncio.ensure_future(collect(engine.generate("abc", LONG))) for _ in range(4)]
            # All five: one that comes after the failure is served by the next thread, and ends well.
            await until(lambda: llm.engine.metrics().num_running == 3 and llm.engine.metrics().num_waiting == 2)
            with monkeypatch.context() as patch:
                patch.setattr(llm.engine.loop, name, fail)
                if name == "abort":
                    await leaving.aclose()
                else:
                    tasks.append(asyncio.ensure_future(collect(engine.generate("abc", LONG))))
                results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(result) for result in results] == [RuntimeError] * len(tasks)
            assert all(result.__cause__ is error for result in results)
            assert engine.error is error
            assert await ask(engine, 3) == texts(llm, [3])[0]
            assert engine.error is None
            assert_nothing_is_held(llm)
            await leaving.aclose()

    run(serve())
    assert_nothing_is_held(llm)


def test_a_delta_that_cannot_be_made_is_the_trouble_of_one_caller(monkeypatch):
    llm = slow_model()
    delta, unlucky = llm.engine.frontend.delta, []

    def fail(progress):
        if progress.active.order in unlucky:
            raise UnicodeError("no text")
        return delta(progress)

    monkeypatch.setattr(llm.engine.frontend, "delta", fail)

    async def serve():
        async with jspec.AsyncEngine(llm) as engine:
            other, broken = engine.generate("abc", max_tokens=200, seed=1), engine.generate("abc", LONG)
            first = await anext(other)
            unlucky.append((await anext(broken)).id)
            with pytest.raises(RuntimeError, match="UnicodeError") as raised:
                await collect(broken)
            assert isinstance(raised.value.__cause__, UnicodeError)
            await until(lambda: llm.engine.metrics().num_running == 1)
            return checked([first, *await collect(other)]).text

    assert run(serve()) == jspec.generate(llm, "abc", max_tokens=200, seed=1).text
    assert_nothing_is_held(llm)
