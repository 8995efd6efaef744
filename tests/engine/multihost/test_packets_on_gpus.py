"""Engines on several GPUs that exchange packets: texts, preemption, programs compiled in between, and a GPU that waits in
vain."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from packets import GPUS, needs

import jspec
from jspec.engine.runner.model_runner import LostPacket
from jspec.pallas.collectives.workspace import are_lost

pytestmark = [pytest.mark.gpu, needs(2)]

FAMILY = Path(jspec.__file__).parent / "demo_models"
PROMPTS = ["def add(a, b):\n", "import os\n\nfor name in", "class A:\n", "x = 1\n"]
SMALL = {"max_batch": 4, "max_len": 160, "page_size": 16, "num_pages": 64, "dtype": "float32", "num_draft_tokens": 4}
DRAFTS = ["eagle3", "draft"]


@functools.cache
def loaded(draft: str, count: int, **more) -> jspec.LLM:
    return jspec.load(FAMILY / "target", FAMILY / draft, tensor_parallel=count, **SMALL | more)


def texts(llm: jspec.LLM, **options) -> list[list[int]]:
    results = jspec.generate(llm, PROMPTS, **{"temperature": 0, "max_tokens": 64} | options)
    return [one.token_ids for one in results]


@pytest.mark.parametrize("n", GPUS[:2])  # the target has four heads
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_texts_are_those_of_one_gpu(draft, n):
    wanted = texts(loaded(draft, 1))
    llm = loaded(draft, n)
    assert texts(llm) == wanted
    epochs = np.asarray(llm.engine.runner.batch.state.exchange.epochs)
    assert epochs[0] > 64
    assert not are_lost(epochs)
    assert texts(loaded(draft, n, peer_packets=False)) == wanted


@pytest.mark.parametrize("n", GPUS[:2])
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_seed_means_one_text(draft, n):
    llm = loaded(draft, n)
    assert texts(llm, temperature=1, seed=3) == texts(llm, temperature=1, seed=3)


@pytest.mark.parametrize("n", GPUS[:2])
def test_preempted_requests_have_the_same_texts(n):
    """Pages go to the host and come back between exchanges, and programs are compiled when they are needed first."""
    roomy, tight = loaded("eagle3", n), loaded("eagle3", n, num_pages=12)
    assert texts(tight) == texts(roomy)
    assert tight.engine.metrics().num_preemptions > 0


@pytest.mark.parametrize("n", GPUS[:2])
def test_a_gpu_that_waits_in_vain_fails_requests_and_not_the_next_ones(n):
    llm = loaded("eagle3", n)
    wanted, runner = texts(llm), llm.engine.runner
    exchange, copies = runner.batch.state.exchange, []
    for place, shard in enumerate(exchange.epochs.addressable_shards):  # the last GPU is two exchanges ahead
        epochs = np.array(shard.data)
        epochs[0] += 2 * (place == n - 1)
        copies.append(jax.device_put(epochs, shard.device))
    apart = jax.make_array_from_single_device_arrays(exchange.epochs.shape, exchange.epochs.sharding, copies)
    runner.batch.state = dataclasses.replace(runner.batch.state, exchange=dataclasses.replace(exchange, epochs=apart))
    with pytest.raises(LostPacket, match=f"GPU {n - 1} was late: GPU 0"):
        texts(llm)
    assert texts(llm) == wanted
