"""``benchmarks.real``: its prompts and questions, the errors of its figures, and the page that is written of a result."""

import dataclasses
import itertools
import statistics

import pytest

import jspec
from benchmarks.real import prompts, questions, real_models
from benchmarks.report import real_models_page, results
from jspec.outputs import Stats


def of_answers(*accepted: list[int]) -> list[Stats]:
    return [Stats.of(2, [2] * len(rounds), rounds) for rounds in accepted]


def test_prompts_are_twenty_of_each_kind_and_no_question_is_one_of_them():
    found = prompts.prompts()
    assert [one.kind for one in found] == [*prompts.KINDS] * 20
    texts = {one.text for one in found}
    assert len(texts) == 60
    asked = set(itertools.islice(questions.questions(), 5000))
    assert len(asked) > 3000
    assert not asked & texts


def test_the_error_is_that_of_leaving_out_one_answer_after_another():
    stats = of_answers([2, 2, 0], [1], [0, 0])
    mean, error = real_models.tokens_a_round(stats)
    assert mean == pytest.approx(1 + 5 / 6)
    without = [1 + 1 / 3, 1 + 4 / 5, 1 + 5 / 4]
    assert error == pytest.approx((2 / 3 * sum((x - statistics.mean(without)) ** 2 for x in without)) ** 0.5)
    assert real_models.tokens_a_round(of_answers([1], [1], [1])) == (2.0, 0.0)


def test_the_page_has_the_last_figures_of_each_way():
    keys = [f"{t}, {kind}" for t in real_models.TEMPERATURES for kind in (*prompts.KINDS, "all")]
    rates = {
        f"{t}, {rows}": {"tokens": 100.0 * rows, "error": 1.0}
        for t in real_models.TIMED_TEMPERATURES
        for rows in real_models.ROWS
    }

    def figures(tokens: float):
        faster = {key: one | {"tokens": one["tokens"] * tokens} for key, one in rates.items()}
        cell = {"tokens": tokens, "error": 0.25, "positions": [0.5, 0.125]}
        return {"accepted": dict.fromkeys(keys, cell), "rates": faster}

    run = results.begin("real_models", {"target": "t", "draft": "d", "dtype": "bfloat16", "new": 4, "smoke": False})
    first = dataclasses.replace(run, measured={"plain": {"rates": rates}, "K=1": figures(9.0), "K=2": figures(3.0)})
    [pair] = real_models_page.pairs_of([first, dataclasses.replace(run, measured={"K=1": figures(1.5)})])
    page = real_models_page.markdown([pair])
    assert "| K=1 | 1.50 ± 0.25 |" in page
    assert "| K=2 | 3.00 ± 0.25 |" in page
    assert "| K=1 | 150 ± 1 (1.50) | 2400 ± 1 (1.50) |" in page
    assert "| plain | 100 ± 1 |" in page
    assert "| K=2 | 0.50 0.12 |" in page
    assert "9.00" not in page
    greedy = dataclasses.replace(run, settings=run.settings | {"prompts": 7}, measured={"plain": 6, "with drafts": 5})
    page = " ".join(real_models_page.markdown([pair], [greedy]).split())
    assert "In float32, 6 of 7 greedy answers of 4 tokens are, token for token, those of transformers" in page
    assert "and 5 with drafts" in page


@pytest.mark.parametrize("way", real_models.WAYS)
def test_every_way_is_a_speculation(way):
    how = dict(real_models.WAYS[way] or {})
    how.pop("draft", None)
    speculation = jspec.Speculation(**how)
    assert {name: getattr(speculation, name) for name in how} == how
