"""A draft model with gated delta nets in an engine: whatever happens to a request, its drafts are those of a pass over the
text.

``test_equality.py`` compares requests with themselves. ``tests/drafting/test_draft_rollback.py`` makes rounds by hand."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from disturbances import calls_of_any_length, few_pages, preempting, serve
from drafts_of_whole_passes import check_drafts
from engines import MAX_LEN, V, bigram, hybrid_draft, requests_of, shared
from lossless.distributions import Grammar
from lossless.served import Automaton
from requests_and_engines import CONFIG, PROMPTS, K, P, passing

from jspec.config import Speculation
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.lookup import with_lookup
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.engine.runner.split_rounds import SplitRounds
from jspec.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("states_in_chunks")
PARAMS = SamplingParams(temperature=1.0, max_tokens=18)
REQUESTS = requests_of(PROMPTS, [PARAMS] * len(PROMPTS))
# Nothing but 7 and then 4 may come in the first two states, which the draft model hardly ever drafts; then any token.
ONLY = tuple(tuple(state if v == token else -1 for v in range(V)) for token, state in ((7, 1), (4, 2)))
GRAMMAR = Grammar((*ONLY, tuple(0 if v % 2 else 2 for v in range(V))), (7, 4, -1))
SEEN: list[tuple[np.ndarray, ...]] = []  # the drafts of every round, as ``check_drafts`` takes them


@dataclasses.dataclass(frozen=True)
class Telling(DraftModel):
    """A draft model that tells its drafts."""

    def propose(self, state, context):
        state, proposal = super().propose(state, context)
        assert proposal.distribution is not None
        count = jax.numpy.where(context.live, proposal.count, 0)
        told = context.tokens, context.length, proposal.tokens, count, proposal.distribution.log_probs
        jax.debug.callback(lambda *arrays: SEEN.append(tuple(map(np.asarray, arrays))), *told)
        return state, proposal


class AnyK:
    """A stand-in for a ``Controller``, which has rounds of 0, 1 and K drafts."""

    trying = False

    def __init__(self):
        self._lengths = itertools.cycle((K, 0, K, 1, 0, 0, 1, K, 1, 0))

    def choose(self, rows: int, requests=()) -> int:
        del rows, requests
        return next(self._lengths)

    def observe(self, *_):
        pass


@shared
def engine(lengths: tuple[int, ...], **how) -> Engine:
    """One whose target is a table, under which any token may come, so that some drafts are accepted and some are not."""
    settings = Speculation(K, draft_sampling="sample", **how)

    def make(_, model, num_draft_tokens=None):
        some = settings if num_draft_tokens is None else settings.fixed(num_draft_tokens)
        return with_lookup(Telling(model, V, some), some)

    table = bigram(0.5 * np.random.default_rng(3).normal(size=(V, V)))
    config = dataclasses.replace(CONFIG, snapshot_every=2 * P)
    costs = {CONFIG.max_batch: dict.fromkeys(lengths, 1.0)}
    return Engine(table, hybrid_draft(), Decoding(make, "rejection", draft_lengths=lengths), config, costs=costs)


def check_rounds(least: int) -> int:
    """Check every draft so far, of which there are more than ``least``."""
    jax.effects_barrier()
    seen, SEEN[:] = [*SEEN], []
    checked = 0
    for rounds in seen:
        check_drafts(*rounds)
        checked += int(rounds[3].sum())
    assert checked > least
    return checked


def check_disturbed(of: Engine):
    """Requests under preemption, in calls of any length, beside neighbours that are given up; then with cached prompts."""
    of.scheduler.pages.forget_prefixes()
    for cached in (False, True):
        with calls_of_any_length(of), preempting(of), few_pages(of, 2 * MAX_LEN // P):
            actives = serve(of, REQUESTS, at_a_time=2, neighbour=passing)
        assert sum(active.num_preemptions for active in actives) > 5
        if cached:
            assert sum(active.num_cached_tokens > 0 for active in actives) >= 2
        accepted, drafted = (sum(sum(getattr(active, name)) for active in actives) for name in ("accepted", "drafted"))
        assert 0.1 * drafted < accepted < drafted
        check_rounds(100)


def test_drafts_under_all_disturbances_and_for_any_K():
    of = engine((0, 1, K))
    of.loop.controller = AnyK()
    check_disturbed(of)


@pytest.mark.nightly
def test_drafts_beside_prompt_lookup():
    """Looked-up drafts are read as the draft model's own."""
    of = engine((K,), lookup=True, ngram_min=1)
    serve(of, REQUESTS)
    check_rounds(100)


def constrained() -> list[Request]:
    """Every second request under the grammar."""
    return [
        dataclasses.replace(request, constraint=Automaton(GRAMMAR)) if i % 2 else request
        for i, request in enumerate(REQUESTS)
    ]


def test_drafts_behind_jump_forward_tokens():
    of = engine((0, 1, K))
    of.loop.controller = AnyK()
    serve(of, constrained(), at_a_time=3)
    check_rounds(100)


@pytest.mark.nightly
def test_jump_forward_tokens_that_are_not_read_are_detected(monkeypatch):
    """The draft model lags behind the text, and drafts nothing in rounds in which it has more than two tokens to read."""
    of = engine((0, 1, K))
    of.loop.controller = AnyK()
    drafted = []
    for catches_up in (True, False):
        if not catches_up:
            monkeypatch.setattr(SplitRounds, "_catch_up", lambda *_: None)
        serve(of, constrained(), at_a_time=3)
        drafted.append(check_rounds(50))
    assert drafted[1] < 0.9 * drafted[0]
