"""A target with recurrent states: texts are the same however many drafts are made and however a prompt is cut, and what
would damage a state is seen.

``test_equality.py`` has the rest: preemption, cached prefixes, neighbours."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import calls_of_any_length, outcome_of, preempting, serve
from engines import HYBRID, MAX_LEN, hybrid, key_of, plain_greedy, requests_of
from heads import VARIANTS, random_head, serving
from requests_and_engines import CONFIG, PROMPTS, REQUESTS, K, P, alone, engine_of, passing
from tiers import in_tiers

from jspec.config import EngineConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.drafting.plain import NoDrafts
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.engine.runner.model_runner import ModelRunner
from jspec.engine.runner.recurrent import RecurrentRows
from jspec.engine.runner.saved import states
from jspec.engine.runner.step_io import PrefillInputs
from jspec.engine.runner.swap import Swaps
from jspec.sampling.params import SamplingParams
from jspec.sampling.streams import RoundNoise

pytestmark = pytest.mark.usefixtures("states_in_chunks")
GREEDY = SamplingParams(temperature=0, max_tokens=18)
COUPLED = [SamplingParams(temperature=t, max_tokens=16) for t in (0.8, 1.0, 1.3)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OtherNoise(RoundNoise):
    """The noise of a program that is not taken for another one, whose trace JAX would reuse where a fault is put in."""


def engine(drafts: int, config: EngineConfig = CONFIG, fault: bool = False, every: int = 2 * P, lengths=None) -> Engine:
    """An engine with the target, which makes so many drafts a round, or of ``lengths`` what its controller chooses, and a
    snapshot for so many tokens; a new one each time."""
    config, verify = dataclasses.replace(config, snapshot_every=every, width=K + 1), "match"
    if drafts:
        head = VARIANTS["mtp"]
        make = drafter_for(head, HYBRID, Speculation(drafts, verify, "coupled"))
        by = serving(head, random_head(head))
    else:
        make, by = (lambda *_: NoDrafts()), None
    noise = OtherNoise if fault else RoundNoise
    costs = {config.max_batch: dict.fromkeys(lengths or (), 1.0)}
    return Engine(hybrid(), by, Decoding(make, verify, noise, lengths), config, costs=costs)


def texts(of: Engine, requests) -> list[list[int]]:
    return [outcome[0] for outcome in alone(of, requests)]


COUPLED_REQUESTS = requests_of(PROMPTS, [COUPLED[i % 3] for i in range(len(PROMPTS))])


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    return texts(engine(0), COUPLED_REQUESTS)


@pytest.mark.parametrize("drafts", in_tiers((1, 2, 3, K), test=(K,)))
def test_a_seed_has_one_text_however_many_drafts_are_made(drafts, plain_texts):
    """With the same width: each token goes through the same arithmetic, whether it is verified, folded or both."""
    assert texts(engine(drafts), COUPLED_REQUESTS) == plain_texts


@pytest.mark.nightly
def test_a_seed_has_one_text_while_the_number_of_drafts_changes(plain_texts):
    """From call to call, so that tokens are folded in passes of other sizes than those that read them."""
    of, script = (
        engine(K, dataclasses.replace(CONFIG, rounds=2), lengths=(0, 1, K)),
        itertools.cycle((K, 0, K, 1, 0, 0, 1)),
    )
    of.loop.controller.choose = lambda rows, requests=(): next(script)
    actives = serve(of, COUPLED_REQUESTS)
    assert [outcome_of(active)[0] for active in actives] == plain_texts
    assert {count for active in actives for count in active.drafted} >= {0, 1, K}


@pytest.mark.nightly
@pytest.mark.parametrize("drafts", [0, K])
def test_greedy_texts_are_those_of_whole_passes(drafts):
    requests = requests_of(PROMPTS, [GREEDY] * len(PROMPTS))
    assert texts(engine(drafts), requests) == [text[:18] for text in plain_greedy(hybrid(), PROMPTS)]


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["eagle", "eagle3", "p-eagle", "mlp", "medusa", "dflash", "dflash2", "dspark"])
def test_greedy_texts_are_the_same_with_every_kind_of_head(head):
    config = VARIANTS[head]
    make, by = drafter_for(config, HYBRID, Speculation(K - 1)), serving(config, random_head(config))
    of = Engine(hybrid(), by, Decoding(make, "rejection"), dataclasses.replace(CONFIG, snapshot_every=2 * P))
    requests = requests_of(PROMPTS, [GREEDY] * len(PROMPTS))
    assert texts(of, requests) == [text[:18] for text in plain_greedy(hybrid(), PROMPTS)]


def state_behind(prompt: list[int], every: int) -> list[np.ndarray]:
    """The recurrent states of a prompt's row, once it was prefilled in batches of up to so many tokens."""
    one = engine(0, every=every)
    serve(one, [Request(0, prompt, SamplingParams(temperature=0, max_tokens=1), key_of(0))])
    return [np.asarray(layer.S)[0] for layer in states(one.runner.batch.state.cache) if layer is not None]


@pytest.mark.parametrize("length", in_tiers((2, P, P + 1, P + 2, 4 * P + 3), test=()))
def test_states_have_the_same_bits_however_a_prompt_is_cut(length):
    """One chunk at a time, two, or all."""
    prompt = [(7 * i + 3) % HYBRID.vocab_size for i in range(length)]
    first, *others = [state_behind(prompt, every) for every in (P, 2 * P, 8 * P)]
    assert len(first) == 2
    assert all(np.any(state) for state in first)
    for other in others:
        assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_chunks_that_end_within_those_of_states_are_refused():
    with pytest.raises(ValueError, match=f"prefill_chunk={P - 1}: expected a multiple of {P}"):
        engine(0, dataclasses.replace(CONFIG, prefill_chunk=P - 1))


@pytest.mark.nightly
def test_twenty_thousand_requests_have_the_texts_that_they_have_alone():
    """With drafts, preemption, cached prefixes, and neighbours that are given up, in calls of any length."""
    of, rng = engine_of("hybrid"), np.random.default_rng(11)
    beginnings = [rng.integers(HYBRID.vocab_size, size=6 * P).tolist() for _ in range(4)]
    prompts = []
    for _ in range(100):
        shared, own = beginnings[rng.integers(4)][: rng.integers(6 * P + 1)], rng.integers(1, 6)
        prompts.append([*shared, *rng.integers(HYBRID.vocab_size, size=own).tolist()])
    chosen = [COUPLED[i % 3] if i % 4 else GREEDY for i in range(len(prompts))]
    lengths = rng.integers(1, 12, size=len(prompts)).tolist()
    params = [dataclasses.replace(one, max_tokens=most) for one, most in zip(chosen, lengths, strict=True)]
    requests = requests_of(prompts, params)
    expected = alone(of, requests)
    with preempting(of, every=20), calls_of_any_length(of):
        for _ in range(10):
            which = rng.integers(len(requests), size=2_000).tolist()
            actives = serve(of, [requests[i] for i in which], at_a_time=5, neighbour=passing)
            assert [outcome_of(active) for active in actives] == [expected[i] for i in which]
            of.scheduler.pages.forget_prefixes()
    counts = of.metrics()
    assert counts.num_preemptions > 1_000
    assert counts.num_cached_tokens > 20_000


# Faults that the checks above and those of test_equality.py have to see.


def commit_one_more(rows: RecurrentRows, count, live):
    return rows._replace(accepted=jnp.where(live, jnp.minimum(count + 1, K + 1), rows.accepted))


def commit_all_drafts(rows: RecurrentRows, count, live):
    return rows._replace(accepted=jnp.where(live & (count > 0), K + 1, rows.accepted))


def commit_of_a_neighbour(rows: RecurrentRows, count, live):
    return rows._replace(accepted=jnp.where(live, jnp.roll(count, 1), rows.accepted))


@pytest.mark.parametrize(
    "commit", in_tiers((commit_one_more, commit_all_drafts, commit_of_a_neighbour), test=(commit_all_drafts,))
)
def test_a_wrong_count_of_committed_tokens_is_detected(commit, monkeypatch, plain_texts):
    """One token too many is folded, the refused drafts are, or as many as another row has committed."""
    monkeypatch.setattr(RecurrentRows, "commit", commit)
    broken = engine(K, fault=True)
    together = [outcome_of(active)[0] for active in serve(broken, COUPLED_REQUESTS)]
    assert together != plain_texts


@pytest.mark.nightly
def test_a_row_that_is_not_reset_is_detected(monkeypatch, plain_texts):
    """A text begins with what another one has left in its row."""
    rows = PrefillInputs.recurrent_rows
    never = lambda inputs, count: rows(inputs, count)._replace(fresh=jnp.zeros(len(inputs.row), bool))  # noqa: E731
    monkeypatch.setattr(PrefillInputs, "recurrent_rows", never)
    assert texts(engine(0, fault=True), COUPLED_REQUESTS) != plain_texts


def test_snapshots_after_drafts_are_detected(monkeypatch):
    """A snapshot is to be made behind the prefill batch; this one is made a call later, when the row has gone on."""
    of, execute, late = engine_of("hybrid"), ModelRunner.execute, []

    def execute_late(runner, schedule, shape):
        made, schedule.snapshots = schedule.snapshots, []
        sent = execute(runner, schedule, shape)
        for snapshot in late:
            snapshot.saved = runner._swaps.save_states(snapshot.row)
        late[:] = made
        schedule.snapshots = made
        return sent

    of.scheduler.pages.forget_prefixes()
    text = [(5 * i + 1) % HYBRID.vocab_size for i in range(5 * P)]
    requests = [Request(i, [*text, i], SamplingParams(temperature=0, max_tokens=6), key_of(i)) for i in range(4)]
    expected = alone(of, requests)
    monkeypatch.setattr(ModelRunner, "execute", execute_late)
    actives = serve(of, requests, at_a_time=1)
    of.scheduler.pages.forget_prefixes()
    assert any(active.num_cached_tokens for active in actives)
    assert [outcome_of(active) for active in actives] != expected


def test_states_that_do_not_come_back_are_detected(monkeypatch):
    """A request is swapped with its states; here it finds those of whoever had the row."""
    of = engine_of("hybrid")
    expected = alone(of, REQUESTS)
    monkeypatch.setattr(Swaps, "restore_states", lambda *_: None)
    with preempting(of):
        assert [outcome_of(active) for active in serve(of, REQUESTS)] != expected
    of.scheduler.pages.forget_prefixes()


def test_texts_are_long_enough_for_several_chunks():
    assert max(map(len, PROMPTS)) > 4 * P
    assert MAX_LEN > 8 * P
