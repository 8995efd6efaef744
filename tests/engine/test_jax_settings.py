"""JAX's settings of one thread are those of the engine's thread, or the caller is refused."""

import asyncio

import jax
import pytest
from engines import bigram, shared, successor_table, table_llm

import jspec
from jspec.engine.jax_settings import NAMES, View, of_this_thread_alone, view

OTHERS = {
    "default_device": lambda: jax.devices()[1],
    "default_matmul_precision": lambda: "float32",
    "numpy_rank_promotion": lambda: "warn",
    "numpy_dtype_promotion": lambda: "strict",
} | {name: lambda: "log" for name in NAMES if name.startswith("transfer_guard")}


def other(name: str):
    """A value that the setting does not have in tests."""
    return OTHERS[name]() if name in OTHERS else not getattr(jax.config, f"jax_{name}")


@shared
def model() -> jspec.LLM:
    return table_llm(bigram(successor_table() / 10))


def of_thread(llm: jspec.LLM) -> View:
    return llm.engine.handle.running().call(view)


@pytest.mark.parametrize("name", NAMES)
def test_a_caller_with_another_setting_is_refused(name):
    llm, value = model(), other(name)
    words = rf"jax_{name}=.* in this thread: the engine's thread has .*jax.config.update\(\"jax_{name}\""
    with getattr(jax, name)(value), pytest.raises(ValueError, match=words):
        jspec.generate(llm, [1])
    assert jspec.generate(llm, [1], max_tokens=3, temperature=0).token_ids == [2, 3, 4]


def test_every_way_to_ask_refuses():
    llm = model()

    async def ask():
        async with jspec.AsyncEngine(llm) as engine:
            await anext(engine.generate([1]))

    with jax.default_matmul_precision("float32"):
        for call in (llm.warmup, lambda: llm.engine.add([1]), lambda: next(jspec.stream(llm, [1]))):
            with pytest.raises(ValueError, match="jax_default_matmul_precision='float32' in this thread"):
                call()
        with pytest.raises(ValueError, match="jax_default_matmul_precision='float32' in this thread"):
            asyncio.run(ask())
    assert not llm.engine.unfinished


def test_the_settings_of_the_thread_that_loads_are_taken_along():
    with jax.default_matmul_precision("float32"), jax.numpy_dtype_promotion("standard"), jax.debug_infs(True):
        llm = table_llm(bigram(successor_table() / 10))
        loaded = view()
        assert of_this_thread_alone() == {"default_matmul_precision": "float32", "debug_infs": True}
        assert jspec.generate(llm, [1], max_tokens=3, temperature=0).token_ids == [2, 3, 4]
        assert of_thread(llm) == loaded
    with pytest.raises(ValueError, match="jax_default_matmul_precision=None in this thread"):
        jspec.generate(llm, [1])


def test_a_setting_that_changes_for_all_threads_does_so_here(monkeypatch):
    llm = model()
    before = of_thread(llm)
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        assert jspec.generate(llm, [1], max_tokens=3, temperature=0).token_ids == [2, 3, 4]
        assert of_thread(llm) == view() != before
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert of_thread(llm) == before
