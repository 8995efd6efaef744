"""Requests of many kinds, engines with a drafter of each kind, and what becomes of a request that is alone on one."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from disturbances import outcome_of, serve
from engines import (
    GREEDY,
    HYBRID,
    LATENTS,
    MAX_LEN,
    TARGET,
    draft,
    drafting,
    hybrid,
    hybrid_draft,
    in_bytes,
    in_shards,
    key_of,
    latents,
    ragged_prompts,
    requests_of,
    shared,
    target,
)
from heads import VARIANTS, random_head, serving

from jspec.config import EngineConfig, Speculation
from jspec.config.sharding import AXIS
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.engine.runner import shard_map
from jspec.models.flatten import copied
from jspec.models.kv_cache import PagedView
from jspec.models.sharding import mesh_of, on_every_device
from jspec.pallas.delta_net import chunked
from jspec.pallas.mla.prefill import up_projected_attention_reference
from jspec.sampling.params import SamplingParams

K, P = 4, 4
CONFIG = EngineConfig(max_batch=3, max_len=MAX_LEN, page_size=P, prefill_chunk=P, rounds=4)
PROMPTS = ragged_prompts((1, 2, 5, 8, 9, 13, 17, 22))
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=20),
    SamplingParams(temperature=0.6, top_k=9, max_tokens=18),
    SamplingParams(temperature=1.3, top_p=0.9, max_tokens=7),
    SamplingParams(temperature=0.9, min_p=0.05, max_tokens=20),
    dataclasses.replace(GREEDY, max_tokens=18),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.95, max_tokens=13),
    SamplingParams(temperature=0.7, max_tokens=18, min_tokens=9, stop_token_ids=[3, 4, 5]),
    SamplingParams(temperature=1.0, max_tokens=17),
]
REQUESTS = requests_of(PROMPTS, PARAMS)


@contextlib.contextmanager
def chunks_of_states() -> Iterator[None]:
    """Have gated delta nets read prompts in chunks of ``P`` tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK", P)
        yield


@contextlib.contextmanager
def expanded_latents() -> Iterator[None]:
    """Have latents expand on any platform where they may; else that depends on the GPU and on what its kernels serve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedView, "up_projects", lambda view, q, kv, maps: view.may_up_project)
        patch.setattr("jspec.models.kv_cache.up_projected_attention", up_projected_attention_reference)
        yield


@shared
def engine_of(kind: str, config: EngineConfig = CONFIG, verify: str = "rejection", **speculation) -> Engine:
    """An engine with a drafter of this kind, whose drafts are drawn, so that they tell of every number behind them.

    ``hybrid_draft`` has a draft model with gated delta nets, and ``hybrid_pair`` a target with such layers beside it.

    For ``latents``, attention is over latents, that of the target and of what drafts for it; for ``latents/expanded``,
    prefill computes keys and values of all heads. ``hybrid`` has a target with gated delta nets, for which
    ``chunks_of_states`` has to be in force. ``eagle/2`` is ``eagle`` with a target in two shards, and ``draft_model/2/2``
    has a draft model in as many; with ``/packets`` behind it, programs add up as they do where GPUs exchange packets. In
    ``eagle/2/batch-sharded`` each device verifies two of four rows. Beside the drafter of ``eagle+lookup``, texts are looked
    up whose newest token occurs earlier. The target of ``eagle@fp8`` caches keys and values in eight bits."""
    kind, *shards = kind.split("/")
    packets = "packets" in shards
    shards = [one for one in shards if one != "packets"]
    kind, _, cached = kind.partition("@")
    kind, plus, _ = kind.partition("+lookup")
    if shards == ["expanded"]:
        config, shards = dataclasses.replace(config, expand_latents=True), []
    how: dict[str, int] = {}
    if "batch-sharded" in shards:
        config, how, shards = dataclasses.replace(config, max_batch=4), {"batch_sharded_from": 0}, shards[:-1]
    beside = {"lookup": True, "ngram_min": 1} if plus else {}
    speculation = {"num_draft_tokens": K, "draft_sampling": "sample"} | beside | speculation
    settings, model = Speculation(verify=verify, **speculation), target()
    if kind == "hybrid":
        config, model = dataclasses.replace(config, snapshot_every=2 * P), hybrid()
        drafter, by = (
            drafter_for(VARIANTS["mtp"], HYBRID, settings),
            serving(VARIANTS["mtp"], random_head(VARIANTS["mtp"])),
        )
    elif kind in ("hybrid_draft", "hybrid_pair"):
        config = dataclasses.replace(config, snapshot_every=2 * P)
        model, by = hybrid() if kind == "hybrid_pair" else model, hybrid_draft()
        drafter = drafting("draft_model", settings)
    elif kind == "latents":
        config_of_head, model = VARIANTS["mtp-latents"], latents()
        drafter, by = (
            drafter_for(config_of_head, LATENTS, settings),
            serving(config_of_head, random_head(config_of_head)),
        )
    elif kind in VARIANTS:
        head = VARIANTS[kind]
        drafter, by = drafter_for(head, TARGET, settings), serving(head, random_head(head))
    else:
        drafter = drafting(None if kind == "none" else kind, settings)
        by = draft() if kind == "draft_model" else None
    rounding = in_bytes(model, cached).kv_rounding if cached else None
    if shards:
        count = int(shards[0])
        model = in_shards(model, count, **how)
        by = in_shards(by, count) if len(shards) > 1 else on_every_device(by, mesh_of(count, AXIS))
    if rounding is not None:
        model = copied(model)  # others have the one without
        model.kv_rounding = rounding
    lengths = settings.draft_lengths if settings.auto else None
    decoding = Decoding(drafter, verify, draft_lengths=lengths, budgets=settings.budgets)
    with pytest.MonkeyPatch.context() as patch:
        if packets:
            patch.setattr(shard_map, "reason_against_packets", lambda mesh: None)
        return Engine(model, by, decoding, config)


def alone(engine: Engine, requests) -> list[tuple]:
    """What becomes of each request when there is nothing else, and nothing of an earlier one in the prefix cache."""
    outcomes = []
    for request in requests:
        engine.scheduler.pages.forget_prefixes()
        outcomes += map(outcome_of, serve(engine, [request]))
    engine.scheduler.pages.forget_prefixes()
    return outcomes


def passing(i: int) -> Request:
    """A neighbour that goes before everybody else, and often shares a prompt with one of ``REQUESTS``."""
    return Request(99, PROMPTS[i % len(PROMPTS)], PARAMS[0], key_of(1000 + i), priority=-1)
