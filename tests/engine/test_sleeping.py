"""A model that sleeps, or is closed: what stays on the device, what comes back, and what callers are told."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from engines import (
    CONFIG,
    DRAFT,
    TARGET,
    Letters,
    bigram,
    decode,
    drafting,
    ragged_prompts,
    successor_table,
    table_llm,
)
from flax import nnx

import jspec
from jspec.config import Shards, Speculation
from jspec.config.sharding import AXIS
from jspec.engine.runner.device_batch import DeviceBatch
from jspec.llm import LLM
from jspec.models import Decoder, flat_params
from jspec.models.sharding import build_shards, mesh_of

PROMPTS = ragged_prompts()[:5]
PARAMS = jspec.SamplingParams(temperature=1.0, max_tokens=12, seed=3)


def made(shards: int = 1) -> LLM:
    """A model whose arrays nobody else has, whose draft's embedding is the target's."""
    target, draft = Decoder(TARGET, rngs=nnx.Rngs(0)), Decoder(DRAFT, rngs=nnx.Rngs(1))
    if shards > 1:
        params = {name: np.asarray(leaf) for name, leaf in flat_params(target).items()}
        target = build_shards(TARGET, params, "float32", Shards(shards), mesh_of(shards, AXIS))
        params = {name: np.asarray(leaf) for name, leaf in flat_params(draft).items()}
        draft = build_shards(DRAFT, params, "float32", Shards(shards), mesh_of(shards, AXIS))
    else:
        draft.embedding = target.embedding  # as ``jspec.load`` lends it
    settings = Speculation(num_draft_tokens=3)
    return LLM(target, draft, drafting("draft_model", settings), "draft_model", Letters(), settings, CONFIG)


def texts(llm) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


def on_device() -> int:
    """Bytes of all arrays of this process on devices; those that arrays of several devices share count once. Between two
    calls those of earlier tests may become fewer, whose threads end."""
    gc.collect()
    shards = [shard.data for leaf in jax.live_arrays() for shard in leaf.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def bits_of(llm) -> list[tuple]:
    return [(np.asarray(leaf).tobytes(), leaf.sharding) for leaf in jax.tree.leaves(llm.engine.runner.batch.leaves)]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_model_that_sleeps_has_nothing_on_the_device(shards):
    before = on_device()
    llm = made(shards)
    expected, awake = texts(llm), on_device()
    weights = bits_of(llm)
    logits, compiled = np.array(llm.logits([1, 2, 3])), llm.engine.num_compilations
    assert awake > before + sum(len(bits) for bits, _ in weights)
    llm.sleep()
    assert llm.is_sleeping
    assert on_device() <= before
    assert np.asarray(jax.tree.leaves(nnx.state(llm.target))[0]).any()  # the copy
    llm.sleep(level=1)
    for _ in range(2):
        llm.wake_up()
        assert not llm.is_sleeping
    assert on_device() == pytest.approx(awake, rel=0.01)
    assert bits_of(llm) == weights
    assert {id(leaf) for leaf in jax.tree.leaves(nnx.state(llm.target))} == set(
        map(id, llm.engine.runner.batch.leaves[0])
    )
    assert llm.engine.metrics().pages_cached == 0
    assert texts(llm) == expected
    assert np.array_equal(llm.logits([1, 2, 3]), logits)
    assert llm.engine.num_compilations == compiled
    llm.close()
    assert on_device() <= before


@pytest.fixture(scope="module")
def shared():
    return table_llm(bigram(successor_table() / 10), bigram(successor_table((2, 3)) / 10), Letters()).warmup()


@pytest.fixture
def llm(shared, monkeypatch, pool):
    """A model that is awake, before and after a test."""
    yield shared
    monkeypatch.undo()
    shared.wake_up()
    shared.resume()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def calls_of(llm) -> dict:
    """Everything that needs the device."""
    return {
        "generate": lambda: llm.generate("abc", max_tokens=2),
        "stream": lambda: next(llm.stream("abc", max_tokens=2)),
        "add": lambda: llm.engine.add("abc", max_tokens=2),
        "logits": lambda: llm.logits([1]),
        "score": lambda: llm.score("abc", "de"),
        "warmup": llm.warmup,
        "replace_draft": lambda: llm.engine.replace_draft(None),
        "pause": llm.pause,
        "resume": llm.resume,
        "reset_prefix_cache": llm.reset_prefix_cache,
    }


def test_calls_are_refused_while_the_model_sleeps(llm):
    llm.sleep()
    try:
        for call in calls_of(llm).values():
            with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\)"):
                call()
        with pytest.raises(RuntimeError, match="asleep"):  # one that came to the thread before
            llm.engine.handle._thread.call(llm.engine.loop.warmup, idle=True)
    finally:
        llm.wake_up()
    assert llm.generate("abc", max_tokens=4, temperature=0).text == "defg"
    assert not llm.is_paused


def test_sleep_waits_for_requests_under_way_and_others_wait(llm, pool, monkeypatch):
    expected, step, slow = texts(llm), llm.engine.loop.step, threading.Event()

    def slowly(**how):
        slow.set()
        time.sleep(0.05)
        step(**how)

    monkeypatch.setattr(llm.engine.loop, "step", slowly)
    running = pool.submit(texts, llm)
    assert slow.wait(60)
    llm.sleep()
    scheduler = llm.engine.scheduler
    assert not scheduler.under_way
    assert scheduler.waiting
    assert not running.done()
    llm.wake_up()
    assert running.result(timeout=60) == expected


def test_a_pause_outlasts_sleep(llm, pool):
    llm.pause()
    llm.sleep()
    llm.wake_up()
    assert llm.is_paused
    waiting = pool.submit(texts, llm)
    time.sleep(0.05)
    assert not waiting.done()
    llm.resume()
    assert waiting.result(timeout=60) == texts(llm)


@pytest.mark.parametrize(
    ("level", "message"), [(3, "level=3: expected 1 or 2"), (0, "level=0: expected 1"), (True, "1")]
)
def test_other_levels_are_refused(llm, level, message):
    with pytest.raises(ValueError, match=message):
        llm.sleep(level)
    assert not llm.is_sleeping


def test_a_device_without_room_leaves_the_model_asleep(llm, monkeypatch):
    expected = texts(llm)
    llm.sleep()
    before = on_device()

    def full(batch):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(DeviceBatch, "reset_state", full)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        llm.wake_up()
    assert "call wake_up() again" in caught.value.__notes__[0]
    del caught
    assert llm.is_sleeping
    assert on_device() <= before
    monkeypatch.undo()
    llm.wake_up()
    assert texts(llm) == expected


def test_a_trainers_own_arrays_stay(llm):
    """Those of a draft that it has handed over, for example."""
    trained = bigram(successor_table((4, 5)) / 10)
    llm.engine.replace_draft(trained)
    expected = texts(llm)
    llm.sleep()
    assert float(trained.table.sum()) == pytest.approx(29 * 4)
    llm.wake_up()
    assert texts(llm) == expected


def test_closing_ends_everything(pool, monkeypatch):
    before = on_device()
    with made() as llm:
        texts(llm)
        step, slow = llm.engine.loop.step, threading.Event()

        def slowly(**how):
            step(**how)
            slow.set()
            time.sleep(0.05)

        monkeypatch.setattr(llm.engine.loop, "step", slowly)
        running = pool.submit(llm.generate, PROMPTS, max_tokens=30, temperature=0)
        assert slow.wait(60)
    thread = llm.engine.handle._thread
    assert thread.ended
    assert not thread._thread.is_alive()
    assert "abort" in {result.finish_reason for result in running.result(timeout=60)}
    llm.close()
    assert on_device() <= before
    calls = calls_of(llm) | {"sleep": llm.sleep, "wake_up": llm.wake_up}
    for call in calls.values():
        with pytest.raises(RuntimeError, match=r"the model is closed.*jspec\.load"):
            call()
    assert llm.engine.num_compilations == 0  # executables have memory, too
    assert "LlamaForCausalLM" in repr(llm)
    assert not llm.is_sleeping
    llm.engine.metrics()


@pytest.mark.parametrize("how", ["unused", "asleep", "paused"])
def test_closing_in_any_state(how):
    llm = table_llm(bigram(successor_table()), tokenizer=Letters())
    if how == "asleep":
        llm.sleep()
    if how == "paused":
        llm.pause("keep")
    llm.close()
    with pytest.raises(RuntimeError, match="the model is closed"):
        llm.generate("abc")


def test_callers_that_wait_are_told_of_the_end(pool):
    llm = table_llm(bigram(successor_table()), tokenizer=Letters())
    llm.pause()
    waiting = [pool.submit(llm.generate, "abc", max_tokens=5), pool.submit(lambda: list(llm.stream("abc")))]
    while len(llm.engine.handle._core._subscribers) < 2:
        time.sleep(0.01)
    llm.close()
    assert waiting[0].result(timeout=60).finish_reason == "abort"
    assert waiting[1].result(timeout=60)[-1].result.finish_reason == "abort"


def test_a_callback_cannot_close_its_engine(llm):
    def close(tokens, seen):
        llm.close()

    with pytest.raises(RuntimeError, match="a callback cannot use the engine"):
        decode(llm.engine, PROMPTS, find_stop=close)
    assert llm.generate("abc", max_tokens=4, temperature=0).text == "defg"
