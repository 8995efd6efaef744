"""Requests whose tokens a constraint restricts, in an engine: their texts, and those of their neighbours, whatever happens.

The constraints are automata over the tokens; ``tests/text/grammar/test_grammars.py`` has those of llguidance.
"""

import dataclasses
import functools
from typing import Any

import pytest
from disturbances import attribute, serve
from engines import (
    CONFIG,
    LETTERS,
    MAX_LEN,
    Letters,
    V,
    assert_nothing_is_held,
    bigram,
    engine,
    key_of,
    ragged_prompts,
    shared,
    successor_table,
    table_llm,
)
from greedy_options import greedy_by_definition
from lossless.distributions import Grammar
from lossless.served import Automaton

import jspec
from jspec.engine.engine import Engine
from jspec.engine.request import ABORTED, BROKEN, FAILED, FULL, STOPPED, ActiveRequest, Request
from jspec.sampling.params import SamplingParams

PROMPTS = ragged_prompts((3, 9, 5, 12))
# Two of three tokens may come, and which ones depends on all tokens before. The jump-forward token of state 2 is a guess.
GRAMMAR = Grammar(tuple(tuple((v + s) % 3 if (v + s) % 3 else -1 for v in range(V)) for s in range(3)), (-1, -1, 5))

TABLES = (bigram(successor_table() / 4), bigram(successor_table() / 5))


def asked(serving: Engine, index: int, prompt=None, constraint=None, seed=None, **options) -> Request:
    """A request for the prompt, or for one of ``PROMPTS``, greedy unless it has a seed."""
    params = SamplingParams(**{"temperature": 0.0 if seed is None else 0.9, "max_tokens": 10, **options})
    prompt = PROMPTS[index] if prompt is None else prompt
    request = serving.frontend.request(index, prompt, params, key_of(seed or index))
    return dataclasses.replace(request, constraint=constraint)


def mixed(serving: Engine, constrained=(1, 3), **options) -> list[Request]:
    """A request for each prompt; those of the indices are constrained."""
    return [
        asked(serving, i, constraint=Automaton(GRAMMAR) if i in constrained else None, **options)
        for i in range(len(PROMPTS))
    ]


def tokens_of(actives: list[ActiveRequest]) -> list[list[int]]:
    return [active.tokens for active in actives]


@functools.cache
def alone(seed: int | None = None) -> list[list[int]]:
    """The texts of ``mixed`` where each request has the engine to itself."""
    serving = engine("draft_model")
    return [serve(serving, [request])[0].tokens for request in mixed(serving, seed=seed)]


class TestTexts:
    @pytest.mark.parametrize(("method", "K"), [("draft_model", 4), ("draft_model", 1), ("ngram", 3), (None, 0)])
    def test_greedy_texts_equal_the_definition(self, method, K):
        serving, schedules = engine(method, K or 4), []
        schedule = serving.scheduler.schedule

        def noted(mix_free_with_constrained):
            schedules.append(schedule(mix_free_with_constrained))
            return schedules[-1]

        with attribute(serving.scheduler, "schedule", noted):
            found = serve(serving, mixed(serving, constrained=range(4)))
        assert tokens_of(found) == [greedy_by_definition(prompt, {"grammar": GRAMMAR}, 10) for prompt in PROMPTS]
        # Once they have begun, each step verifies drafts and makes the next ones.
        assert any(schedule.verifying == schedule.drafting for schedule in schedules if schedule.verifying)
        assert not any(schedule.decoding for schedule in schedules)
        assert_nothing_is_held(serving)

    @pytest.mark.parametrize("seed", [None, 3])
    def test_constrained_neighbours_do_not_change_texts(self, seed):
        serving = engine("draft_model")
        assert tokens_of(serve(serving, mixed(serving, seed=seed))) == alone(seed)
        free = tokens_of(serve(serving, mixed(serving, constrained=(), seed=seed)))
        assert [free[i] for i in (0, 2)] == [alone(seed)[i] for i in (0, 2)]
        assert [free[i] for i in (1, 3)] != [alone(seed)[i] for i in (1, 3)]

    def test_constraint_beside_penalties_and_biases(self):
        serving = engine("draft_model")
        options: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 1.2, "logit_bias": {3: 2.0}}
        found = serve(serving, mixed(serving, constrained=range(4), **options))
        expected = [greedy_by_definition(prompt, {"grammar": GRAMMAR, **options}, 10) for prompt in PROMPTS]
        assert tokens_of(found) == expected
        assert expected != [greedy_by_definition(prompt, {"grammar": GRAMMAR}, 10) for prompt in PROMPTS]

    def test_constraint_with_max_tokens_and_a_full_cache(self):
        serving = engine("draft_model")
        long = ragged_prompts((MAX_LEN - 6,))[0]
        lengths = [asked(serving, 0, long, Automaton(GRAMMAR), max_tokens=n) for n in (1, 2, 5, 6, None)]
        for request, count in zip(lengths, (1, 2, 5, 6, 6), strict=True):
            (active,) = serve(serving, [request])
            assert active.tokens == greedy_by_definition(long, {"grammar": GRAMMAR}, count)
            assert active.outcome == FULL
        assert_nothing_is_held(serving)

    def test_a_request_without_allowed_tokens_ends_alone(self):
        dead_end = Grammar((*GRAMMAR.following[:1], (-1,) * V, *GRAMMAR.following[2:]), GRAMMAR.jump_forward)
        serving = engine("draft_model")
        requests = mixed(serving)
        params = dataclasses.replace(requests[1].params, structured_outputs=jspec.StructuredOutputsParams(choice=["a"]))
        requests[1] = dataclasses.replace(requests[1], params=params, constraint=Automaton(dead_end))
        found = serve(serving, requests)
        assert found[1].outcome == BROKEN
        reason = serving.frontend.result(found[1]).stop_reason
        assert reason.startswith("NoTokenAllowed: structured_outputs=")
        assert "where structured_outputs allows no token" in reason
        assert [found[i].tokens for i in (0, 2, 3)] == [alone()[i] for i in (0, 2, 3)]


@shared
def letters() -> jspec.LLM:
    """a is followed by b, b by c, and so on, or less likely by the letter after that."""
    likely = successor_table() + successor_table(range(V)) / 2
    return table_llm(bigram(likely), bigram(likely / 2), Letters())


def without(letter: str) -> Grammar:
    """Every letter but one."""
    return Grammar((tuple(-1 if v == LETTERS.index(letter) or v >= 26 else 0 for v in range(V)),), (-1,))


def spelled(word: str, ending: bool) -> Automaton:
    """A word and nothing else. It says itself where it ends if ``ending``, or else lets any token come then."""

    class Word(Automaton):
        def add(self, tokens):
            super().add(tokens)
            return len(word) if ending and len(self._completion) >= len(word) else None

    ids = [LETTERS.index(letter) for letter in word]
    last = tuple(len(word) for _ in range(V))
    states = [tuple(i + 1 if v == token else -1 for v in range(V)) for i, token in enumerate(ids)]
    return Word(Grammar((*states, last), (*ids, -1)))


class TestDrafts:
    def test_drafts_that_the_grammar_rejects_count_as_drafted(self):
        """The drafter proposes bcde behind a, ghij behind f, and so on; e may not come."""
        serving = letters().engine
        before = serving.metrics()
        (active,) = serve(serving, [asked(serving, 0, "a", Automaton(without("e")), max_tokens=9)])
        assert "".join(LETTERS[token] for token in active.tokens) == "bcdfghijk"
        assert (active.drafted, active.accepted) == ([4, 4], [3, 4])
        assert active.sources[:4] == ["draft", "draft", "draft", "correction"]
        after = serving.metrics()
        assert after.num_draft_tokens - before.num_draft_tokens == 8
        assert after.num_accepted_tokens - before.num_accepted_tokens == 7

    def test_jump_forward_tokens_replace_drafts(self):
        """Which would never have proposed them."""
        serving = letters().engine
        (active,) = serve(serving, [asked(serving, 0, "a", spelled("zqzxqzz", ending=True), max_tokens=20)])
        assert "".join(LETTERS[token] for token in active.tokens) == "zqzxqzz"
        assert active.outcome == STOPPED
        assert active.accepted[0] == 4

    def test_wrong_jump_forward_tokens_change_no_text(self):
        class Guessing(Automaton):
            def jump_forward(self, most):
                return [LETTERS.index("w")] * most

        serving = letters().engine
        (active,) = serve(serving, [asked(serving, 0, "a", Guessing(without("e")), max_tokens=9)])
        assert "".join(LETTERS[token] for token in active.tokens) == "bcdfghijk"
        assert sum(active.accepted) == 0


class TestBesideOtherOptions:
    @pytest.mark.parametrize("neighbour", [False, True])
    def test_constraint_with_stop_strings(self, neighbour):
        serving = letters().engine
        requests = [asked(serving, 0, "a", Automaton(without("e")), stop=("fg",))]
        requests += [asked(serving, 1, "a", stop=("fg",))] * neighbour
        found = [serving.frontend.result(active) for active in serve(serving, requests)]
        assert [(one.text, one.stop_reason) for one in found] == [("bcd", "fg"), ("bcde", "fg")][: len(found)]

    def test_logprobs_are_those_of_the_targets_own_distribution(self):
        serving = letters().engine
        (active,) = serve(serving, [asked(serving, 0, "a", Automaton(without("e")), logprobs=1, max_tokens=5)])
        found = serving.frontend.result(active)
        assert found.text == "bcdfg"
        ranks = [place[token].rank for token, place in zip(found.token_ids, found.logprobs, strict=True)]
        assert ranks == [1, 1, 1, 2, 1]
        assert found.logprobs[3][LETTERS.index("e")].rank == 1

    @pytest.mark.parametrize("included", [False, True])
    def test_a_stop_token_ends_a_constrained_request(self, included):
        serving = letters().engine
        stop = {"stop_token_ids": (LETTERS.index("g"),), "include_stop_str_in_output": included}
        (active,) = serve(serving, [asked(serving, 0, "a", Automaton(without("e")), **stop)])
        assert active.outcome == STOPPED
        assert serving.frontend.result(active).text == ("bcdfg" if included else "bcdf")

    def test_tokens_behind_the_end_of_the_constraint_are_dropped(self):
        serving = letters().engine
        (active,) = serve(serving, [asked(serving, 0, "a", spelled("bc", ending=True), logprobs=0)])
        found = serving.frontend.result(active)
        assert (found.text, found.finish_reason, len(found.logprobs), len(found.sources)) == ("bc", "stop", 2, 2)
        (active,) = serve(serving, [asked(serving, 0, "a", spelled("bc", ending=False), max_tokens=6)])
        assert serving.frontend.result(active).text == "bcdefg"


class Failing(Automaton):
    """Raises when it is asked for the third time, from one of its methods."""

    def __init__(self, where: str, error: BaseException):
        super().__init__(GRAMMAR)
        self._asked = 0
        method = getattr(self, where)

        def fail(*args):
            self._asked += 1
            if self._asked == 3:
                raise error
            return method(*args)

        setattr(self, where, fail)


class Panic(BaseException):
    """What a panic of Rust code is to Python."""


class TestFailures:
    @pytest.mark.parametrize("error", [ZeroDivisionError("nothing"), Panic("nothing")], ids=["exception", "panic"])
    @pytest.mark.parametrize("where", ["jump_forward", "allow", "add"])
    @pytest.mark.parametrize("beside", [True, False], ids=["beside free ones", "constrained ones alone"])
    def test_a_constraint_that_raises_ends_its_request_alone(self, beside, where, error):
        serving = engine("draft_model")
        requests = mixed(serving) if beside else mixed(serving, constrained=range(4))
        expected = tokens_of(serve(serving, mixed(serving) if beside else mixed(serving, constrained=range(4))))
        requests[1] = dataclasses.replace(requests[1], constraint=Failing(where, error))
        found = serve(serving, requests)
        assert [found[i].tokens for i in (0, 2, 3)] == [expected[i] for i in (0, 2, 3)]
        assert (found[1].outcome, found[1].error) == (FAILED, error)
        result = serving.frontend.result(found[1])
        assert (result.finish_reason, result.stop_reason) == ("error", f"{type(error).__name__}: nothing")
        assert len(found[1].accepted) == (3 if where == "add" else 2)
        assert_nothing_is_held(serving)

    def test_interrupt_in_a_constraint_stops_the_caller_alone(self):
        """Ctrl-C interrupts the caller alone. An exception of that name ends the thread, and the next one begins anew."""

        class Interrupting(Automaton):
            def allow(self, drafts, flags):
                raise KeyboardInterrupt

        serving = engine("draft_model")
        for i in (0, 1):  # alone, and beside others
            requests = mixed(serving)[: 4 * i]
            requests.append(asked(serving, 0, PROMPTS[1], Interrupting(GRAMMAR)))
            with pytest.raises(RuntimeError, match="KeyboardInterrupt") as raised:
                list(serving.run(requests))
            assert isinstance(raised.value.__cause__, KeyboardInterrupt)
            assert_nothing_is_held(serving)
            assert tokens_of(serve(serving, mixed(serving))) == alone()


class TestBetweenDraftAndVerify:
    """Drafts wait on the device from one step to the next."""

    def test_abort_between_draft_and_verify(self):
        serving, given_up = engine("draft_model"), []

        def give_up_what_waits():
            waiting = [one for one in serving.scheduler.rows if one and one.proposed and one.request.index == 1]
            serving.loop.abort(waiting)
            given_up.extend(waiting)

        found = serve(serving, mixed(serving), after_step=give_up_what_waits)
        assert given_up == [found[1]]
        assert found[1].outcome == ABORTED
        assert [found[i].tokens for i in (0, 2, 3)] == [alone()[i] for i in (0, 2, 3)]
        assert_nothing_is_held(serving)

    @pytest.mark.parametrize("others", [(0, 2), (0, 3)], ids=["beside free ones", "beside a constrained one"])
    def test_preemption_between_draft_and_verify(self, others):
        """The youngest request, which is constrained. Another one drafts meanwhile, and its drafts are verified."""
        serving, preempted = engine("draft_model"), []
        scheduler = serving.scheduler
        grow = scheduler._grow

        def preempt_what_waits(rounds, schedule):
            youngest = max((one for one in scheduler.rows if one), key=lambda one: one.seniority, default=None)
            if youngest and youngest.request.index == 1 and youngest.proposed and youngest.num_preemptions < 2:
                preempted.append(youngest)
                scheduler._preempt(schedule)
            return grow(rounds, schedule)

        order = (*others, 1)
        with attribute(scheduler, "_grow", preempt_what_waits):
            requests = mixed(serving, seed=3)
            found = serve(serving, [requests[i] for i in order])
        assert preempted == [found[2]] * 2
        assert tokens_of(found) == [alone(3)[i] for i in order]
        assert [active.unread_rounds for active in found] == [0] * 3
        assert_nothing_is_held(serving)

    def test_requests_arriving_between_draft_and_verify(self):
        serving = engine("draft_model")
        found = serve(serving, mixed(serving, seed=3), at_a_time=2)
        assert tokens_of(found) == alone(3)


@pytest.mark.parametrize("reproducible", [True, False])
def test_nothing_is_compiled_after_warmup(reproducible, xla_compilations):
    serving = engine("draft_model", models=TABLES, config=dataclasses.replace(CONFIG, reproducible=reproducible))
    serving.warmup()
    before, programs = len(xla_compilations), serving.num_compilations
    for constrained in ((0,), (0, 1), (0, 1, 2, 3)):
        serve(serving, mixed(serving, constrained, seed=1))
        serve(serving, [one for one in mixed(serving, constrained, logprobs=2) if one.constraint])
    assert (len(xla_compilations), serving.num_compilations) == (before, programs)
