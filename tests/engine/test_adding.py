"""Requests by hand: ``add``, ``step``, ``abort``, what a delta says, and what ends one request alone."""

import dataclasses

import jax
import pytest
from disturbances import by_hand
from engines import (
    ARMED,
    CONFIG,
    EOS,
    GREEDY,
    LETTERS,
    Fragile,
    Letters,
    assert_nothing_is_held,
    bigram,
    decode,
    drafting,
    drained,
    engine,
    plain_greedy,
    poisoned,
    ragged_prompts,
    successor_table,
    table_llm,
    target,
    tokens_of,
)

import jspec
from jspec.config import Speculation
from jspec.llm import LLM
from jspec.outputs import Delta
from jspec.sampling.params import SamplingParams

TABLES = (bigram(successor_table() / 10, (EOS,)), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10, (EOS,)))
PROMPTS = ragged_prompts()


@pytest.fixture(scope="module")
def llm() -> LLM:
    """A model of tables with a tokenizer of letters, whose greedy text goes through the alphabet."""
    return table_llm(*TABLES, Letters()).warmup()


def check(deltas: list[Delta]) -> jspec.Result:
    """What holds for the deltas of every request; returns its result."""
    *before, last = deltas
    assert last.finished
    assert last.result is not None
    assert not any(delta.finished or delta.result for delta in before)
    assert [token for delta in deltas for token in delta.token_ids] == last.result.token_ids
    if last.text is not None:
        assert "".join(delta.text or "" for delta in deltas) == last.result.text
    return last.result


def test_deltas_make_up_the_results_of_generate(llm):
    params = [SamplingParams(temperature=1.0, max_tokens=4 + 3 * i, seed=i) for i in range(6)]
    expected = jspec.generate(llm, ["abc", "b", "xy", "hello", "a", "mn"], params)
    ids = [llm.engine.add(text, one) for text, one in zip(["abc", "b", "xy", "hello", "a", "mn"], params, strict=True)]
    deltas = drained(llm.engine)
    assert [check(deltas[id]) for id in ids] == expected
    assert len(set(ids)) == len(ids)
    assert any(len(deltas[id]) > 1 for id in ids)  # they stream


def test_a_request_may_come_at_any_time():
    busy = engine("draft_model", 2)
    expected, ids, deltas = plain_greedy(target(), PROMPTS), [], {}
    with by_hand(busy) as step:
        for prompt in PROMPTS:
            ids.append(busy.add(prompt, GREEDY))
            for delta in step():
                deltas.setdefault(delta.id, []).append(delta)
    for id, rest in drained(busy).items():
        deltas.setdefault(id, []).extend(rest)
    assert [check(deltas[id]).token_ids for id in ids] == expected


def test_generate_goes_on_beside_them(llm):
    """Each caller gets only its own."""
    id = llm.engine.add("a", max_tokens_of(20))
    before = llm.engine.step()
    assert jspec.generate(llm, "abc", temperature=0, max_tokens=5).text == "defgh"
    deltas = drained(llm.engine)
    assert set(deltas) == {id}
    result = check([*before, *deltas[id]])
    assert "a" + (result.text or "") == LETTERS[:21]


def max_tokens_of(n: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=n)


def test_streamed_text_is_never_taken_back(llm):
    """Letters that may begin a stop string are held back until they do not."""
    llm.engine.add("a", SamplingParams(temperature=0, max_tokens=22, stop=["hijx", "pq"]))
    (deltas,) = drained(llm.engine).values()
    result = check(deltas)
    assert (result.text, result.stop_reason, result.finish_reason) == ("bcdefghijklmno", "pq", "stop")


def test_stream(llm):
    deltas = list(jspec.stream(llm, "abc", temperature=0, max_tokens=9))
    assert check(deltas).text == "defghijkl"
    abandoned = jspec.stream(llm, "abc", temperature=0, max_tokens=20)
    next(abandoned)
    abandoned.close()
    assert_nothing_is_held(llm.engine)
    with pytest.raises(ValueError, match=r"llm='folder': expected a model that jspec.load\(\) returned"):
        jspec.stream("folder", "a")


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_wherever_the_request_is(llm, steps):
    """Waiting, being read or decoding; what others have asked is unchanged."""
    expected = jspec.generate(llm, ["a"] * 5, max_tokens_of(20))
    with by_hand(llm.engine) as step:
        ids = [llm.engine.add("a", max_tokens_of(20)) for _ in range(5)]
        early = [delta for _ in range(steps) for delta in step()]
        for id in (ids[0], ids[4]):
            llm.engine.abort(id)
            llm.engine.abort(id)  # nothing more happens
    late = drained(llm.engine)
    deltas = {id: [*(delta for delta in early if delta.id == id), *late[id]] for id in ids}
    results = [check(deltas[id]) for id in ids]
    assert [result.finish_reason for result in results] == ["abort", "length", "length", "length", "abort"]
    assert [results[i].text for i in (1, 2, 3)] == [expected[i].text for i in (1, 2, 3)]
    llm.engine.abort(ids[1])  # it has ended
    llm.engine.abort(10**6)  # there is none
    assert not llm.engine.unfinished


def test_lower_priorities_go_first(llm):
    with by_hand(llm.engine):
        ids = [llm.engine.add("a", max_tokens_of(6), priority=priority) for priority in (0, 0, 5, 5, -1, 5, 0)]
    ended = [delta.id for _ in range(100) for delta in llm.engine.step() if delta.finished]
    assert ended == [ids[i] for i in (4, 0, 1, 6, 2, 3, 5)]


def test_only_so_many_may_wait():
    few = dataclasses.replace(CONFIG, max_waiting=2)
    settings = Speculation(4)
    llm = LLM(*TABLES, drafting("draft_model", settings), "draft_model", Letters(), settings, few)
    with by_hand(llm.engine) as step:
        for _ in range(few.max_batch + 2):
            llm.engine.add("a", max_tokens_of(4))
        with pytest.raises(jspec.QueueFull, match="max_waiting=2 requests wait already"):
            llm.engine.add("a", max_tokens_of(4))
        early = step()
        assert not any(delta.finished for delta in early)
        with pytest.raises(jspec.QueueFull, match="max_waiting=2 requests wait already"):
            llm.engine.add("a", max_tokens_of(4))
    assert len(drained(llm.engine)) == few.max_batch + 2
    assert len(jspec.generate(llm, ["a"] * 20, max_tokens_of(4))) == 20  # a list waits outside


def test_keys_and_seeds(llm):
    def text(**how) -> str | None:
        asked = SamplingParams(temperature=9.0, max_tokens=12, ignore_eos=True, seed=how.pop("seed", None))
        id = llm.engine.add("q", asked, **how)
        return check(drained(llm.engine)[id]).text

    assert text(seed=5) == text(seed=5) != text(seed=6)
    assert text(key=jax.random.key(5)) == text(key=jax.random.key(5)) != text(key=jax.random.key(6))
    assert text() != text()


def test_numbers_that_are_not_finite_end_one_request():
    broken = engine("ngram", 3, "rejection", models=(poisoned(target(), 7), None))
    fine, ill = broken.add([1, 2, 3], GREEDY), broken.add([1, 7, 3], GREEDY)
    deltas = drained(broken)
    result = check(deltas[ill])
    assert (result.finish_reason, result.token_ids) == ("error", [])
    assert result.stop_reason == "the target's logits at position 3 are not finite"
    assert len(check(deltas[fine]).token_ids) > 0


class Moody(Letters):
    """A tokenizer that fails at the letter t."""

    def decode(self, token_ids, *, skip_special_tokens):
        if 19 in token_ids:
            raise ArithmeticError("no t today")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("stop", [[], ["!"]], ids=["as-it-streams", "in-the-search-for-stop-strings"])
def test_a_tokenizer_that_raises_ends_one_request(stop):
    llm = table_llm(*TABLES, Moody())
    ids = [llm.engine.add(text, SamplingParams(temperature=0, max_tokens=9, stop=stop)) for text in ("a", "p", "b")]
    deltas = drained(llm.engine)
    results = [check(deltas[id]) for id in ids]
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert results[1].stop_reason == "ArithmeticError: no t today"
    assert jspec.generate(llm, "a", temperature=0, max_tokens=3).text == "bcd"


def test_an_error_of_the_device_fails_what_is_under_way_and_no_more(monkeypatch):
    """Those that wait are served when it works again."""
    llm = table_llm(Fragile(TABLES[0].table, TABLES[0].config), None, Letters())
    expected = jspec.generate(llm, "a", max_tokens_of(9))
    with monkeypatch.context() as patch, by_hand(llm.engine) as step:
        ids = [llm.engine.add("a", max_tokens_of(9)) for _ in range(5)]
        patch.setitem(ARMED, "when it runs", True)
        lost: list[Delta] = []
        while not lost:
            lost = step()
    assert [delta.id for delta in lost] == ids[:3]
    assert all(delta.result and delta.result.finish_reason == "error" for delta in lost)
    assert all("a broken device" in str(delta.result and delta.result.stop_reason) for delta in lost)
    deltas = drained(llm.engine)
    assert [check(deltas[id]) for id in ids[3:]] == [expected] * 2


def test_metrics(llm):
    before = llm.engine.metrics()
    with by_hand(llm.engine) as step:
        for _ in range(5):
            llm.engine.add("abcdefghijklmnop", max_tokens_of(10))
        step()
        assert (llm.engine.metrics().num_waiting, llm.engine.metrics().num_running) == (2, 3)
        assert llm.engine.metrics().pages_used > 0
    drained(llm.engine)
    after = llm.engine.metrics()
    assert after.num_finished - before.num_finished == 5
    assert after.num_generation_tokens - before.num_generation_tokens == 50
    assert (after.num_running, after.num_waiting, after.pages_used) == (0, 0, 0)
    read = after.num_prefill_tokens + after.num_cached_tokens - before.num_prefill_tokens - before.num_cached_tokens
    assert read == 5 * 15
    assert after.num_draft_tokens >= after.num_accepted_tokens == sum(after.num_accepted_tokens_per_position)
    first, between = after.first_token_seconds, after.between_tokens_seconds
    assert 5 <= first.count <= after.queue_seconds.count <= after.num_finished  # some were given up before
    assert between.count > 0
    assert set(after.as_dict()) == {field.name for field in dataclasses.fields(after)}
    assert after.as_dict()["queue_seconds"]["counts"] == after.queue_seconds.counts


def test_others_are_not_disturbed_by_a_tenant_with_a_salt():
    hits = engine("draft_model", 2, config=dataclasses.replace(CONFIG, page_size=4, prefill_chunk=4))
    prompt = PROMPTS[-2]
    (first,) = decode(hits, [prompt])
    (again,) = decode(hits, [prompt])
    (salted,) = decode(hits, [prompt], salt="tenant")
    assert (first.num_cached_tokens, again.num_cached_tokens, salted.num_cached_tokens) == (0, 20, 0)
    assert tokens_of([first]) == tokens_of([again]) == tokens_of([salted]) == plain_greedy(target(), [prompt])
