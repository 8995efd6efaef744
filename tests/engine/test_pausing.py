"""An engine that is paused: which requests end, which stand still, and what callers can do meanwhile."""

import dataclasses
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest
from engines import (
    CONFIG,
    Letters,
    assert_nothing_is_held,
    bigram,
    decode,
    engine,
    ragged_prompts,
    successor_table,
    table_llm,
    tokens_of,
)

import jspec
from jspec.sampling.params import SamplingParams

PROMPTS = ragged_prompts()
PARAMS = SamplingParams(temperature=1.0, max_tokens=30)
DRAFT = bigram(successor_table((2, 3, 7, 11)) / 10)


@pytest.fixture(scope="module")
def llm():
    return table_llm(bigram(successor_table() / 10), DRAFT, Letters()).warmup()


@pytest.fixture
def pool(llm):
    with ThreadPoolExecutor(8) as threads:
        yield threads
        for of in (llm.engine, engine("draft_model")):  # a test that failed leaves nobody waiting
            of.resume()


@pytest.fixture(autouse=True)
def nothing_is_held(request):
    yield
    if "llm" in request.fixturenames:
        assert_nothing_is_held(request.getfixturevalue("llm").engine)


def until(condition, seconds: float = 60.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def paused_within(of, work, mode: str, pool, monkeypatch, steps: int = 3):
    """Have another thread work, and the engine paused after a few steps; returns what comes of the work, and the steps."""
    reached, go_on, made, step = threading.Event(), threading.Event(), [], of.loop.step

    def some_steps(**how):
        step(**how)
        made.append(1)
        if len(made) == steps:
            reached.set()
            assert go_on.wait(60)

    monkeypatch.setattr(of.loop, "step", some_steps)
    running = pool.submit(work)
    assert reached.wait(60)
    pausing = pool.submit(of.pause, mode)
    until(lambda: of.handle._thread.mailbox.commands())
    go_on.set()
    pausing.result(timeout=60)
    monkeypatch.setattr(of.loop, "step", lambda **how: made.append(1) or step(**how))
    return running, made


def work(llm):
    return lambda: decode(llm.engine, PROMPTS, PARAMS)


def kept(llm, pool, monkeypatch):
    """A stream that stands still, begun by another thread."""
    stream = llm.stream("abc", max_tokens=30, temperature=0)
    beginning, _ = paused_within(llm.engine, lambda: next(stream), "keep", pool, monkeypatch, 2)
    assert beginning.result(timeout=60).text
    return stream


def is_device_idle(of) -> bool:
    return all(leaf.is_ready() for leaf in jax.tree.leaves(of.runner.batch.state))


@pytest.mark.parametrize("kind", ["tables", "models"])
def test_requests_that_were_kept_have_the_same_tokens(llm, pool, kind, monkeypatch):
    of = llm.engine if kind == "tables" else engine("draft_model")
    expected = tokens_of(decode(of, PROMPTS, PARAMS))
    for steps in (1, 2, 3, 5):
        running, made = paused_within(of, lambda: decode(of, PROMPTS, PARAMS), "keep", pool, monkeypatch, steps)
        assert of.is_paused
        assert is_device_idle(of)
        before, held = len(made), of.metrics().pages_used
        assert held
        of.pause("keep")
        late = pool.submit(decode, of, PROMPTS[:2], PARAMS)
        time.sleep(0.05)
        assert len(made) == before
        assert of.metrics().pages_used == held
        assert not running.done()
        of.resume()
        assert tokens_of(running.result(timeout=60)) == expected
        assert tokens_of(late.result(timeout=60)) == expected[:2]
        monkeypatch.undo()
    of.resume()
    assert not of.is_paused


def test_requests_under_way_end_first_and_others_wait(llm, pool, monkeypatch):
    expected = tokens_of(decode(llm.engine, PROMPTS, PARAMS))
    running, made = paused_within(llm.engine, work(llm), "wait", pool, monkeypatch, 2)
    scheduler = llm.engine.scheduler
    assert llm.is_paused
    assert not scheduler.under_way
    assert 0 < len(scheduler.waiting) < len(PROMPTS)
    assert is_device_idle(llm.engine)
    before, late = len(made), pool.submit(llm.generate, "abc", max_tokens=4, temperature=0)
    time.sleep(0.05)
    llm.pause()  # twice, and with those that wait
    llm.warmup()
    llm.engine.replace_draft(DRAFT)
    assert len(made) == before
    assert not late.done()
    llm.resume()
    assert tokens_of(running.result(timeout=60)) == expected
    assert late.result(timeout=60).text == "defg"


def test_aborted_requests_have_their_text_so_far(llm, pool, monkeypatch):
    """Those that wait end, too, and those of a list that has no room in the queue."""
    expected = tokens_of(decode(llm.engine, PROMPTS, PARAMS))
    running, _ = paused_within(llm.engine, work(llm), "abort", pool, monkeypatch, 4)
    ended = sorted(running.result(timeout=60), key=lambda active: active.request.index)
    results = [llm.engine.frontend.result(active) for active in ended]
    assert {result.finish_reason for result in results} >= {"abort"}
    texts = [result.token_ids for result in results]
    assert any(texts)
    assert [] in texts  # it had not begun
    assert all(whole[: len(text)] == text for text, whole in zip(texts, expected, strict=True))
    late = pool.submit(decode, llm.engine, PROMPTS, PARAMS)
    time.sleep(0.05)
    assert not late.done()
    llm.resume()
    assert tokens_of(late.result(timeout=60)) == expected


def test_a_stream_that_is_aborted_says_so(llm, pool, monkeypatch):
    stream = kept(llm, pool, monkeypatch)
    llm.pause("abort")
    *_, last = stream
    assert last.result.finish_reason == "abort"
    assert 0 < len(last.result.text) < 30
    llm.resume()


def test_a_caller_can_leave_while_its_request_is_kept(llm, pool, monkeypatch):
    stream = kept(llm, pool, monkeypatch)
    waiting = llm.stream("abc", max_tokens=30)
    for call in (lambda: next(waiting), lambda: jspec.generate(llm, ["a", "b"], max_tokens=4), lambda: next(stream)):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()
    stream.close()
    assert_nothing_is_held(llm.engine)
    assert llm.is_paused
    llm.resume()


def test_an_interrupt_takes_a_pause_back(llm, pool):
    stepping = threading.Event()

    def hold(tokens, seen):
        stepping.set()
        time.sleep(0.1)

    running = pool.submit(decode, llm.engine, PROMPTS[:1], PARAMS, find_stop=hold)
    assert stepping.wait(60)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        llm.pause("wait")
    until(lambda: not llm.is_paused, 10)
    assert len(running.result(timeout=60)) == 1
    assert len(decode(llm.engine, PROMPTS, PARAMS)) == len(PROMPTS)


def test_what_waits_for_requests_is_refused_while_they_are_kept(llm, pool, monkeypatch):
    stream = kept(llm, pool, monkeypatch)
    for call in (llm.warmup, llm.sleep, lambda: llm.engine.replace_draft(DRAFT)):
        with pytest.raises(RuntimeError, match=r"1 requests stand still after pause\(mode='keep'\).*call resume\(\)"):
            call()
    llm.pause("wait")  # the new mode counts
    assert "".join(delta.text for delta in stream)
    llm.warmup()
    llm.resume()


def test_an_unknown_mode(llm):
    with pytest.raises(ValueError, match="mode='stop': expected 'wait', 'abort' or 'keep'"):
        llm.pause("stop")


def test_a_prefix_that_was_forgotten_is_prefilled_again():
    of, prompt = engine(None, config=dataclasses.replace(CONFIG, page_size=8)), [PROMPTS[-1]]
    [first] = decode(of, prompt)
    [cached] = decode(of, prompt)
    assert cached.num_cached_tokens
    run = of.stream(of.request(PROMPTS[-2], max_tokens=20))
    next(run)
    of.pause("keep")  # or it ends, perhaps
    held = of.metrics().pages_used
    assert of.lifecycle.reset_prefix_cache()
    assert of.metrics().pages_used == held
    of.resume()
    [again] = decode(of, prompt)
    assert not again.num_cached_tokens
    assert again.tokens == cached.tokens == first.tokens
    run.close()
    assert_nothing_is_held(of)
