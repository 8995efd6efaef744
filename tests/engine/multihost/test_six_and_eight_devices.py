"""Engines over 6 and 8 simulated devices that add up as GPUs with packets do: texts, seeds, preemption and a device that
is late, for targets of every kind of shard.

KV heads are fewer than devices, so that each has a copy of one; the vocabulary has 13 groups of tokens, of which the last
devices have fewer or none; and each device verifies some of the rows where their number allows."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
from packets import lose
from tiny import tiny_checkpoint, wide

import jspec
from jspec.config import shards_of
from jspec.engine.runner import shard_map
from jspec.engine.runner.model_runner import LostPacket

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_groups")]

SMALL = {"max_len": 64, "page_size": 8, "prefill_chunk": 64, "dtype": "float32", "num_draft_tokens": 3}
KINDS = {
    "dense": "LlamaForCausalLM",
    "columns of experts": "Qwen3MoeForCausalLM",
    "whole experts": "Qwen3MoeForCausalLM",
    "latents": "Glm4MoeLiteForCausalLM",
    "states": "Qwen3NextForCausalLM",
}
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [11] * 17, [9, 4, 30, 31], [*range(20, 43)], [1], [2, 3] * 5, [60, 61, 62]]
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
DRAWN = {"temperature": 1.0, "top_p": 0.95, "seed": 3, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(kind, number of devices, further options) -> its target with drafts that are looked up."""

    def spread(*args):
        return tuple(one and dataclasses.replace(one, batch_sharded_from=0) for one in shards_of(*args))

    @functools.cache
    def folder(kind: str) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("target"), KINDS[kind], **wide(KINDS[kind]))

    @contextlib.contextmanager
    def load(kind: str, n: int, rows: int, **more):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jspec.loading.plan.shards_of", spread)
            patch.setattr(shard_map, "reason_against_packets", lambda mesh: None)
            how = {"tensor_parallel": n, "expert_parallel": n > 1 and kind == "whole experts", "max_batch": rows}
            with jspec.load(folder(kind), "ngram", **SMALL, **how, **more) as llm:
                yield llm

    return load


def outcomes(llm: jspec.LLM, options) -> list[tuple]:
    results: Any = jspec.generate(llm, PROMPTS, **options)
    return [(one.token_ids, one.stats.num_accepted_draft_tokens) for one in results]


@pytest.mark.parametrize("n", [6, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_one_device(loaded, kind, n):
    with loaded(kind, 1, n) as one:
        wanted = [outcomes(one, options) for options in (GREEDY, DRAWN)]
    with loaded(kind, n, n, num_pages=16) as llm:  # as two texts need, so that others are preempted
        assert [outcomes(llm, options) for options in (GREEDY, DRAWN)] == wanted
        assert outcomes(llm, DRAWN) == wanted[1]
        assert llm.engine.metrics().num_preemptions > 0
        lose(llm.engine, late=n - 1)
        with pytest.raises(LostPacket, match=f"GPU {n - 1} was late: GPU 0, 1, .*{n - 2} waited for it"):
            outcomes(llm, GREEDY)
        assert outcomes(llm, GREEDY) == wanted[0]
    if kind != "states":  # whose random target repeats nothing that could be looked up
        assert sum(accepted for _, accepted in wanted[0]) > 0
