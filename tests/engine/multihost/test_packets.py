"""Engines whose devices add up by packets, as two GPUs do: on simulated devices XLA makes each of these sums, and
everything around them is the same."""

import jax
import numpy as np
import pytest
from engines import GREEDY, assert_nothing_is_held, decode, ragged_prompts, tokens_of
from packets import lose
from requests_and_engines import CONFIG, engine_of

from jspec.engine.runner import model_runner
from jspec.pallas.collectives.peers import MOST_TOKENS
from jspec.pallas.collectives.workspace import Workspace, are_lost
from jspec.sampling.logprobs import TokenLogprobs
from jspec.sampling.params import SamplingParams

DRAWN = SamplingParams(temperature=1.0, max_tokens=20)
KINDS = ["eagle/2", "draft_model/2/2"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_other_sums_and_of_one_device(kind):
    by_packets = engine_of(f"{kind}/packets")
    for params in (GREEDY, DRAWN):
        found, wanted = (
            tokens_of(decode(engine, ragged_prompts(), params)) for engine in (by_packets, engine_of(kind))
        )
        assert found == wanted
    alone = engine_of(kind.partition("/")[0])
    assert tokens_of(decode(by_packets, ragged_prompts(), GREEDY)) == tokens_of(decode(alone, ragged_prompts(), GREEDY))


def test_every_program_exchanges():
    """Those of requests with processors, and those that tell the log-probabilities of prompts, too."""
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.5}
    found, wanted = (
        decode(engine_of(kind), ragged_prompts(), SamplingParams(**options))
        for kind in (f"{KINDS[0]}/packets", KINDS[0])
    )
    assert tokens_of(found) == tokens_of(wanted)
    logprobs, its = (
        [
            TokenLogprobs.unpacked(np.asarray(packed)[place, :length]).chosen
            for one in decoded
            for length, packed, place in one.prompt_logprobs.values()
        ]
        for decoded in (found, wanted)
    )
    assert logprobs
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), logprobs, its)


@pytest.mark.parametrize("kind", KINDS)
def test_every_device_counts_the_same_exchanges(kind):
    engine = engine_of(f"{kind}/packets")
    before = np.asarray(engine.runner.batch.state.exchange.epochs)
    decode(engine, ragged_prompts(), DRAWN)
    exchange = engine.runner.batch.state.exchange
    copies = [np.asarray(shard.data) for shard in exchange.epochs.addressable_shards]
    assert len(copies) == 2
    assert np.array_equal(*copies)
    counted = copies[0] - before
    assert counted[0] > 0
    assert np.all(np.diff(counted) <= 0)  # the first blocks have tokens in every exchange
    assert exchange.room.tokens == MOST_TOKENS
    assert engine_of(kind).runner.batch.state.exchange is None


def test_lost_packets_fail_requests_and_the_next_ones_are_served():
    engine = engine_of("eagle/2/packets")
    wanted = tokens_of(decode(engine, ragged_prompts(), GREEDY))
    for late in range(2):
        before = engine.runner.batch.workspace
        lose(engine, late)
        message = f"GPU {late} was late: GPU {1 - late} waited for it for two seconds in vain"
        with pytest.raises(model_runner.LostPacket, match=message):
            decode(engine, ragged_prompts(), GREEDY)
        assert_nothing_is_held(engine)
        assert engine.runner.batch.workspace is not before
        assert tokens_of(decode(engine, ragged_prompts(), GREEDY)) == wanted
    assert not are_lost(engine.runner.batch.state.exchange.epochs)


def test_epochs_begin_anew_before_they_run_out(monkeypatch):
    engine = engine_of("eagle/2/packets")
    wanted = tokens_of(decode(engine, ragged_prompts(), DRAWN))
    monkeypatch.setattr(model_runner, "LAST_EPOCH", 20)
    before = engine.runner.batch.workspace
    assert tokens_of(decode(engine, ragged_prompts(), DRAWN)) == wanted
    assert engine.runner.batch.workspace is not before
    one_call = CONFIG.rounds * 100
    assert np.asarray(engine.runner.batch.state.exchange.epochs).max() < 20 + 4 * one_call


def test_a_workspace_that_cannot_be_made_leaves_the_old_one(monkeypatch):
    """A state with addresses of memory that nobody holds would have GPUs write anywhere."""
    runner = engine_of("eagle/2/packets").runner
    before = runner.batch.workspace, runner.batch.state

    def fail(workspace):
        raise MemoryError("no memory for addresses")

    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "exchange", fail)
        with pytest.raises(MemoryError, match="no memory for addresses"):
            runner.batch.begin_epochs_anew()
    assert runner.batch.workspace is before[0]
    assert runner.batch.state is before[1]
