"""Engines over several devices equal those on one: options, grammars, seeds, and a rebuilt state.

Disturbances are tested in test_equality.py, for kinds like ``eagle/4``, and changing K in
tests/engine/adaptive/test_auto.py.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from engines import GREEDY, decode, ragged_prompts, tokens_of
from requests_and_engines import engine_of

import jspec
from jspec.config import shards_of
from jspec.sampling.params import SamplingParams

FAMILY = Path(jspec.__file__).parent / "demo_models"
SMALL = {"max_batch": 2, "max_len": 96, "page_size": 16, "num_draft_tokens": 3, "dtype": "float32"}
PROMPTS = ["def add(a, b):\n", "import os\n\nfor name in"]
OPTIONS = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "biases": {"logit_bias": {665: -8.0, 258: -4.0}, "bad_words": ["if"]},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2},
    "sampling": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "seed": 7},
    "a grammar": {"structured_outputs": {"regex": "[a-z ]{5,20};"}},
}


@functools.cache
def loaded(tensor_parallel: int, draft: str, **more) -> jspec.LLM:
    return jspec.load(FAMILY / "target", FAMILY / draft, tensor_parallel=tensor_parallel, **SMALL, **more)


def outcomes(llm: jspec.LLM, options) -> list[tuple]:
    results = jspec.generate(llm, PROMPTS, **{"temperature": 0, "max_tokens": 24} | options)
    return [(one.token_ids, one.text, one.finish_reason) for one in results]


@functools.cache
def batch_sharded() -> jspec.LLM:
    """An engine whose devices verify one of two rows each."""

    def shards(*args):
        return tuple(one and dataclasses.replace(one, batch_sharded_from=0) for one in shards_of(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jspec.loading.plan.shards_of", shards)
        return jspec.load(FAMILY / "target", FAMILY / "eagle3", tensor_parallel=2, **SMALL)


@pytest.mark.parametrize("what", OPTIONS)
def test_options_have_the_same_effect_on_shards(what):
    found, wanted = (outcomes(loaded(count, "eagle3"), OPTIONS[what]) for count in (2, 1))
    assert found == wanted
    assert outcomes(batch_sharded(), OPTIONS[what]) == wanted
    assert what == "log-probabilities" or found != outcomes(loaded(1, "eagle3"), {})


@pytest.mark.long
@pytest.mark.parametrize("draft", ["draft", "eagle", "medusa", "mlp", "parallel"])
def test_every_shipped_draft_runs_on_shards(draft):
    for options in (OPTIONS["sampling"], {}):
        assert outcomes(loaded(2, draft), options) == outcomes(loaded(1, draft), options)


def test_a_seed_gives_one_text_on_shards():
    engine, params = engine_of("draft_model/2"), SamplingParams(temperature=1.0, max_tokens=20)
    first, second = (tokens_of(decode(engine, ragged_prompts(), params)) for _ in range(2))
    assert first == second


def test_every_device_holds_the_same_rows():
    """Whatever a program returns beside shards is bit for bit the same on every device, so that a later program may read
    any of them."""
    engine = engine_of("eagle/4")
    decode(engine, ragged_prompts(), SamplingParams(temperature=1.0, max_tokens=20))
    state = engine.runner.batch.state
    for array in jax.tree.leaves(
        (state.tokens, state.outcome, state.request, state.previous, state.features, state.draft)
    ):
        copies = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(copies) == 4
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies)


def test_lost_state_is_rebuilt_with_its_sharding():
    engine = engine_of("draft_model/2/2")
    places = [leaf.sharding for leaf in jax.tree.leaves(engine.runner.batch.state)]
    wanted = tokens_of(decode(engine, ragged_prompts(), GREEDY))
    for leaf in jax.tree.leaves(engine.runner.batch.state):
        leaf.delete()
    assert not engine.runner.restore()
    engine.scheduler.pages.forget_prefixes()
    found = [leaf.sharding for leaf in jax.tree.leaves(engine.runner.batch.state)]
    assert all(a.is_equivalent_to(b, 4) for a, b in zip(found, places, strict=True) if a.spec)
    assert tokens_of(decode(engine, ragged_prompts(), GREEDY)) == wanted
