"""``tree="auto"``: whatever is chosen between calls, texts are the target's own, and drafts as good as without a change."""

import dataclasses
import functools
import itertools
from types import SimpleNamespace

import pytest
from disturbances import ScriptedController, calls_of_any_length, few_pages, preempting, serve
from engines import MAX_LEN, TARGET, assert_nothing_is_held
from heads import HEADS, random_head, serving
from tree_engines import CONFIG, REQUESTS, llm_of, target_of, with_params

import jspec
from jspec.config import EngineConfig, Speculation, TreeShape
from jspec.config.speculation import AUTO_TREES
from jspec.drafting.methods import drafter_for
from jspec.engine.adaptive.controller import Controller
from jspec.engine.request import ActiveRequest
from jspec.llm import LLM
from jspec.loading.compatibility import with_available_drafts
from jspec.serving.server.app import _card

TREE, CHAIN = AUTO_TREES[0], 2
CYCLE = (TREE, 0, TREE, CHAIN, 1, TREE, TREE, 0, CHAIN, CHAIN, TREE, 1)
# At temperatures 0, 0.7 and 1, after prompts of all lengths.
SOME = [with_params([one], temperature=(0, 0.7, 1.0)[i % 3])[0] for i, one in enumerate(REQUESTS)]


def llm(head: str = "eagle") -> LLM:
    return llm_of("plain", head, tree="auto", num_draft_tokens=CHAIN)


def serve_with(script, requests=SOME, head: str = "eagle", **how) -> tuple[list[ActiveRequest], ScriptedController]:
    engine = llm(head).engine
    engine.scheduler.pages.forget_prefixes()
    engine.loop.controller = controller = ScriptedController(script)
    return serve(engine, requests, **how), controller


def texts(actives: list[ActiveRequest]) -> list[list[int]]:
    return [active.tokens for active in actives]


@functools.cache
def expected() -> list[list[int]]:
    """The texts of ``SOME``, each by itself, of the target alone."""
    engine = llm_of("plain", None).engine
    return [texts(serve(engine, [one]))[0] for one in SOME]


def by_length(active: ActiveRequest) -> dict[tuple[int, int], int]:
    """Committed tokens when a round began, and how many drafts it had -> how many of them were accepted."""
    found, length = {}, len(active.request.prompt)
    for drafted, accepted in zip(active.drafted, active.accepted, strict=True):
        found[length, drafted] = accepted
        length += accepted + 1
    return found


def test_texts_are_the_targets_own_whatever_is_chosen():
    """Chains, trees and plain rounds alternate within a text, and the drafter catches up in between: it accepts what it
    would if nothing had changed."""
    changing, controller = serve_with(itertools.cycle(CYCLE))
    assert texts(changing) == expected()
    assert {shape for shape, *_ in controller.observed} == {0, 1, CHAIN, TREE}
    assert any({0, CHAIN, TREE.nodes - 1} <= set(active.drafted) for active in changing), "no text has all of them"
    compared = 0
    for always in (CHAIN, TREE):
        steady, _ = serve_with(itertools.repeat(always))
        assert texts(steady) == expected()
        for one, other in zip(map(by_length, steady), map(by_length, changing), strict=True):
            same = one.keys() & other.keys()
            assert {at: one[at] for at in same} == {at: other[at] for at in same}
            compared += sum(one[at] > 0 for at in same)
    assert compared > 5
    assert_nothing_is_held(llm().engine)


def test_the_window_of_less_depth_is_caught_up_first(monkeypatch):
    """After a tree, or a longer chain; after plain rounds the drafter has caught up by itself."""
    sent, batch = [], llm().engine.runner.batch
    shapes, send = {program: shape for (_, shape), program in batch.programs.decode.items()}, batch.send
    monkeypatch.setattr(batch, "send", lambda program, *args: sent.append(program) or send(program, *args))
    serve_with(itertools.cycle(CYCLE), SOME[-1:])
    asked = [shapes.get(program, "catch up") for program in sent if program in (*shapes, batch.programs.catch_up)]
    around = {(asked[i - 1], asked[i + 1]) for i, what in enumerate(asked) if what == "catch up"}
    assert around == {(TREE, CHAIN), (CHAIN, 1)}
    assert (TREE, CHAIN) not in set(itertools.pairwise(asked))


def test_texts_under_preemption_and_with_few_pages():
    """Slots are reserved for the largest tree, whichever shape comes next."""
    engine = llm().engine
    assert engine.runner.num_draft_tokens + engine.runner.slots_beyond == TREE.nodes - 1
    with preempting(engine, every=2), calls_of_any_length(engine):
        assert texts(serve_with(itertools.cycle(CYCLE))[0]) == expected()
    with few_pages(engine, MAX_LEN // CONFIG.page_size):
        assert texts(serve_with(itertools.cycle(CYCLE[::-1]), at_a_time=2)[0]) == expected()


@pytest.mark.parametrize(("most", "chosen"), [(0, {0}), (1, {1}), (2, {CHAIN}), (20, {TREE})])
def test_requests_that_want_few_drafts_have_chains(most, chosen):
    """Of as many drafts as all of them want, if there are such chains."""
    actives, controller = serve_with(itertools.repeat(TREE), with_params(SOME[:4], max_drafts=most))
    assert texts(actives) == expected()[:4]
    assert {shape for shape, *_ in controller.observed} == chosen
    assert max(max(active.drafted) for active in actives) == most
    assert not any(accepted for *_, accepted in controller.observed), (
        "they say nothing of drafts that were not verified"
    )


def test_requests_with_options_have_chains_as_under_a_shape():
    actives, _ = serve_with(itertools.cycle(CYCLE), [*with_params(SOME[:2], logprobs=1, max_tokens=6), *SOME[2:5]])
    assert texts(actives) == [expected()[0][:6], expected()[1][:6], *expected()[2:5]]
    assert max(max(active.drafted) for active in actives[:2]) == TREE.depth == llm().engine.runner.num_draft_tokens


@pytest.mark.parametrize(("seconds", "never"), [({0: 9, 1: 9, 2: 9, TREE: 1}, 2), ({0: 9, 1: 9, 2: 1, TREE: 9}, TREE)])
def test_the_engine_takes_what_promises_most(seconds, never):
    engine = llm().engine
    engine.loop.controller = Controller({CONFIG.max_batch: seconds})
    actives = serve(engine, SOME)
    assert texts(actives) == expected()
    drafted = {drafted for active in actives for drafted in active.drafted}
    assert (TREE.nodes - 1 in drafted) == (never != TREE)


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["eagle3", "jetspec"])
def test_texts_with_other_heads(head):
    assert texts(serve_with(itertools.cycle(CYCLE), head=head)[0]) == expected()


@pytest.mark.nightly
def test_nothing_is_compiled_after_warmup(xla_compilations):
    """Which measures the costs of all shapes, in programs of one, four and eight rows, whose trees differ."""
    config = dataclasses.replace(CONFIG, max_batch=8, num_pages=None)
    fresh = llm_of("plain", "eagle", config, tree="auto", num_draft_tokens=1).warmup()
    assert fresh.costs is not None
    assert {rows: {*shapes} for rows, shapes in fresh.costs.rounds.items()} == {
        **{1: {0, 1, AUTO_TREES[0]}, 4: {0, 1, AUTO_TREES[0]}, 8: {0, 1, AUTO_TREES[1]}}
    }
    programs, compiled = fresh.engine.num_compilations, len(xla_compilations)
    turns, shapes = itertools.count(), {rows: [*by_rows] for rows, by_rows in fresh.costs.rounds.items()}
    fresh.engine.loop.controller = controller = ScriptedController(())
    controller.choose = lambda rows, _: shapes[rows][next(turns) % 3]
    assert texts(serve(fresh.engine, SOME)) == expected()
    assert texts(serve(fresh.engine, SOME, at_a_time=1)) == expected()
    serve(fresh.engine, with_params(SOME[:3], logprobs=1))
    assert (fresh.engine.num_compilations, len(xla_compilations)) == (programs, compiled)


def test_what_is_said_of_it():
    model = llm()
    assert "num_draft_tokens=2, verify='match', tree='auto'" in repr(model)
    assert not model.reproducible, "chains and trees add up in other orders"
    service = SimpleNamespace(llm=model, created=0, names=["model"], max_len=MAX_LEN, chats=False)
    said = _card(service, "model")["speculation"]
    assert (said["tree"], said["draft_lengths"], said["most_draft_tokens"]) == ("auto", (0, 1, 2), TREE.depth)


def test_a_program_of_many_rows_alone_warns_that_it_has_no_trees():
    head, settings = HEADS["eagle"], Speculation(2, tree="auto")
    make, config = drafter_for(head, TARGET, settings), EngineConfig(max_batch=32, max_len=MAX_LEN, num_pages=40)
    arguments = target_of("plain"), serving(head, random_head(head)), make, "eagle", None, settings, config
    with pytest.warns(UserWarning, match=r"^tree='auto': every program has 32 rows, too many for trees to pay"):
        pinned = LLM(*arguments, costs={32: dict.fromkeys((0, 1, 2), 1.0)})
    assert pinned.engine.runner.slots_beyond == 0


def test_settings_beside_it():
    settings = Speculation(tree="auto")
    assert (settings.verify, settings.draft_sampling, settings.auto) == ("match", "coupled", True)
    assert (settings.draft_lengths, settings.most_draft_tokens) == ((0, 1, 2, 3, 4), 6)
    assert Speculation("auto", tree="auto").draft_lengths == (0, 1, 2, 3, 4, 6, 8)
    assert Speculation("auto", tree="auto", max_draft_tokens=3).draft_lengths == (0, 1, 2, 3)
    assert Speculation(9, tree="auto").most_draft_tokens == 9
    assert dataclasses.replace(settings) == settings
    assert settings.fixed(3) == Speculation(3, "match", "coupled")
    assert settings.fixed(TreeShape(8, 3, 2)) == Speculation(tree=TreeShape(8, 3, 2))
    assert [settings.trees(rows) for rows in (1, 4, 5, 16, 17)] == [
        *[(AUTO_TREES[0],)] * 2,
        *[(AUTO_TREES[1],)] * 2,
        (),
    ]
    assert [settings.width(rows) for rows in (1, 4, 8, 16, 64)] == [32, 32, 16, 8, 7]
    with pytest.warns(UserWarning, match=r"^num_draft_tokens=9: .* so a round drafts 4"):
        assert with_available_drafts(Speculation(9, tree="auto"), HEADS["dflash"]).draft_lengths[-1] == 4


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens=0: expected 'auto' or at least 1 with tree='auto'"),
        ({"num_draft_tokens": 2.5}, "num_draft_tokens=2.5: expected an integer"),
        ({"max_draft_tokens": 3}, "max_draft_tokens=3 has no place with num_draft_tokens=4"),
        ({"verify": "block"}, "verify='block' has no place with a tree"),
        ({"draft_sampling": "sample"}, "draft_sampling='sample' has no place with a tree"),
        ({"verify_budget": "auto"}, "verify_budget='auto' has no place with a tree"),
        ({"lookup": True}, "lookup=True has no place with a tree"),
        ({"tree": "Auto"}, "tree='Auto': expected None or a jspec.TreeShape"),
    ],
)
def test_settings_that_have_no_place_beside_it(fields, said):
    with pytest.raises(ValueError, match=rf"^{said}"):
        Speculation(**{"tree": "auto", **fields})


def test_what_depends_on_measured_times_is_not_reproducible():
    with pytest.raises(ValueError, match=r"^reproducible=True has no place with tree='auto'.*; leave either out$"):
        jspec.load("nowhere", "ngram", tree="auto", reproducible=True, width=32)
