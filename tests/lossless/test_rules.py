"""Every rule by itself, jitted: the joint distribution of what a round emits, that of texts over several rounds, and how
often each draft is accepted."""

import functools
import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from lossless.rounds import Case, K, L, Tally, V, node, nodes, play, predicted, random_tables
from lossless.statistics import assert_follows, assert_not_vacuous, assert_rate

RUNS_FOR_LONG = True  # so that XLA optimises: conftest.py
FACTORS = ("temperature", "top_k", "top_p", "min_p")
GREEDY = Case(temperature=0.0, share=1)
GREEDY_BY_SAMPLED_DRAFTS = Case(temperature=0.0, draft_temperature=1.0, share=1)

# Every pair of levels of the four processors, under sampled drafts; ragged counts and draft temperatures ride along.
SAMPLED = (
    Case("sample", 0.6, 0, 1.0, 0.0),
    Case("sample", 0.6, 2, 0.9, 0.05, draft_temperature=1.5),
    Case("sample", 0.6, 3, 0.7, 0.15, count=2),
    Case("sample", 1.0, 0, 0.9, 0.15),
    Case("sample", 1.0, 2, 0.7, 0.0, count=1),
    Case("sample", 1.0, 3, 1.0, 0.05, draft_temperature=0.5),
    Case("sample", 1.5, 0, 0.7, 0.05),
    Case("sample", 1.5, 2, 1.0, 0.15, count=2, draft_temperature=1.0),
    Case("sample", 1.5, 3, 0.9, 0.0),
)
# Every level of every processor once, for the other ways of drafting.
LEVELS = ((0.6, 3, 0.9, 0.0), (1.0, 0, 0.7, 0.15), (1.5, 2, 1.0, 0.05))
ARGMAX = tuple(Case("argmax", *levels) for levels in LEVELS)
COUPLED = (*(Case("coupled", *levels) for levels in LEVELS), Case("coupled", count=2))
MIXED = (*SAMPLED, *ARGMAX, Case(count=0), GREEDY, GREEDY_BY_SAMPLED_DRAFTS)
NARROW = (Case(), Case("sample", 0.6, 3, 0.9, 0.05), Case("argmax"), GREEDY)  # the draft lacks the last token

BATCHES = {
    ("match", V): (*MIXED, *COUPLED),
    ("rejection", V): MIXED,
    ("block", V): MIXED,
    ("match", V - 1): (*NARROW, Case("coupled")),
    ("rejection", V - 1): NARROW,
    ("block", V - 1): NARROW,
}
TABLES = {V: random_tables(1), V - 1: random_tables(2, draft_vocab=V - 1)}
PLAYS = [(rule, width, i) for (rule, width), cases in BATCHES.items() for i in range(len(cases))]


def describe(rule: str, width: int, i: int) -> str:
    case = BATCHES[rule, width][i]
    settings = [f"{case.draft}{case.count}", f"T{case.temperature:g}", f"k{case.top_k}"]
    settings += [f"p{case.top_p:g}", f"m{case.min_p:g}"]
    if case.draft_temperature is not None:
        settings.append(f"draftT{case.draft_temperature:g}")
    return "-".join([rule, *settings, *(["narrow"] if width < V else [])])


@functools.cache
def tallies(rule: str, width: int, samples: int) -> list[Tally]:
    return play(rule, BATCHES[rule, width], TABLES[width], samples, seed=11)


class Play(NamedTuple):
    """A case, what it did, and how likely everything was."""

    case: Case
    counts: Tally
    distribution: Tally


@pytest.fixture(scope="module", params=[50_000, pytest.param(3_500_000, marks=pytest.mark.long)])
def samples(request):
    return request.param


@pytest.fixture(scope="module", params=PLAYS, ids=[describe(*play) for play in PLAYS])
def play_of(request, samples):
    rule, width, i = request.param
    case = BATCHES[rule, width][i]
    return Play(case, tallies(rule, width, samples)[i], predicted(rule, case, TABLES[width]))


def test_processors_are_covered_pairwise():
    for a, b in itertools.combinations(FACTORS, 2):
        levels = [{getattr(case, name) for case in SAMPLED} for name in (a, b)]
        covered = {(getattr(case, a), getattr(case, b)) for case in SAMPLED}
        assert covered == set(itertools.product(*levels)), (a, b)
    for others in (ARGMAX, COUPLED, SAMPLED):
        for name in FACTORS:
            assert {getattr(case, name) for case in SAMPLED} <= {getattr(case, name) for case in others}, name


def in_cells(first_round) -> np.ndarray:
    """Of what a round emitted: how many drafts were accepted, the first token and the last, ``[(K + 1) V V]``.

    At most 52 of these 64 cells can be hit."""
    cells = np.zeros((K + 1, V, V))
    for length in range(1, K + 2):
        for tokens in itertools.product(range(V), repeat=length):
            cells[length - 1, tokens[0], tokens[-1]] += first_round[node(tokens)]
    return cells.ravel()


def test_joint_distribution_of_a_round(play_of):
    counts, distribution = in_cells(play_of.counts.first_round), in_cells(play_of.distribution.first_round)
    assert_follows(counts, distribution, "accepted, first and last token of a round")


@pytest.mark.parametrize(("rule", "width"), BATCHES)
def test_p_value_of_all_cases_together(rule, width, samples):
    """A bias that the cases share is detected here when it is too small for each alone: ``test_power_of_the_statistics``."""
    counted = tallies(rule, width, samples)
    expected = [predicted(rule, case, TABLES[width]) for case in BATCHES[rule, width]]
    for name, view in (("a round", lambda tally: in_cells(tally.first_round)), ("texts", lambda tally: tally.texts)):
        assert_follows([view(tally) for tally in counted], [view(tally) for tally in expected], f"{name}, all cases")


def test_joint_distribution_of_texts_over_rounds(play_of):
    assert_follows(play_of.counts.texts, play_of.distribution.texts, f"the first {L} tokens")


def test_acceptance_of_each_case(play_of):
    case, counts, distribution = play_of.case, play_of.counts.first_round, play_of.distribution.first_round
    for i in range(1, case.count + 1):  # node nodes(i) is the first with more than i tokens
        accepted = counts[nodes(i) :].sum()
        assert_rate(accepted, counts.sum(), distribution[nodes(i) :].sum(), f"draft {i} accepted")
    if case.count and case.temperature:
        assert_not_vacuous(counts.sum(), counts[nodes(1) :].sum())


@pytest.fixture
def groups_of_two(monkeypatch):
    """Programs in which the vocabulary spans two groups of noise; those of other tests must not be taken for them."""
    jax.clear_caches()
    monkeypatch.setattr("jspec.pallas.sampling.warped_logits.GROUP", 2)
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("groups_of_two")
@pytest.mark.parametrize(("rule", "width"), [("match", V), ("rejection", V), ("block", V), ("block", V - 1)])
def test_tokens_drawn_by_groups_follow_the_distribution(rule, width):
    """Coupled drafts meet other noise then, so that only their texts have a known distribution."""
    cases = (*NARROW, *([Case("coupled")] if rule == "match" else []))
    for case, counts in zip(cases, play(rule, cases, TABLES[width], 25_000, seed=12), strict=True):
        distribution = predicted(rule, case, TABLES[width])
        assert_follows(counts.texts, distribution.texts, f"the first {L} tokens")
        if case.draft != "coupled":
            assert_follows(counts.first_round, distribution.first_round, "a round")
