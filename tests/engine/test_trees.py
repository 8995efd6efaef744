"""Requests of engines that draft trees: whatever happens around them, their texts are those of the target alone."""

import dataclasses
from pathlib import Path

import jax
import pytest
from disturbances import attribute, calls_of_any_length, few_pages, preempting, serve
from engines import MAX_LEN, assert_nothing_is_held, requests_of
from requests_and_engines import P, passing
from shared_prefixes import sharing_requests
from tiers import in_tiers
from tree_engines import (
    CONFIG,
    KINDS,
    OPTIONS,
    REQUESTS,
    SHAPE,
    alone,
    engine_of,
    expected,
    llm_of,
    texts,
    with_options,
    with_params,
)

import jspec
from benchmarks.rounds.hlo import moves
from jspec.engine.engine import Engine
from jspec.engine.request import FULL, STOPPED
from jspec.sampling.params import SamplingParams

LARGE = (33, 3, 4)  # nodes, depth, branch


@pytest.fixture(scope="module", params=in_tiers(KINDS, ["plain"]))
def kind(request) -> str:
    return request.param


@pytest.fixture
def engine(kind) -> Engine:
    return engine_of(kind)


def test_texts_are_the_targets_own(kind, engine):
    """At any temperature; more requests than rows, each of a row's first tokens and to its last slot."""
    actives = serve(engine, REQUESTS)
    assert texts(actives) == expected(kind)
    assert actives[-1].outcome == FULL
    assert len(actives[-1].request.prompt) + len(actives[-1].tokens) == MAX_LEN
    assert actives[0].drafted[:2] == [0, SHAPE.nodes - 1], "after a prompt of one token there is no feature yet"
    assert max(max(active.drafted) for active in actives) == SHAPE.nodes - 1
    assert max(max(active.accepted) for active in actives) == SHAPE.depth
    assert len(set(map(tuple, texts(actives)))) == len(actives)
    assert_nothing_is_held(engine)


def test_texts_of_one_row_and_of_calls_of_any_length(kind, engine):
    assert texts(serve(engine, REQUESTS, at_a_time=1)) == expected(kind)
    with calls_of_any_length(engine):
        assert texts(serve(engine, REQUESTS, at_a_time=2)) == expected(kind)


def test_texts_under_preemption_and_with_few_pages(kind, engine):
    """Trees hang over the pages of a row, which it gets in time; rows are swapped to the host and back."""
    before = engine.metrics().num_preemptions
    with preempting(engine):
        assert texts(serve(engine, REQUESTS)) == expected(kind)
    with few_pages(engine, MAX_LEN // P):
        assert texts(serve(engine, REQUESTS)) == expected(kind)
    assert engine.metrics().num_preemptions - before > 10


def test_texts_beside_aborted_neighbours(kind, engine):
    assert texts(serve(engine, REQUESTS, at_a_time=2, neighbour=passing)) == expected(kind)
    assert_nothing_is_held(engine)


def test_texts_of_cached_prompts(kind, engine):
    """Pages that rounds with trees have written are found by later prompts, those of answers among them."""
    requests = sharing_requests()
    own = alone(kind, requests)
    actives = serve(engine, requests, at_a_time=1)
    assert texts(actives) == own
    assert sum(active.num_cached_tokens > 0 for active in actives) > len(actives) // 3
    found = 0
    for one, tokens in zip(REQUESTS, expected(kind), strict=True):
        second = dataclasses.replace(one, prompt=[*one.prompt, *tokens, 1][: MAX_LEN - 6])
        *_, active = serve(engine, [one, second], at_a_time=1)
        assert [active.tokens] == alone(kind, [second])
        found += active.num_cached_tokens > len(one.prompt)
    assert found > len(REQUESTS) // 2


@pytest.mark.parametrize("most", [0, 1, 3, 20])
def test_requests_that_want_fewer_drafts(engine, kind, most):
    actives = serve(engine, with_params(REQUESTS, max_drafts=most))
    assert texts(actives) == expected(kind)
    assert max(max(active.drafted) for active in actives) == min(most, SHAPE.nodes - 1)


def test_stop_tokens_and_watchers_within_a_path(engine, kind):
    """A path is cut at a token that stops, wherever it stands in it; the least number of tokens counts along paths."""
    some, own = REQUESTS[-2:], expected(kind)[-2:]
    for place in range(1, 9):
        stops = [dataclasses.replace(one, stop_tokens=(tokens[place],)) for one, tokens in zip(some, own, strict=True)]
        for active, tokens in zip(serve(engine, stops), own, strict=True):
            assert active.tokens == tokens[: tokens.index(tokens[place]) + 1]
            assert active.outcome == STOPPED
        for least in (place, 12):
            late = with_params(stops, min_tokens=least)
            assert texts(serve(engine, late)) == alone(kind, late)
        found = lambda tokens, _, place=place: place + 1 if len(tokens) > place else None  # noqa: E731
        watched = requests_of(*zip(*((one.prompt, one.params, one.key_data) for one in some), strict=True), found)
        assert texts(serve(engine, watched)) == [tokens[: place + 1] for tokens in own]


def test_streams_and_statistics(kind):
    """Deltas add up to the result, whose statistics count nodes as drafts, and paths as accepted."""
    llm, params = llm_of(kind), SamplingParams(temperature=1.0, max_tokens=20, seed=5)
    *_, last = deltas = list(jspec.stream(llm, [REQUESTS[4].prompt], params))
    result = jspec.generate(llm, [REQUESTS[4].prompt], params)[0]
    assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
    assert last.result is not None
    assert (last.result.token_ids, last.result.stats) == (result.token_ids, result.stats)
    assert jspec.generate(llm_of(kind, None), [REQUESTS[4].prompt], params)[0].token_ids == result.token_ids
    stats = result.stats
    assert len(stats.acceptance_histogram) == SHAPE.depth + 1
    assert sum(stats.acceptance_histogram) == stats.num_steps
    assert stats.num_draft_tokens > SHAPE.depth * stats.num_steps
    assert set(stats.drafted_per_position) <= {stats.num_steps, stats.num_steps - 1}, (
        "all but the last round went as deep"
    )
    seen = set(result.sources)
    assert {"draft", "correction"} <= seen <= {"draft", "correction", "bonus"}
    assert "bonus" in seen or kind != "plain", "of other kinds, no path of this text may be accepted whole"
    assert not result.reproducible


def test_no_pool_of_pages_is_copied(engine):
    """As XLA has compiled the rounds for a CPU: the accepted path moves within the pools that a call is given."""
    serve(engine, [*REQUESTS[:1], *with_options(REQUESTS[:1], "logprobs")], at_a_time=1)
    batch = engine.runner.batch
    leaves = jax.tree.leaves((batch.state.cache, batch.state.draft))
    sizes = [leaf.nbytes for leaf in leaves if leaf.ndim > 1]  # without scales of heads
    rounds = (*batch.programs.decode.values(), *batch.programs.processing_decode.values())
    for program in (program for program in rounds if program.compiled):
        compiled = program._compiled
        assert compiled is not None
        text = compiled.as_text()
        assert f"[2,{CONFIG.pool_pages},{P},4]" in text, "its pools are known by their shape"
        assert [op.line for op in moves(text, min(sizes) / 2)] == []
        assert compiled.memory_analysis().alias_size_in_bytes >= sum(sizes)


@pytest.mark.nightly
def test_nothing_is_compiled_after_warmup(xla_compilations):
    llm = llm_of("plain", "eagle3", dataclasses.replace(CONFIG, num_pages=CONFIG.pages_per_row + 3))
    llm.warmup()
    wanted = expected("plain")  # which an engine without drafts may have to compile
    programs, compiled = llm.engine.num_compilations, len(xla_compilations)
    assert texts(serve(llm.engine, REQUESTS)) == wanted
    serve(llm.engine, [one for name in OPTIONS for one in with_options(REQUESTS, name)])
    assert llm.engine.metrics().num_preemptions
    assert (llm.engine.num_compilations, len(xla_compilations)) == (programs, compiled)


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["eagle3", "eagle-small", "dflash", "dspark"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (5, 3, 4), LARGE])
def test_texts_of_other_heads_and_shapes(head, shape):
    engine = llm_of("plain", head, tree=jspec.TreeShape(*shape)).engine
    with preempting(engine, every=2), calls_of_any_length(engine):
        assert texts(serve(engine, REQUESTS, at_a_time=3)) == expected("plain")


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(8, 4, None), (7, 5, 14), (3, 4, None)])
def test_texts_of_contexts_shorter_than_trees(sizes):
    """Of so many slots, in pages of so many, and with so many query tokens for each row."""
    config = dataclasses.replace(CONFIG, **dict(zip(("max_len", "page_size", "width"), sizes, strict=True)))
    some = [
        dataclasses.replace(one, prompt=list(one.prompt)[: 1 + i % (config.max_len - 1)])
        for i, one in enumerate(REQUESTS)
    ]
    trees, alone = (texts(serve(llm_of("plain", head, config).engine, some)) for head in ("eagle", None))
    assert trees == alone
    assert {len(tokens) for tokens in trees} == set(range(1, config.max_len))


@pytest.mark.parametrize("width", [5, 65])
def test_a_width_in_which_no_tree_fits_is_refused(width):
    with pytest.raises(ValueError, match=rf"width={width}: expected None or a number in \d+..64, from the nodes"):
        llm_of("plain", "eagle", dataclasses.replace(CONFIG, width=width))


@pytest.mark.nightly
def test_a_tree_beyond_the_pages_is_detected():
    """Were there pages for chains alone, the last drafts of a tree would be written nowhere."""
    engine = llm_of("plain", "eagle3", tree=jspec.TreeShape(*LARGE)).engine
    assert texts(serve(engine, REQUESTS)) == expected("plain")
    with attribute(engine.scheduler.requirements, "_ahead", engine.runner.num_draft_tokens):
        assert texts(serve(engine, REQUESTS)) != expected("plain")


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["eagle3", "dspark"])
def test_trees_of_the_shipped_models_accept_more_than_chains(head):
    """And the texts of all of them are the target's, greedy or not."""
    models, length, some = Path(jspec.__file__).parent / "demo_models", {}, []
    prompts = ["def main(", "class Foo:\n    def", "import os\n", "for i in range(", "The quick", "x = [1, 2"]
    params = [
        SamplingParams(temperature=i % 3 / 2, max_tokens=40, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    chains = {"num_draft_tokens": 3, "verify": "match", "draft_sampling": "coupled"}
    trees = {"tree": jspec.TreeShape(16, 3, 4), "reproducible": True}
    ways = {"plain": (None, {}), "chain": (head, chains), "tree": (head, trees)}
    for way, (draft, how) in ways.items():
        sizes = {"max_batch": 6, "max_len": 96, "dtype": "float32", "compilation_cache": False}
        with jspec.load(models / "target", draft and models / draft, **sizes, **how) as llm:
            results = jspec.generate(llm, prompts, params)
        some.append([result.token_ids for result in results])
        assert all(result.reproducible for result in results)
        stats = [result.stats for result in results]
        length[way] = sum(len(result.token_ids) for result in results) / sum(one.num_steps for one in stats)
    assert some[0] == some[1] == some[2]
    assert length["tree"] > length["chain"] + 0.2 > 1.5
    assert length["plain"] == 1
