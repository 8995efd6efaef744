"""Replacing the weights of a drafter in an engine, with which acceptance is measured during training."""

import numpy as np
import pytest
from engines import V, bigram, ragged_prompts, successor_table, table_llm

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
