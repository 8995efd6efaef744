"""The counts of a request, and that they add up."""

import pytest
from engines import MAX_LEN, Letters, V, bigram, successor_table, table_llm

import jspec
from jspec.outputs import TARGET, Stats, sources_of, total_stats
from jspec.sampling.params import SamplingParams

K = 4


@pytest.fixture(scope="module")
def llm():
    """Drafts that err after a third of the tokens."""
    wrong = (2, 3, 7, 11, 14, 19, 20, 21, 22, 28)
    return table_llm(bigram(successor_table() / 10), bigram(successor_table(wrong) / 10), K=K)


def test_counts_of_known_steps():
    stats = Stats.of(3, drafted=[3, 3, 2, 0, 1], accepted=[3, 0, 2, 0, 1])
    assert stats.num_steps == 5
    assert stats.num_draft_tokens == 9
    assert stats.num_accepted_draft_tokens == 6
    assert stats.acceptance_histogram == (2, 1, 1, 1)
    assert stats.accepted_per_position == (3, 2, 1)
    assert stats.mean_acceptance_length == 1 + 6 / 5
    assert stats.acceptance_rate == 6 / 9
    assert stats.acceptance_rate_per_position == (3 / 4, 2 / 3, 1 / 2)


def test_trees_have_several_drafts_at_a_position():
    stats = Stats.of(3, drafted=[9, 5, 1, 0], accepted=[2, 1, 0, 0], deepest=[3, 2, 1, 0])
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (15, 3)
    assert stats.drafted_per_position == (3, 2, 1)
    assert stats.acceptance_rate_per_position == (2 / 3, 1 / 2, 0.0)
    assert sources_of(drafted=5, accepted=2, count=3, rejects=False) == ["draft", "draft", "bonus"]
    assert sources_of(drafted=5, accepted=1, count=2, rejects=True) == ["draft", "correction"]
    assert sources_of(drafted=0, accepted=0, count=1, rejects=False) == ["target"]


def test_no_steps_and_no_drafts():
    none = Stats.of(2, [], [])
    assert (none.mean_acceptance_length, none.acceptance_rate) == (1.0, 0.0)
    assert none.acceptance_rate_per_position == (0.0, 0.0)
    assert Stats.of(2, [0, 0], [0, 0]).mean_acceptance_length == 1.0


def test_sums_are_the_counts_of_all_steps():
    one, other = ([3, 3], [2, 0]), ([1, 3], [1, 3])
    assert Stats.of(3, *one) + Stats.of(3, *other) == Stats.of(3, one[0] + other[0], one[1] + other[1])


def test_greedy_steps_are_what_the_tables_say(llm):
    """From token 0 the draft is right twice, wrong after 2 and again after 3, right three times, ..."""
    result = jspec.generate(llm, [0], SamplingParams(temperature=0, max_tokens=12))
    assert result.token_ids == list(range(1, 13))
    flags = [True, True, False, False, True, True, True, False, True, True, True, False]
    assert result.accepted == flags
    assert "".join(source[0] for source in result.sources) == "ddccdddcdddc"
    assert result.stats == Stats.of(K, [K] * 4, [2, 0, 3, 3])


def test_counts_add_up(llm):
    params = [SamplingParams(temperature=t, max_tokens=MAX_LEN, seed=s) for t in (0, 0.7, 1.5) for s in range(6)]
    prompts = [[s % V] * (1 + 2 * s) for s in range(len(params))]
    results = jspec.generate(llm, prompts, params)
    for result in results:
        stats, n = result.stats, len(result.token_ids)
        assert n == MAX_LEN - len(result.prompt_token_ids)
        assert result.finish_reason == "length"
        assert sum(stats.acceptance_histogram) == stats.num_steps
        assert sum(j * count for j, count in enumerate(stats.acceptance_histogram)) == stats.num_accepted_draft_tokens
        assert sum(stats.accepted_per_position) == stats.num_accepted_draft_tokens
        assert list(stats.accepted_per_position) == sorted(stats.accepted_per_position, reverse=True)
        assert stats.mean_acceptance_length == 1 + stats.num_accepted_draft_tokens / stats.num_steps
        assert n == stats.num_steps + stats.num_accepted_draft_tokens  # max_len ends it: drafts keep to the room
        assert sum(result.accepted) == stats.num_accepted_draft_tokens
        assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens <= K * stats.num_steps
    total = total_stats(result.stats for result in results)
    assert 0 < total.num_accepted_draft_tokens < total.num_draft_tokens
    assert all(total.acceptance_histogram)


@pytest.mark.parametrize("max_tokens", range(1, 8))
def test_the_last_step_may_overshoot(llm, max_tokens):
    result = jspec.generate(llm, [3], SamplingParams(temperature=0, max_tokens=max_tokens))
    stats, n = result.stats, len(result.token_ids)
    assert n == max_tokens
    overshoot = stats.num_steps + stats.num_accepted_draft_tokens - n
    assert overshoot == {1: 0, 2: 3, 3: 2, 4: 1, 5: 0, 6: 3, 7: 2}[max_tokens]
    assert n - sum(result.accepted) == stats.num_steps - (overshoot > 0)


def test_plain_decoding_has_an_acceptance_length_of_one():
    result = jspec.generate(table_llm(bigram(successor_table())), [5], SamplingParams(max_tokens=9, seed=0))
    assert result.stats == Stats(9, 0, 0, (9,), (), ())
    assert result.stats.mean_acceptance_length == 1.0
    assert (result.accepted, result.sources) == ([False] * 9, [TARGET] * 9)


@pytest.mark.parametrize("stop", [(), "xyz", "uv"])
def test_deltas_say_which_tokens_were_accepted_drafts(stop):
    """Also of those before a stop string, which ends the text within a round."""
    wrong = (3, 7, 14, 21)
    llm = table_llm(bigram(successor_table()), bigram(successor_table(wrong)), Letters(), K=K)
    deltas = list(jspec.stream(llm, "a", temperature=0, max_tokens=24, stop=stop))
    result = deltas[-1].result
    assert result is not None
    assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
    assert [accepted for delta in deltas for accepted in delta.accepted] == result.accepted
    assert [source for delta in deltas for source in delta.sources] == result.sources
    assert len(deltas) > 1
    assert all(len(delta.accepted) == len(delta.token_ids) for delta in deltas)
    for token in (4, 8, 15, 22)[: len(result.token_ids) // 6]:  # behind a wrong one, the target drew
        assert not result.accepted[token - 1]
    assert sum(result.accepted) >= 12
