"""``num_draft_tokens="auto"``: for any choice of K, texts, acceptance and counts are right, and nothing is compiled."""

import dataclasses
import itertools
from collections.abc import Iterable

import jax
import numpy as np
import pytest
from disturbances import ScriptedController
from engines import (
    CONFIG,
    GREEDY,
    TARGET,
    V,
    bigram,
    decode,
    draft,
    drafting,
    in_shards,
    key_of,
    plain_greedy,
    ragged_prompts,
    rounded,
    shared,
    successor_table,
    target,
    tokens_of,
)
from heads import HEADS, serving, trained_head

import jspec
from jspec.config import EngineConfig, Speculation
from jspec.config.sharding import AXIS
from jspec.drafting.methods import drafter_for
from jspec.engine.adaptive.controller import Controller
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest
from jspec.llm import LLM
from jspec.models.sharding import mesh_of, on_every_device
from jspec.outputs import Stats
from jspec.sampling.params import SamplingParams
from jspec.text.grammar.grammars import available

PROMPTS = ragged_prompts()
KEYS = [key_of(seed) for seed in range(len(PROMPTS))]
LENGTHS, FEW = (0, 1, 4), (0, 1, 2)  # what engines over decoders, and those over tables, choose from
CHEAP = {CONFIG.max_batch: dict.fromkeys((0, 1, 2, 4), 1.0)}
CYCLE = (4, 0, 4, 1, 0, 0, 1, 4, 1, 0)
TABLES = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 21, 22, 28)) / 10))


@shared
def auto_engine(method: str, verify: str = "rejection", width: int | None = None, **how) -> Engine:
    """An engine over real decoders with K of a script, two rounds a call. ``eagle/2`` has a target in two shards."""
    method, _, shards = method.partition("/")
    settings = Speculation(4, verify, **how)
    if method in HEADS:
        head = HEADS[method]
        make, by = drafter_for(head, TARGET, settings), serving(head, trained_head(head))
    else:
        make, by = drafting(method, settings), rounded(draft()) if method == "draft_model" else None
    config = dataclasses.replace(CONFIG, rounds=2, width=width)
    model = target()
    if shards:
        model, by = in_shards(model, int(shards)), on_every_device(by, mesh_of(int(shards), AXIS))
    return Engine(model, by, Decoding(make, verify, draft_lengths=LENGTHS), config, costs=CHEAP)


def table_llm(costs=None, width: int | None = None, config: EngineConfig = CONFIG, **how) -> LLM:
    """A model of tables under ``auto``, which drafts 0 to 2 tokens."""
    settings = Speculation("auto", max_draft_tokens=2, **how)
    config, make = dataclasses.replace(config, width=width), drafting("draft_model", settings)
    return LLM(*TABLES, make, "draft_model", None, settings, config, costs)


@shared
def table_engine() -> Engine:
    return table_llm(CHEAP).engine


def run_with(engine: Engine, script: Iterable[int], params=GREEDY) -> tuple[list[ActiveRequest], ScriptedController]:
    engine.loop.controller = controller = ScriptedController(script)
    return decode(engine, PROMPTS, params, KEYS), controller


def by_length(prompt, active: ActiveRequest) -> dict[int, tuple[int, int]]:
    """Committed tokens when a round began -> drafts it had, and how many were accepted."""
    begins = len(prompt) + np.concatenate([[0], np.cumsum(np.array(active.accepted) + 1)])[:-1]
    return dict(zip(begins.tolist(), zip(active.drafted, active.accepted, strict=True), strict=True))


@pytest.mark.parametrize(
    "method", ["draft_model", "eagle", "eagle/2", "ngram", pytest.param("medusa", marks=pytest.mark.long)]
)
def test_drafts_are_as_good_as_if_K_had_never_changed(method):
    """Greedy texts are the target's, and a round of 4 drafts at some length accepts what it would without any
    change."""
    engine = auto_engine(method)
    always, _ = run_with(engine, itertools.repeat(4))
    changing, _ = run_with(engine, itertools.cycle(CYCLE))
    assert tokens_of(always) == tokens_of(changing) == plain_greedy(target(), PROMPTS)
    compared = 0
    for prompt, one, other in zip(PROMPTS, always, changing, strict=True):
        steady, mixed = by_length(prompt, one), by_length(prompt, other)
        for length in steady.keys() & mixed.keys():
            if mixed[length][0] == steady[length][0]:
                assert mixed[length][1] == steady[length][1]
                compared += steady[length][1] > 0
    assert compared >= 5


def test_the_window_of_a_smaller_K_is_caught_up_first(monkeypatch):
    """Without the program between, heads would draft from their own guesses, and accept less."""
    engine = auto_engine("eagle")
    sent, runner = [], engine.runner
    send = runner.batch.send
    monkeypatch.setattr(runner.batch, "send", lambda program, *args: sent.append(program) or send(program, *args))
    run_with(engine, itertools.cycle(CYCLE))
    lengths = {program: K for (_, K), program in runner.batch.programs.decode.items()}
    asked = [program for program in sent if program in lengths or program is runner.batch.programs.catch_up]
    before = [lengths[asked[i - 1]] for i, what in enumerate(asked) if what is runner.batch.programs.catch_up]
    assert set(before) == {4}  # before 1, and not after a rest, which caught up itself


def test_match_with_coupled_drafts_at_one_width_gives_one_text():
    """Whatever chooses K: a real controller under costs that make it change its mind, a script, or none."""
    engine = auto_engine("draft_model", "match", 5, draft_sampling="coupled")
    params = SamplingParams(temperature=0.9, max_tokens=40)
    fixed = [tokens_of(run_with(engine, itertools.repeat(K), params)[0]) for K in LENGTHS]
    assert fixed == [fixed[0]] * len(LENGTHS)
    assert tokens_of(run_with(engine, itertools.cycle(CYCLE), params)[0]) == fixed[0]

    engine.loop.controller, chosen = Controller({CONFIG.max_batch: {0: 1.0, 1: 1.6, 4: 3.0}}), []
    choose = engine.loop.controller.choose
    engine.loop.controller.choose = lambda *what: chosen.append(choose(*what)) or chosen[-1]
    assert tokens_of(decode(engine, PROMPTS, params, KEYS)) == fixed[0]
    assert {0, 1} <= set(chosen)


@pytest.mark.parametrize("costs", [CHEAP, None], ids=["given", "measured"])
def test_nothing_is_compiled_while_K_varies(xla_compilations, costs):
    fresh = table_llm(costs).warmup().engine
    # Prefill, with log-probabilities too, admit, save, restore, catch-up, a decode for each, one that processes logits, and
    # four for grammars.
    programs = 7 + len(FEW) + 4 * available()
    assert fresh.num_compilations == programs
    before = len(xla_compilations)
    assert before > 0  # the listener hears
    chosen = fresh.loop.controller
    run_with(fresh, itertools.cycle((2, 0, 2, 1, 0, 0, 1)), SamplingParams(temperature=1.0, max_tokens=40))
    fresh.loop.controller = chosen
    decode(fresh, PROMPTS, GREEDY, KEYS)
    fresh.warmup()
    assert fresh.loop.controller is chosen  # measured once
    assert fresh.num_compilations == programs
    assert len(xla_compilations) == before


def test_costs_are_measured_unless_given():
    """In the first run, without a warm-up before; and the engine is as fresh after it."""
    small = dataclasses.replace(CONFIG, num_pages=CONFIG.pages_per_row)  # fewer pages than the rows could have
    llm = table_llm(config=small)
    assert llm.costs is None
    assert jspec.generate(llm, [4, 5], temperature=0, max_tokens=9).token_ids == list(range(6, 15))
    costs = llm.costs
    assert costs is not None
    assert (costs.device, costs.method) == (jax.devices()[0].device_kind, "draft_model")
    seconds = costs.seconds(CONFIG.max_batch, FEW)
    assert all(0 < s < 10 for s in seconds.values())
    assert llm.engine.loop.controller.seconds == {CONFIG.max_batch: seconds}


def test_replacing_a_draft_resets_the_controller():
    engine = table_engine()
    engine.loop.controller = Controller({CONFIG.max_batch: dict.fromkeys(FEW, 1.0)})
    fresh = engine.loop.controller.acceptance
    decode(engine, PROMPTS, GREEDY, KEYS)
    assert (engine.loop.controller.acceptance != fresh).all()
    engine.replace_draft(TABLES[1])
    np.testing.assert_array_equal(engine.loop.controller.acceptance, fresh)


def test_the_controller_observes_the_rounds_that_count():
    engine = table_engine()
    ended, controller = run_with(engine, itertools.cycle((2, 1, 0)), SamplingParams(temperature=1.0, max_tokens=25))
    assert [K for K, _, _ in controller.observed[:6]] == [2, 1, 0, 2, 1, 0]
    assert all(0 < rounds <= CONFIG.rounds for _, rounds, _ in controller.observed)
    assert all(0 <= n <= K for K, _, accepted in controller.observed for n in accepted)
    observed = sorted(n for _, _, accepted in controller.observed for n in accepted)
    assert observed == sorted(n for active in ended for n in active.accepted)

    stop = lambda tokens, _: 3 if len(tokens) >= 3 else None  # noqa: E731
    engine.loop.controller = controller = ScriptedController(itertools.repeat(2))
    cut = decode(engine, PROMPTS, GREEDY, KEYS, find_stop=stop)
    assert sum(len(accepted) for _, _, accepted in controller.observed) == sum(len(p.accepted) for p in cut)


def test_a_trial_of_drafts_is_read_before_the_next_choice():
    """The choice after a trial depends on that one call with drafts, and calls may be ahead of what was read."""
    engine = table_engine()
    engine.loop.controller, order = Controller({CONFIG.max_batch: {0: 1.0, 1: 1.9, 2: 50.0}}), []
    choose, observe = engine.loop.controller.choose, engine.loop.controller.observe

    def chosen(*what) -> int:
        order.append((choose(*what), engine.loop.controller.trying))
        return order[-1][0]

    engine.loop.controller.choose = chosen
    engine.loop.controller.observe = lambda K, *what: order.append("read") or observe(K, *what)
    decode(
        engine, PROMPTS[: CONFIG.max_batch], SamplingParams(temperature=1.0, max_tokens=30), KEYS[: CONFIG.max_batch]
    )
    trials = [i for i, event in enumerate(order) if event != "read" and event[1]]
    assert trials
    for i in trials:
        assert order[i + 1 : i + 3] == ["read", "read"]  # the call before it, and the trial
    assert any(a != "read" != b for a, b in itertools.pairwise(order)), "no call was sent ahead"


def test_statistics_are_right_while_K_varies():
    llm = table_llm(CHEAP, config=dataclasses.replace(CONFIG, rounds=1))
    llm.engine.loop.controller = ScriptedController(
        [2, 0, 2, 1, 2, 2]
    )  # the last call is sent before the one that ends is read
    result = jspec.generate(llm, [0], temperature=0, max_tokens=11)
    assert result.token_ids == list(range(1, 12))
    assert not result.reproducible
    # 1 2 | 3; 4; 5 6 | 7; none after 7, so 8; 9 10 | 11
    assert result.stats == Stats(5, 7, 6, (2, 0, 3), accepted_per_position=(3, 3), drafted_per_position=(4, 3))
    assert result.stats.acceptance_rate_per_position == (3 / 4, 1.0)
    assert result.stats.mean_draft_tokens == 7 / 5


@pytest.mark.parametrize(
    ("width", "how", "reproducible"),
    [
        (5, {"verify": "match", "draft_sampling": "coupled"}, True),
        (None, {"verify": "match", "draft_sampling": "coupled"}, False),
        (5, {"verify": "match", "draft_sampling": "argmax"}, False),
        (5, {"verify": "rejection"}, False),
    ],
)
def test_results_say_whether_they_are_reproducible(width, how, reproducible):
    assert table_llm(CHEAP, width, **how).reproducible == reproducible


def test_plain_decoding_has_no_controller():
    settings = Speculation("auto")
    plain = LLM(TABLES[0], None, drafting(None, settings), None, None, settings, CONFIG)
    result = jspec.generate(plain, [5], seed=0, max_tokens=9)
    assert (plain.costs, result.reproducible, result.stats.num_draft_tokens) == (None, True, 0)


def test_a_pinned_width_must_hold_the_largest_K():
    with pytest.raises(ValueError, match="width=2: expected at least num_draft_tokens \\+ 1, which is 3"):
        table_llm(CHEAP, 2)


def test_only_drafts_that_never_pay_are_switched_off():
    settings, wrong = Speculation(4), bigram(successor_table(range(V)) / 10)
    make = drafting("draft_model", settings)
    engine = Engine(
        TABLES[0],
        wrong,
        Decoding(make, "rejection", draft_lengths=(0, 4)),
        CONFIG,
        costs={CONFIG.max_batch: {0: 1.0, 4: 1.5}},
    )

    def drafts_a_step() -> float:
        ended = decode(engine, [[i] for i in range(12)], GREEDY)
        assert tokens_of(ended) == [[(i + 1 + n) % V for n in range(39)] for i in range(12)]
        return sum(sum(p.drafted) for p in ended) / sum(len(p.drafted) for p in ended)

    assert drafts_a_step() < 0.8
    engine.replace_draft(TABLES[0])
    assert drafts_a_step() > 3.5


class TestCaps:
    """Requests that want fewer drafts than the engine would make."""

    def capped(self, script, most) -> tuple[list[ActiveRequest], ScriptedController]:
        return run_with(table_engine(), script, [dataclasses.replace(GREEDY, max_drafts=m) for m in most])

    def test_calls_make_no_more_drafts_than_the_largest_cap(self):
        ended, controller = self.capped(itertools.repeat(2), [0] * len(PROMPTS))
        assert tokens_of(ended) == tokens_of(run_with(table_engine(), itertools.repeat(0))[0])
        assert {K for K, _, _ in controller.observed} == {0}
        _, controller = self.capped(itertools.repeat(2), [1] * len(PROMPTS))
        assert {K for K, _, _ in controller.observed} == {1}

    def test_the_choice_stands_while_one_request_has_no_cap(self):
        most = [None if i == len(PROMPTS) - 1 else 0 for i in range(len(PROMPTS))]
        ended, controller = self.capped(itertools.repeat(2), most)
        assert {K for K, _, _ in controller.observed} == {0, 2}
        assert all(set(active.drafted) == {0} for active in ended[:-1])

    def test_unverified_drafts_do_not_count_for_acceptance(self):
        _, controller = self.capped(itertools.repeat(2), [1] * len(PROMPTS))
        assert [accepted for _, _, accepted in controller.observed] == [[]] * len(controller.observed)
