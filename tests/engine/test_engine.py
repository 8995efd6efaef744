"""The host loop: admission, pages, what is refused, what broken numbers do, and that nothing is compiled twice."""

import dataclasses

import jax
import numpy as np
import pytest
from engines import (
    CONFIG,
    GREEDY,
    MAX_LEN,
    V,
    assert_nothing_is_held,
    decode,
    draft,
    engine,
    plain_greedy,
    poisoned,
    ragged_prompts,
    requests_of,
    target,
    tokens_of,
)

from jspec.drafting.ngram import NGram
from jspec.drafting.plain import NoDrafts
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import BROKEN, FULL, STOPPED, Request
from jspec.engine.round_log import RoundLog
from jspec.sampling.params import MAX_STOP_TOKENS, SamplingParams
from jspec.text.grammar.grammars import available

PROMPTS = ragged_prompts()
KEYS = [np.array([0, i], np.uint32) for i in range(len(PROMPTS))]
SETTINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, max_tokens=3),
    SamplingParams(temperature=0.3, top_k=5, min_tokens=2, stop_token_ids=[1, 2], max_tokens=9),
    SamplingParams(temperature=1.5, top_p=0.7, max_tokens=40),
    SamplingParams(temperature=0.8, min_p=0.2, max_tokens=1),
    SamplingParams(temperature=2.0, top_k=-1, top_p=0.5, min_p=0.5, seed=2**40, max_tokens=12),
]


def test_nothing_is_compiled_after_warmup(xla_compilations):
    scarce = dataclasses.replace(CONFIG, rounds=3, prefill_chunk=7, num_pages=CONFIG.pages_per_row + 3)
    fresh = engine("draft_model", 2, config=scarce)
    assert fresh.num_compilations == 0
    ran = warmed(fresh)
    # Prefill, admit, decode, two that move rows to the host and back, two for options, and four for grammars.
    programs = 7 + 4 * available()
    assert fresh.num_compilations == programs
    assert set(ran) == {program for program in fresh.runner.batch.programs if program.compiled}
    assert str(fresh.runner.progress) == f"all {programs} programs have run"
    of_rounds = fresh.runner.batch.programs.decode, fresh.runner.batch.programs.processing_decode
    logs = [jax.tree.map(np.asarray, ran[program]) for kind in of_rounds for program in kind.values()]
    rounds = map(RoundLog.unpacked, logs)
    assert [log.count.max() for log in rounds] == [1, 1]  # a round each, and not only its loop
    before = len(xla_compilations)
    assert before > 0  # the listener hears

    for settings in SETTINGS:
        decode(fresh, PROMPTS, settings, KEYS)
    decode(fresh, PROMPTS, [SETTINGS[i % len(SETTINGS)] for i in range(len(PROMPTS))], KEYS)
    decode(fresh, PROMPTS[:1], GREEDY, KEYS[:1])
    decode(fresh, [np.array(PROMPTS[2])], GREEDY, KEYS[:1])
    decode(fresh, PROMPTS, GREEDY, KEYS, find_stop=lambda tokens, seen: 5 if len(tokens) >= 5 else None)
    abandoned = fresh.run([Request(0, PROMPTS[0], GREEDY, KEYS[0]), Request(1, PROMPTS[-1], GREEDY, KEYS[1])])
    next(abandoned)
    abandoned.close()
    with pytest.raises(ValueError, match="is empty"):
        decode(fresh, [[]], GREEDY, KEYS[:1])
    fresh.warmup()
    seen = fresh.metrics()
    assert seen.num_preemptions > 0
    assert seen.num_cached_tokens > 0
    assert fresh.num_compilations == programs
    assert len(xla_compilations) == before


def warmed(fresh: Engine) -> dict:
    """Warms an engine up; the results of every program that ran to its end meanwhile."""
    sent, ended, runner = {}, {}, fresh.runner
    send, wait = runner.batch.send, jax.block_until_ready

    def sending(program, *args):
        sent[program] = send(program, *args)
        return sent[program]

    def waiting(arrays):
        wait(arrays)
        assert arrays[1] is runner.batch.state  # on which every program sent has its mark
        ended.update(sent)
        return arrays

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.batch, "send", sending)
        patch.setattr(jax, "block_until_ready", waiting)
        fresh.warmup()
    assert sent.keys() == ended.keys()
    return ended


def test_preemption_after_warmup_traces_nothing(monkeypatch):
    """JAX keeps what it has traced, so memory would grow with every request that is moved."""
    scarce = dataclasses.replace(CONFIG, rounds=3, prefill_chunk=7, num_pages=CONFIG.pages_per_row + 3)
    fresh = engine("draft_model", 2, config=scarce)
    fresh.warmup()
    for name in ("eval_shape", "jit"):
        monkeypatch.setattr(jax, name, lambda *_, **__: pytest.fail("something was traced"))
    decode(fresh, PROMPTS, GREEDY, KEYS)
    assert fresh.metrics().num_preemptions > 0


def order_of(busy: Engine, requests) -> list[str]:
    """When the engine sends a call and when it reads what one did."""
    order, runner = [], busy.runner
    with pytest.MonkeyPatch.context() as patch:
        execute, read = runner.execute, runner.read

        def sent(schedule, K):
            order.extend(["send"] * bool(schedule.decoding))
            return execute(schedule, K)

        patch.setattr(runner, "execute", sent)
        patch.setattr(runner, "read", lambda logs: order.append("read") or read(logs))
        list(busy.run(requests))
    return order


@pytest.mark.parametrize("stops", [None, lambda tokens, seen: None], ids=["", "stop-strings"])
@pytest.mark.parametrize("count", [1, CONFIG.max_batch, len(PROMPTS)])
def test_a_call_is_sent_before_the_last_one_is_read(count, stops):
    """Also while requests wait for rows, and while the host looks for stop strings."""
    busy = engine("ngram", 2, config=dataclasses.replace(CONFIG, rounds=2))
    order = order_of(busy, requests_of(PROMPTS[:count], GREEDY, KEYS[:count], stops))
    assert len(order) > 5
    sent_ahead = [order[:i].count("send") - order[:i].count("read") for i in range(1, len(order))]
    assert max(sent_ahead) == 2
    for i, what in enumerate(order[1:-3], 1):
        assert what == "send" or sent_ahead[i - 1] == 2, "a call was read with nothing for the device to do meanwhile"


def test_every_request_is_yielded_once():
    requests = [Request(i, prompt, GREEDY, KEYS[i]) for i, prompt in enumerate(PROMPTS)]
    finished = [active.request.index for active in engine("ngram", 4, "block").run(requests)]
    assert sorted(finished) == list(range(len(PROMPTS)))
    assert finished[0] != 0  # in the order in which they end, not in which they came


@pytest.mark.parametrize("swap_space", [0.0, 4.0])
def test_requests_finish_with_few_pages(swap_space):
    """A pool that holds one long request, or a few short ones. Without host memory requests wait until pages for their
    whole text are free; with it they are preempted. What is taken is given back."""
    scarce = dataclasses.replace(CONFIG, num_pages=CONFIG.pages_per_row, swap_space=swap_space)
    pool = engine("ngram", 2, config=scarce)
    few = dataclasses.replace(GREEDY, max_tokens=4)
    for _ in range(2):
        assert tokens_of(decode(pool, PROMPTS)) == plain_greedy(target(), PROMPTS)
        assert tokens_of(decode(pool, PROMPTS, few)) == [tokens[:4] for tokens in plain_greedy(target(), PROMPTS)]
    assert (pool.metrics().num_preemptions > 0) == (swap_space > 0)
    assert pool.metrics().pages_used == 0
    assert pool.num_compilations == 3 + 2 * (swap_space > 0)  # without a warm-up, as they are needed


def unstarted(method=None, **changes) -> Engine:
    """An engine that never runs, and so compiles nothing."""
    make = {None: lambda *_: NoDrafts(), "ngram": lambda *_: NGram(4, 1, 4)}[method]
    return Engine(target(), None, Decoding(make, "match"), dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("prompt", "params", "stop_tokens", "changes", "words"),
    [
        ([], GREEDY, (), {}, ["prompt 7 is empty", "at least one token"]),
        ([1] * MAX_LEN, GREEDY, (), {}, ["prompt 7 has 40 tokens", "max_len=40", "39"]),
        ([1], GREEDY, tuple(range(MAX_STOP_TOKENS + 1)), {}, ["prompt 7 has 129 stop tokens", "at most 128"]),
        ([1] * 20, GREEDY, (), {"num_pages": 5}, ["prompt 7 needs 6 pages of 7 tokens", "40", "has 5", "num_pages"]),
    ],
)
def test_requests_that_can_never_be_served_are_refused(prompt, params, stop_tokens, changes, words):
    refusing = unstarted(**changes)
    fine = Request(0, [1], dataclasses.replace(GREEDY, max_tokens=2), KEYS[0])
    with pytest.raises(ValueError, match=".*".join(words)):
        next(refusing.run([fine, Request(7, prompt, params, KEYS[0], stop_tokens)]))
    assert refusing.num_compilations == 0  # not even the fine one was started


def test_pages_for_drafts_are_counted():
    request = Request(0, [1] * 10, SamplingParams(max_tokens=4), KEYS[0])  # 14 slots, two pages; 4 drafts take a third
    unstarted(num_pages=2).check(request)
    with pytest.raises(ValueError, match="needs 3 pages"):
        unstarted("ngram", num_pages=2).check(request)


def test_a_width_below_the_drafts_is_refused():
    with pytest.raises(ValueError, match="width=4: expected at least num_draft_tokens \\+ 1, which is 5"):
        unstarted("ngram", width=4)


def test_a_run_continues_beside_an_open_one():
    busy = engine("ngram", 4, "block")
    run = busy.run(requests_of(PROMPTS, GREEDY, KEYS))
    first = next(run)
    busy.warmup()  # when they have ended, whose results nobody has taken
    assert tokens_of(decode(busy, PROMPTS)) == plain_greedy(target(), PROMPTS)
    rest = sorted([first, *run], key=lambda active: active.request.index)
    assert tokens_of(rest) == plain_greedy(target(), PROMPTS)


def test_a_closed_run_aborts_its_unfinished_requests():
    busy = engine("ngram", 4, "block")
    run = busy.run(requests_of(PROMPTS, GREEDY, KEYS))
    next(run)
    run.close()
    assert_nothing_is_held(busy)
    assert tokens_of(decode(busy, PROMPTS)) == plain_greedy(target(), PROMPTS)


def token_that_some_write(completions) -> int:
    """A token that at least two of the completions contain, after their third place, and at least two do not."""
    for token in range(V):
        late = sum(token in tokens[3:-1] and token not in tokens[:3] for tokens in completions)
        if late >= 2 and sum(token not in tokens for tokens in completions) >= 2:
            return token
    raise AssertionError("no such token; choose other prompts")


def test_broken_target_numbers_end_one_request_only():
    """Whoever has read the poisoned token ends there; neighbours, and those that get its pages, do not notice."""
    whole = plain_greedy(target(), PROMPTS)
    poison = token_that_some_write(whole)
    broken = engine("ngram", 3, "rejection", models=(poisoned(target(), poison), None))
    expected = []
    for prompt, tokens in zip(PROMPTS, whole, strict=True):
        cut = tokens.index(poison) + 1 if poison in tokens[:-1] else len(tokens)
        expected.append([] if poison in prompt else tokens[:cut])
    for _ in range(2):
        ended = decode(broken, PROMPTS)
        assert tokens_of(ended) == expected
        for tokens, active, plain in zip(expected, ended, whole, strict=True):
            assert active.outcome == (FULL if tokens == plain else BROKEN)
    assert {active.outcome for active in ended} == {FULL, BROKEN}


def test_broken_draft_numbers_only_cost_drafts():
    whole = plain_greedy(draft(), PROMPTS)
    poison = token_that_some_write(whole)
    broken = engine("draft_model", 2, "rejection", models=(draft(), poisoned(draft(), poison)))
    ended = decode(broken, PROMPTS)
    assert tokens_of(ended) == whole
    for prompt, active in zip(PROMPTS, ended, strict=True):
        if poison in prompt:
            assert sum(active.drafted) == 0
        elif poison in active.tokens[:-3]:
            assert active.drafted[0] > 0
            assert active.drafted[-1] == 0
        elif len(active.tokens) > 3:
            assert min(active.drafted[:-3]) == 2


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_the_target_as_its_own_draft_accepts_everything(verify):
    same = engine("draft_model", 2, verify, models=(draft(), draft()), draft_sampling="sample")
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(len(PROMPTS))]
    settings = [dataclasses.replace(s, max_tokens=MAX_LEN, min_tokens=0, stop_token_ids=()) for s in settings]
    for prompt, active in zip(PROMPTS, decode(same, PROMPTS, settings), strict=True):
        assert active.accepted == active.drafted
        room = MAX_LEN - len(prompt)
        assert active.accepted == [2] * (room // 3) + [room % 3 - 1] * (room % 3 > 0)


def test_a_stop_string_discards_tokens_of_later_rounds():
    """Rounds after it are in no count; of the round it fell in, the tokens past it are not in the completion."""
    stopping, overshoot = engine("draft_model", 4, "block"), 0
    whole = decode(stopping, PROMPTS[:6])
    for keep in range(1, 10):
        stop = lambda tokens, seen, keep=keep: keep if len(tokens) >= keep else None  # noqa: E731
        for full, cut in zip(whole, decode(stopping, PROMPTS[:6], find_stop=stop), strict=True):
            steps = int(np.argmax(np.cumsum([n + 1 for n in full.accepted]) >= keep)) + 1
            overshoot += sum(full.accepted[:steps]) + steps - keep
            assert cut.outcome == STOPPED
            assert cut.tokens == full.tokens[:keep]
            assert cut.sources == full.sources[:keep]
            assert cut.accepted == full.accepted[:steps]
            assert cut.drafted == full.drafted[:steps]
    assert overshoot > 0
