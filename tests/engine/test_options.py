"""Options that change logits, or ask for log-probabilities, in an engine: under speculation and beside other requests."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from engines import (
    CONFIG,
    LETTERS,
    Letters,
    V,
    bigram,
    causal,
    drained,
    engine,
    paused,
    ragged_prompts,
    requests_of,
    shared,
    table_llm,
    target,
    tokens_of,
)
from greedy_options import greedy_by_definition

import jspec
from jspec.config.engine import LOGPROBS_MODES
from jspec.drafting.plain import NoDrafts
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest
from jspec.engine.runner.compile import Program
from jspec.engine.runner.state import request_arrays
from jspec.engine.scheduler.scheduler import Scheduler
from jspec.sampling.params import SamplingParams

PROMPTS = ragged_prompts((3, 9, 5, 12))
RAW, PROCESSED = LOGPROBS_MODES
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.2, "presence_penalty": 0.4},
    {"logit_bias": {3: 2.0, 7: -100.0}},
    {"allowed_token_ids": [2, 4, 8, 16]},
]


def completed(serving: Engine, params: list[SamplingParams], prompts=PROMPTS) -> list[ActiveRequest]:
    requests = [
        serving.frontend.request(i, prompt, one, np.array([7, one.seed or i], np.uint32))
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    return sorted(serving.run(requests), key=lambda active: active.request.index)


def texts(serving: Engine, params: list[SamplingParams], prompts=PROMPTS) -> list[list[int]]:
    return tokens_of(completed(serving, params, prompts))


@pytest.mark.parametrize(("method", "K"), [("draft_model", 4), ("draft_model", 1), ("ngram", 3), (None, 0)])
def test_greedy_texts_equal_the_definition(method, K):
    """All options in one batch, with every method."""
    params = [SamplingParams(temperature=0, max_tokens=10, **options) for options in OPTIONS]
    expected = [greedy_by_definition(p, options, 10) for p, options in zip(PROMPTS, OPTIONS, strict=True)]
    assert texts(engine(method, K or 4), params) == expected
    assert all(len(set(text)) > 1 for text in expected)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_neighbours_with_options_do_not_change_a_text(temperature):
    serving = engine("draft_model")
    free = [SamplingParams(temperature=temperature, max_tokens=12, seed=3)] * len(PROMPTS)
    mixed = [free[0], *(SamplingParams(max_tokens=12, seed=3, logprobs=2, **options) for options in OPTIONS[1:])]
    assert texts(serving, mixed)[0] == texts(serving, free)[0]


def test_a_seed_gives_one_text_with_options():
    serving = engine("draft_model")
    params = [SamplingParams(max_tokens=10, seed=5, **options) for options in OPTIONS]
    together = texts(serving, params)
    alone = [texts(serving, [one], [prompt])[0] for one, prompt in zip(params, PROMPTS, strict=True)]
    assert together == alone


@shared
def letters() -> jspec.LLM:
    """a is followed by b, b by c, and so on, or less likely by the letter after that."""
    table = np.zeros((V, V), np.float32)
    for step, logit in ((1, 8.0), (2, 6.0)):
        table += logit * np.eye(V, dtype=np.float32)[(np.arange(V) + step) % V]
    return table_llm(bigram(table), bigram(table * 0.9), Letters())


def test_bad_words_never_occur():
    ask = functools.partial(jspec.generate, letters(), "a", temperature=0, max_tokens=6)
    assert ask().text == "bcdefg"
    assert ask(bad_words="c").text == "bdefgh"
    assert ask(bad_words=["cd", "ef"]).text == "bceghi"
    assert ask(bad_words=["bcd"]).text == "bcefgh"
    assert ask(bad_words=["ab"]).text == "bcdefg"  # the a is the prompt's


def test_stop_string_is_included_on_request():
    ask = functools.partial(jspec.generate, letters(), "a", temperature=0, max_tokens=12)
    assert ask(stop="ef").text == "bcd"
    kept = ask(stop="ef", include_stop_str_in_output=True)
    assert (kept.text, kept.stop_reason, len(kept.token_ids)) == ("bcdef", "ef", 5)
    token = LETTERS.index("e")
    assert ask(stop_token_ids=[token]).text == "bcd"
    assert ask(stop_token_ids=[token], include_stop_str_in_output=True).text == "bcde"
    streamed = jspec.stream(letters(), "a", temperature=0, max_tokens=12, stop="ef", include_stop_str_in_output=True)
    assert "".join(delta.text or "" for delta in streamed) == "bcdef"


def test_special_tokens_are_included_on_request():
    special = {"logit_bias": {26: 100.0}, "max_tokens": 3, "temperature": 0}
    assert jspec.generate(letters(), "a", **special).text == ""
    assert jspec.generate(letters(), "a", skip_special_tokens=False, **special).text == "..."


def test_prompts_are_truncated():
    ask = functools.partial(jspec.generate, letters(), temperature=0, max_tokens=1)
    assert ask("abcxyz", truncate_prompt_tokens=3).prompt_token_ids == Letters().encode("xyz")
    room = letters().engine.config.max_len - 1
    long = "ab" * room
    assert ask(long, truncate_prompt_tokens=-1).prompt_token_ids == Letters().encode(long)[-room:]
    with pytest.raises(ValueError, match="leaves room for"):
        ask(long)


def test_detokenize_false_gives_no_text():
    result = jspec.generate(letters(), "a", temperature=0, max_tokens=3, detokenize=False)
    assert (result.text, result.token_ids) == (None, Letters().encode("bcd"))


class TestCompletions:
    def test_each_completion_has_its_own_seed(self):
        several = jspec.generate(letters(), "a", n=3, seed=11, max_tokens=8)
        assert [one.token_ids for one in several] == [
            jspec.generate(letters(), "a", seed=11 + i, max_tokens=8).token_ids for i in range(3)
        ]
        assert len({tuple(one.token_ids) for one in several}) == 3

    def test_completions_of_several_prompts(self):
        params = [SamplingParams(n=2, seed=1, max_tokens=3), SamplingParams(seed=2, max_tokens=3)]
        first, second = jspec.generate(letters(), ["a", "b"], params)
        assert [len(first), second.prompt_token_ids] == [2, Letters().encode("b")]

    def test_a_key_is_folded_for_each_completion(self):
        several = jspec.generate(letters(), "a", n=2, max_tokens=8, key=jax.random.key(3))
        again = jspec.generate(letters(), "a", n=2, max_tokens=8, key=jax.random.key(3))
        assert [one.token_ids for one in several] == [one.token_ids for one in again]
        assert several[0].token_ids != several[1].token_ids

    def test_engine_refuses_n_above_one(self):
        with pytest.raises(ValueError, match=r"n=2: a request has one completion here; .* params.copies\(\)"):
            letters().engine.add("a", n=2)


def logprobs_by_definition(prompt: list[int], tokens: list[int], asked: SamplingParams) -> np.ndarray:
    """Of every token at each place of a completion, ``[n, V]``, by a forward pass, for few of the options: in the processed
    mode temperature 0 is temperature 1 without cuts."""
    logits = np.array(causal(target())(np.array([[*prompt, *tokens]], np.int32))[0])[len(prompt) - 1 : -1]
    if asked.logprobs_mode == PROCESSED:
        logits[:, [*(asked.logit_bias or ())]] += [*(asked.logit_bias or {}).values()]
        if not asked.greedy:
            logits = np.where(logits >= np.sort(logits)[:, [-asked.top_k]], logits / asked.temperature, -np.inf)
    return np.asarray(jax.nn.log_softmax(logits))


class TestLogprobs:
    @pytest.mark.parametrize(("method", "K"), [("draft_model", 4), (None, 0)])
    @pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 3, **OPTIONS[0]}])
    def test_logprobs_are_of_the_targets_own_distribution(self, method, K, options):
        """They are those of a forward pass over the finished text, before options and temperature."""
        serving = engine(method, K or 4)
        serving.add(PROMPTS[1], SamplingParams(max_tokens=11, logprobs=3, seed=1, **options))
        (deltas,) = drained(serving).values()
        result = deltas[-1].result
        assert result.logprobs == [one for delta in deltas for one in delta.logprobs]
        assert len(result.logprobs) == len(result.token_ids) == 11
        logits = np.asarray(causal(target())(np.array([[*PROMPTS[1], *result.token_ids]], np.int32))[0], float)
        for i, (token, found) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
            row = logits[len(PROMPTS[1]) - 1 + i]
            expected = row - np.log(np.exp(row - row.max()).sum()) - row.max()
            order = np.argsort(-row)
            assert next(iter(found)) == token
            assert set(found) == {token, *order[:3].tolist()}
            for other, one in found.items():
                assert one.logprob == pytest.approx(expected[other], abs=1e-4)
                assert one.rank == 1 + (row > row[other]).sum()

    def test_zero_logprobs_have_the_chosen_token_alone(self):
        result = jspec.generate(letters(), "a", temperature=0, max_tokens=4, logprobs=0)
        assert [list(one) for one in result.logprobs] == [[token] for token in result.token_ids]
        assert [one[t].decoded_token for one, t in zip(result.logprobs, result.token_ids, strict=True)] == list("bcde")

    @pytest.mark.parametrize("count", [0, 3])
    def test_those_of_the_tokens_in_one_array(self, count):
        result = jspec.generate(letters(), "a", seed=2, temperature=3.0, max_tokens=9, logprobs=count)
        found = result.token_logprobs
        assert (found.dtype, found.shape) == (np.float32, (9,))
        assert found.tolist() == [
            one[token].logprob for one, token in zip(result.logprobs, result.token_ids, strict=True)
        ]
        assert len({*found.tolist()}) > 1
        assert found.base is None  # it keeps no other numbers alive
        assert result == dataclasses.replace(result, token_logprobs=None)

    def test_requests_without_logprobs_get_none(self):
        params = [SamplingParams(max_tokens=4, logprobs=1), SamplingParams(max_tokens=4)]
        first, second = jspec.generate(letters(), ["a", "b"], params)
        assert (len(first.logprobs), second.logprobs) == (4, None)
        assert (len(first.token_logprobs), second.token_logprobs) == (4, None)

    def test_logprobs_end_with_the_stop_string(self):
        result = jspec.generate(letters(), "a", temperature=0, max_tokens=12, stop="d", logprobs=1)
        assert len(result.logprobs) == len(result.token_logprobs) == len(result.token_ids) == 3

    def test_a_request_that_is_aborted_before_its_first_token_has_none_of_them(self):
        serving = letters().engine
        with paused(serving):
            serving.abort(serving.add("abc", SamplingParams(logprobs=1)))
        (delta,) = serving.step()
        assert (delta.result.token_logprobs.dtype, delta.result.token_logprobs.tolist()) == (np.float32, [])

    def test_processed_logprobs_are_of_the_sampling_distribution(self):
        table = np.log(np.tile(np.array([8, 4, 2, 1, *[1e-9] * (V - 4)], np.float32), (V, 1)))
        config = dataclasses.replace(CONFIG, logprobs_mode=PROCESSED)
        serving = Engine(bigram(table), None, Decoding(lambda *_: NoDrafts(), "match"), config)
        serving.add([0], SamplingParams(top_k=3, logit_bias={0: -100}, logprobs=4, max_tokens=2, seed=0))
        (deltas,) = drained(serving).values()
        for found in deltas[-1].result.logprobs:
            assert {t: round(np.exp(found[t].logprob), 4) for t in (1, 2, 3)} == {1: 0.5714, 2: 0.2857, 3: 0.1429}

    @pytest.mark.parametrize(("method", "K"), [("draft_model", 4), ("ngram", 3), (None, 0)])
    def test_requests_of_one_batch_have_the_modes_that_they_ask_for(self, method, K):
        serving, prompt, compilations = engine(method, K or 4), PROMPTS[1], set()
        drawn, greedy = (
            {"temperature": 0.7, "top_k": 3, "seed": 1},
            {"temperature": 0, "top_k": 3, "logit_bias": {2: 9.0}},
        )
        for modes in ((RAW, PROCESSED, PROCESSED), (PROCESSED, RAW, RAW)):
            params = [
                SamplingParams(max_tokens=9, logprobs=4, logprobs_mode=mode, **options)
                for mode, options in zip(modes, (drawn, drawn, greedy), strict=True)
            ]
            ended = completed(serving, params, [prompt] * 3)
            assert ended[0].tokens == ended[1].tokens
            for active, asked in zip(ended, params, strict=True):
                expected = logprobs_by_definition(prompt, active.tokens, asked)
                for row, found in zip(expected, serving.frontend.result(active).logprobs, strict=True):
                    assert [one.logprob for one in found.values()] == pytest.approx(row[[*found]], abs=1e-4)
            compilations.add(serving.num_compilations)
        assert len(compilations) == 1

    def test_the_sampling_distribution_is_made_for_requests_that_want_its_logprobs(self):
        config = dataclasses.replace(CONFIG, logprobs_mode=PROCESSED)
        for logprobs, mode, made in ((None, None, 0), (0, None, 1), (0, RAW, 0), (None, PROCESSED, 0)):
            (request,) = requests_of([[1]], SamplingParams(logprobs=logprobs, logprobs_mode=mode, presence_penalty=1.0))
            assert request_arrays(request, config, V).processed_logprobs == made


class TestPromptLogprobs:
    @pytest.mark.parametrize("method", ["draft_model", None])
    def test_prompt_logprobs_of_every_token_but_the_first(self, method):
        """Beside prompts without any, and twice, where the second time would find pages."""
        serving, wanted = engine(method), SamplingParams(max_tokens=3, prompt_logprobs=2, seed=1)
        for _ in range(2):
            ids = [
                serving.add(prompt, wanted if i else SamplingParams(max_tokens=3)) for i, prompt in enumerate(PROMPTS)
            ]
            results = {id: deltas[-1].result for id, deltas in drained(serving).items()}
            assert results[ids[0]].prompt_logprobs is None
            for id, prompt in list(zip(ids, PROMPTS, strict=True))[1:]:
                first, *found = results[id].prompt_logprobs
                assert (first, results[id].num_cached_tokens) == (None, 0)
                logits = np.asarray(causal(target())(np.array([prompt], np.int32))[0], float)
                for row, token, one in zip(logits, prompt[1:], found, strict=False):
                    expected = row - row.max() - np.log(np.exp(row - row.max()).sum())
                    assert set(one) == {token, *np.argsort(-row)[:2].tolist()}
                    assert all(one[t].logprob == pytest.approx(expected[t], abs=1e-4) for t in one)
                    assert one[token].rank == 1 + (row > row[token]).sum()

    def test_prompt_logprobs_do_not_change_the_text(self):
        serving = engine("draft_model")
        params = [SamplingParams(max_tokens=8, seed=4, prompt_logprobs=count) for count in (None, 0)]
        first, second = (texts(serving, [one] * len(PROMPTS)) for one in params)
        assert first == second

    def test_a_prompt_of_one_token_has_none(self):
        assert jspec.generate(letters(), "a", max_tokens=1, prompt_logprobs=3).prompt_logprobs == [None]

    def test_a_request_that_is_aborted_before_prefill_ends_has_none(self):
        serving = letters().engine
        with paused(serving):  # its thread hears of both at once
            id = serving.add("abc" * 12, SamplingParams(max_tokens=2, prompt_logprobs=1))
            serving.abort(id)
        (delta,) = serving.step()
        assert (delta.result.finish_reason, delta.result.prompt_logprobs) == ("abort", None)


class TestFewerDrafts:
    CAPS = (0, 1, 3, 4)

    @pytest.mark.parametrize("method", ["draft_model", "ngram"])
    def test_greedy_texts_are_the_targets_and_rounds_have_no_more_drafts(self, method):
        serving = engine(method)
        params = [SamplingParams(temperature=0, max_tokens=12, max_drafts=most) for most in self.CAPS]
        texts(serving, [SamplingParams(temperature=0, max_tokens=12)] * len(PROMPTS))
        before, compiled = serving.metrics(), serving.num_compilations
        ended = completed(serving, params)
        assert tokens_of(ended) == [greedy_by_definition(prompt, {}, 12) for prompt in PROMPTS]
        for active, most in zip(ended, self.CAPS, strict=True):
            assert max(active.drafted) == most if method == "draft_model" else max(active.drafted) <= most
            assert max(active.accepted) <= most
        after = serving.metrics()
        assert after.num_draft_tokens - before.num_draft_tokens == sum(sum(active.drafted) for active in ended)
        assert serving.num_compilations == compiled

    @pytest.mark.parametrize("reproducible", [True, False])
    def test_a_text_of_coupled_drafts_does_not_depend_on_the_cap(self, reproducible):
        config = dataclasses.replace(CONFIG, reproducible=reproducible)
        serving = engine("draft_model", verify="match", draft_sampling="coupled", config=config)
        found = [
            texts(serving, [SamplingParams(max_tokens=14, seed=i, max_drafts=most) for i in range(len(PROMPTS))])
            for most in (None, *self.CAPS)
        ]
        assert all(one == found[0] for one in found)

    def test_a_cap_does_not_change_a_neighbours_text(self):
        serving, free = engine("draft_model"), SamplingParams(max_tokens=12, seed=3)
        capped = [free, *(SamplingParams(max_tokens=12, seed=3, max_drafts=most) for most in self.CAPS[:3])]
        assert texts(serving, capped)[0] == texts(serving, [free] * len(PROMPTS))[0]

    def test_results_count_drafts_that_were_verified(self):
        none, few, many = (
            jspec.generate(letters(), "a", temperature=0, max_tokens=12, max_drafts=most) for most in (0, 2, 99)
        )
        assert none.token_ids == few.token_ids == many.token_ids
        assert (none.stats.num_steps, none.stats.num_draft_tokens, any(none.accepted)) == (12, 0, False)
        assert (few.stats.num_steps, few.stats.drafted_per_position) == (4, (4, 4, 0, 0))
        assert few.stats.acceptance_rate_per_position == (1.0, 1.0, 0.0, 0.0)
        assert many.stats == jspec.generate(letters(), "a", temperature=0, max_tokens=12).stats

    def test_a_later_turn_has_as_good_drafts_after_an_answer_without(self):
        """The drafter reads what it did not draft, because the pages of an answer serve the prompt of the next turn."""
        config = dataclasses.replace(CONFIG, page_size=4, prefill_chunk=4, reproducible=False)
        models = target(), target()  # which agree, so that every draft is accepted that was made of a whole text
        serving = engine("draft_model", models=models, config=config)
        (first,) = texts(serving, [SamplingParams(temperature=0, max_tokens=26, max_drafts=0)], PROMPTS[:1])
        (active,) = completed(serving, [SamplingParams(temperature=0)], [[*PROMPTS[0], *first]])
        assert active.num_cached_tokens > len(PROMPTS[0])
        assert active.accepted[:-1] == active.drafted[:-1]
        assert len(active.accepted) > 1


def test_processing_programs_run_only_on_demand(monkeypatch):
    serving, called, call = engine("draft_model"), [], Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, *args: called.append(self.name) or call(self, *args))
    texts(serving, [SamplingParams(max_tokens=3)] * 4)
    assert not any("processing" in name for name in called)
    texts(serving, [SamplingParams(max_tokens=3, logprobs=0), *[SamplingParams(max_tokens=3)] * 3])
    assert any("processing" in name for name in called)


@pytest.mark.parametrize("reproducible", [True, False])
def test_calls_mix_processing_requests_only_unless_reproducible(reproducible, monkeypatch):
    config = dataclasses.replace(CONFIG, reproducible=reproducible)
    serving, kinds, plan_of = engine("ngram", config=config), [], Scheduler.schedule

    def noted(self, *args):
        schedule = plan_of(self, *args)
        kinds.append({active.request.needs_processing for active in schedule.decoding})
        return schedule

    monkeypatch.setattr(Scheduler, "schedule", noted)
    both = [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, logprobs=1)] * 2
    found = texts(serving, both)
    assert [len(text) for text in found] == [9] * 4
    assert ({True, False} in kinds) != reproducible
    assert reproducible <= ({True} in kinds and {False} in kinds)
