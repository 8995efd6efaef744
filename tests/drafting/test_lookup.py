"""Prompt lookup beside a drafter: which rows are looked up, and what the drafter reads then."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, V, bigram, decode, engine, key_of, successor_table
from looked_up import lookup_context

from jspec.config import Speculation
from jspec.drafting.base import Context, Stateless
from jspec.drafting.lookup import LOOKUP_CONFIDENCE, WithLookup, with_lookup
from jspec.drafting.ngram import NGram
from jspec.sampling.params import SamplingParams
from jspec.sampling.verify import Proposal

S, K, OWN = 24, 4, 90  # drafts of the drafter itself are OWN, OWN + 1, ..
REPEATING = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]


@dataclasses.dataclass(frozen=True)
class Counting(Stateless):
    """Drafts consecutive numbers, with positions for ``longest_text`` tokens; its state is how often it was asked."""

    longest_text: int | None = None
    num_draft_tokens: int = K

    def init(self, pages, page_size, dtype, num_rows):
        return jnp.int32(0)

    def propose(self, state, context: Context):
        own = OWN + jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (len(context.length), K))
        limit = (
            jnp.full_like(context.length, S) if self.longest_text is None else self.longest_text + 1 - context.length
        )
        tokens, known = context.with_fixed(own), context.fixed_among(own)
        return state + 1, Proposal(tokens, context.room_within(limit), distribution=None, point_mass=known)


def drafts(texts, room=K, longest_text=None, speculation=Speculation(K, lookup=True)):  # noqa: B008
    """The drafts of each row, and which of them are point masses. Tokens past the end of a text must not matter."""
    tokens = np.full((len(texts), S), 4)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    context = lookup_context(jnp.asarray(tokens), jnp.array([*map(len, texts)]), jnp.broadcast_to(room, len(texts)))
    drafter = with_lookup(Counting(longest_text), speculation)
    state, proposal = jax.jit(drafter.propose)(drafter.init(1, 1, jnp.float32, 1), context)
    assert int(state) == 1, "the drafter was asked once"
    assert proposal.point_mass.shape == proposal.tokens.shape
    rows = zip(proposal.tokens, proposal.point_mass, proposal.count, strict=True)
    return [(tokens[:n].tolist(), point_mass[:n].tolist()) for tokens, point_mass, n in rows]


def own(count=K):
    """The drafts of ``Counting``."""
    return [*range(OWN, OWN + count)], [False] * count


def looked_up(*tokens):
    return list(tokens), [True] * len(tokens)


def test_repeating_rows_are_looked_up_and_others_drafted():
    texts = [REPEATING, REPEATING[:-1], [1, 2, 3], [8] * 6, REPEATING[1:]]
    assert drafts(texts) == [looked_up(5, 6, 1, 2), own(), own(), looked_up(8, 8, 8, 8), own()]


def test_lookup_uses_suffixes_of_the_given_lengths():
    one_less = drafts([REPEATING, REPEATING[:-1], [1, 2, 3]], speculation=Speculation(K, lookup=True, ngram_min=3))
    assert one_less == [looked_up(5, 6, 1, 2), looked_up(4, 5, 6, 1), own()]
    text = [
        1,
        2,
        3,
        4,
        5,
        9,
        2,
        3,
        4,
        5,
        8,
        1,
        2,
        3,
        4,
        5,
    ]  # five tokens agree with the first place, four with the second
    shorter = Speculation(K, lookup=True, ngram_max=4)
    assert drafts([text]) == [looked_up(9, 2, 3, 4)]
    assert drafts([text], speculation=shorter) == [looked_up(8, 1, 2, 3)]


def test_with_lookup_off_returns_the_drafter_itself():
    assert with_lookup(Counting(), Speculation(K)) == Counting()
    beside = with_lookup(Counting(9), Speculation(K, lookup=True, ngram_min=2))
    assert beside == WithLookup(Counting(9), NGram(K, 2, 8))
    assert (beside.num_draft_tokens, beside.aux_layers, beside.longest_text, beside.slots_beyond) == (K, None, 9, 0)


@pytest.mark.parametrize("room", [0, 1, 3, K])
def test_no_more_drafts_than_room(room):
    """A row that is not live has room for 0 drafts."""
    assert drafts([REPEATING, [1, 2, 3]], room=room) == [looked_up(*[5, 6, 1, 2][:room]), own(room)]


@pytest.mark.parametrize(("limit", "count"), [(9, 0), (10, 1), (12, 3), (20, K)])
def test_rows_past_the_drafters_positions_are_looked_up(limit, count):
    texts = [REPEATING, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
    assert drafts(texts, longest_text=limit) == [looked_up(5, 6, 1, 2), own(count)]


PROMPT = [1, 2, 3, 4, 5, 6, 20, 1, 2, 3, 4]
WRONG = successor_table(wrong=range(V))  # a draft model that is always wrong


def test_engine_rounds_look_up_repeated_text():
    """The target counts up, which the prompt did before; what follows there is right up to 6, and 20 is not 7. Behind it
    nothing repeats, and the draft model is wrong."""
    models = bigram(successor_table()), bigram(WRONG)
    (alone,), (beside,) = (
        decode(
            engine("draft_model", models=models, lookup=lookup), [PROMPT], SamplingParams(temperature=0, max_tokens=6)
        )
        for lookup in (False, True)
    )
    assert alone.tokens == beside.tokens == [5, 6, 7, 8, 9, 10]
    assert (alone.accepted, beside.accepted) == ([0] * 6, [2, 0, 0, 0])
    assert set(beside.drafted) == {4}


def test_texts_past_the_draft_models_positions_are_still_looked_up():
    """It has ten, so that it never drafts; rounds that look their drafts up have four all the same."""
    models = bigram(successor_table()), bigram(WRONG, max_position=10)
    (active,) = decode(engine("draft_model", models=models, lookup=True), [PROMPT], GREEDY)
    assert active.tokens == [*range(5, V), *range(5)]
    assert active.drafted == [4, *[0] * 26]
    assert active.accepted == [2, *[0] * 26]


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_seed_gives_one_text_beside_any_neighbours(rule):
    """What is looked up depends on the request's own text alone."""
    serving = engine("draft_model", verify=rule, lookup=True, ngram_min=1)
    params = SamplingParams(temperature=0.7, max_tokens=20)
    prompts = [PROMPT, [3, 3, 3], [9, 8, 9, 8, 9]]
    together = decode(serving, prompts, params, [key_of(i) for i in range(3)])
    for i, prompt in enumerate(prompts):
        (alone,) = decode(serving, [prompt], params, [key_of(i)])
        assert (alone.tokens, alone.drafted, alone.accepted) == (
            together[i].tokens,
            together[i].drafted,
            together[i].accepted,
        )


def test_looked_up_drafts_have_the_highest_confidence():
    tokens = np.full((2, S), 4)
    for row, text in zip(tokens, (REPEATING, [1, 2, 3]), strict=True):
        row[: len(text)] = text
    lengths = jnp.array([len(REPEATING), 3])
    context = lookup_context(jnp.asarray(tokens), lengths, jnp.broadcast_to(K, 2))
    _, proposal = with_lookup(Counting(None), Speculation(K, lookup=True)).propose(jnp.int32(0), context)
    np.testing.assert_array_equal(proposal.confidence, [[LOOKUP_CONFIDENCE] * K, [0.5] * K])
