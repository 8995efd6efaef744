"""Replacing the weights of a drafter in an engine, with which acceptance is measured during training."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, V, bigram, drafting, key_of, paused, ragged_prompts, requests_of, successor_table, table_llm

from jspec.config import Speculation
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams

PROMPTS = ragged_prompts((5, 9))
KEYS = [np.zeros(2, np.uint32)] * 2


def acceptance_lengths(llm) -> list[float]:
    params = [SamplingParams(temperature=0, max_tokens=20)] * 2
    return [result.stats.mean_acceptance_length for *_, result in llm.completions(PROMPTS, params, KEYS)]


def test_replaced_weights_draft_without_another_compilation():
    right, wrong = bigram(successor_table()), bigram(successor_table(wrong=range(V)))
    llm = table_llm(right, wrong)
    assert acceptance_lengths(llm) == [1.0, 1.0]
    compiled = llm.engine.num_compilations
    llm.engine.replace_draft(right)
    assert min(acceptance_lengths(llm)) > 4
    llm.engine.replace_draft(wrong)
    assert acceptance_lengths(llm) == [1.0, 1.0]
    assert llm.engine.num_compilations == compiled


def test_weights_of_other_shapes_are_refused():
    model = bigram(successor_table())
    llm = table_llm(model, model)
    for other in (bigram(successor_table()[:, :-1]), bigram(successor_table()[:-1])):
        with pytest.raises(ValueError, match=r"draft_model has arrays of .*28.*: expected .*\(29, 29\).*before"):
            llm.engine.replace_draft(other)
    with pytest.raises(ValueError, match="draft_model has arrays of 0: expected 1"):
        llm.engine.replace_draft(None)


def test_weights_are_replaced_once_requests_under_way_have_ended():
    wrong, right = bigram(successor_table(wrong=range(V))), bigram(successor_table())
    llm = table_llm(right, wrong)
    run = llm.completions(PROMPTS, [SamplingParams(temperature=0, max_tokens=n) for n in (5, 60)], KEYS)
    next(run)
    llm.engine.replace_draft(right)
    assert [result.stats.mean_acceptance_length for *_, result in run] == [1.0]
    assert min(acceptance_lengths(llm)) > 4


@pytest.mark.parametrize("how", [{}, {"verify": "match", "draft_sampling": "coupled"}], ids=["rejection", "coupled"])
def test_weights_may_be_replaced_under_way(how):
    """The texts stay, the rest of them comes sooner, and a result says whether its seed may now mean another text."""
    wrong, right = bigram(successor_table(wrong=range(V))), bigram(successor_table())
    settings, config = Speculation(4, **how), dataclasses.replace(CONFIG, rounds=8, width=5)
    llm: Any = LLM(right, wrong, drafting("draft_model", settings), "draft_model", None, settings, config)
    params = SamplingParams(seed=3, max_tokens=24)
    before = llm.generate(PROMPTS, params)
    with paused(llm.engine) as loop:
        begun = [loop.submit(request) for request in requests_of(PROMPTS, params)]
        while not begun[1].tokens:
            loop.step()
        loop.replace_draft(right)
        late = loop.submit(requests_of(PROMPTS[:1], params)[0])
        while loop.scheduler.unfinished:
            loop.step()
    after, last = ([llm.engine.frontend.result(active) for active in some] for some in (begun, [late]))
    assert [one.token_ids for one in after] == [one.token_ids for one in before]
    assert all(one.stats.num_steps < other.stats.num_steps for one, other in zip(after, before, strict=True))
    assert [one.reproducible for one in (*before, *after, *last)] == [True, True, bool(how), bool(how), True]
    llm.engine.replace_draft(wrong, wait=False)
    assert llm.generate(PROMPTS, params) == before


def test_a_text_keeps_its_law_while_drafts_change_in_every_step():
    """Each token is followed by its successor with one probability, whichever of two drafts was there before."""
    table = successor_table() / 10
    drafts = bigram(table), bigram(successor_table(wrong=range(V)) / 10)
    llm = table_llm(bigram(table), drafts[0], K=2)
    params, texts = SamplingParams(max_tokens=8), []
    with paused(llm.engine) as loop:
        keys = [key_of(seed) for seed in range(900)]
        actives = [loop.submit(request) for request in requests_of([[5]] * 900, params, keys)]
        for draft in itertools.cycle(drafts):
            loop.step()
            if not loop.scheduler.unfinished:
                break
            loop.replace_draft(draft)
        texts = [[5, *active.tokens] for active in actives]
    follows = np.mean([[(b - a) % V == 1 for a, b in itertools.pairwise(text)] for text in texts])
    probability = float(jax.nn.softmax(jnp.asarray(table[0]))[1])
    assert sum(sum(active.accepted) for active in actives) > 900
    assert abs(follows - probability) < 4 * (probability * (1 - probability) / (900 * 8)) ** 0.5
