"""What an engine needs, from shapes alone."""

import dataclasses

import jax
import pytest
from engines import DRAFT, HYBRID, HYBRID_DRAFT, LATENTS, TARGET

from jspec.config import EngineConfig, Shards
from jspec.drafting.recurrent import RecurrentDraft
from jspec.loading import memory_budget
from jspec.loading.memory_budget import ModelMemory
from jspec.models.cache_pools import cache_shape
from jspec.models.sharding import mesh_of
from jspec.pallas.collectives.peers import room_for
from jspec.pallas.collectives.workspace import Workspace
from jspec.pallas.delta_net.state import DeltaState

CONFIG = EngineConfig(max_batch=3, max_len=40, page_size=8)


def test_weights_cache_and_workspace_are_counted():
    need = ModelMemory(TARGET, DRAFT, 5).budget(CONFIG)
    slots = (1 + 3 * 5) * 8
    assert need.weights == 4 * (TARGET.num_parameters + DRAFT.num_parameters)
    assert need.cache == 4 * 2 * (3 + 1) * 2 * 4 * slots
    assert need.work > 3 * 5 * 2 * 29 * 4
    assert need.total == need.weights + need.cache + need.work


def test_keys_and_values_that_follow_from_latents_are_counted():
    """In bfloat16, for all pages that a pass has room for: of a text of 40 tokens, and of ten segments of 4."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", prefill_chunk=4, prefill_tokens=40)
    expanding = dataclasses.replace(config, expand_latents=True)
    expand, keep = (ModelMemory(LATENTS, None, 1).budget(one) for one in (expanding, config))
    assert expand.work - keep.work == (5 + 5) * 8 * 4 * (12 + 8) * 2
    other = dataclasses.replace(expanding, dtype="float32")
    assert ModelMemory(LATENTS, None, 1).budget(other) == ModelMemory(LATENTS, None, 1).budget(
        dataclasses.replace(other, expand_latents=False)
    )
    assert ModelMemory(TARGET, None, 1).budget(expanding) == ModelMemory(TARGET, None, 1).budget(config)


@pytest.mark.parametrize("width", [1, 5])
def test_recurrent_states_of_all_rows_are_counted(width):
    """Also those of prompts that are prefilled ahead, for which there are two rows beside four. Of three layers the one with
    attention has pages, as if it were alone."""
    config = dataclasses.replace(CONFIG, max_batch=4)
    need = ModelMemory(HYBRID, None, width).budget(config)
    states = (4 + 2) * HYBRID.delta_nets.row_bytes(width, 4)
    assert need.cache == states + 4 * 2 * 1 * 2 * 4 * config.pool_pages * 8
    more = ModelMemory(HYBRID, None, width).budget(dataclasses.replace(config, read_ahead=5))
    assert more.cache - need.cache == 3 * HYBRID.delta_nets.row_bytes(width, 4)


@pytest.mark.parametrize("width", [5, 8])
def test_recurrent_states_of_a_draft_model_are_counted(width):
    """They are for rounds of K = 4, however many query tokens the target reads; those of the arrays that an engine has."""
    alone, beside = (
        ModelMemory(target, draft, width, num_draft_tokens=4).budget(CONFIG).cache
        for target, draft in ((HYBRID, DRAFT), (HYBRID, HYBRID_DRAFT))
    )
    pages = [4 * one.kv_bytes(CONFIG.pool_pages * CONFIG.page_size, 1) for one in (DRAFT, HYBRID_DRAFT)]
    assert beside - alone == CONFIG.num_rows * HYBRID_DRAFT.delta_nets.row_bytes(5, 4) + pages[1] - pages[0]
    kept = RecurrentDraft.init(cache_shape(HYBRID_DRAFT), 2, 8, 1, 5, "float32")
    states = [layer for layer in kept.layers if isinstance(layer, DeltaState)]
    assert sum(x.nbytes for x in jax.tree.leaves(states)) == HYBRID_DRAFT.delta_nets.row_bytes(5, 4)


def test_pages_are_those_that_fit_beside_recurrent_states(monkeypatch):
    memory, one_row = ModelMemory(HYBRID, None, 5), dataclasses.replace(CONFIG, num_pages=CONFIG.pages_per_row)
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    need, states = memory.budget(one_row), CONFIG.num_rows * HYBRID.delta_nets.row_bytes(5, 4)
    page = 4 * 2 * 1 * 2 * 4 * 8
    assert need.cache == states + one_row.pool_pages * page
    free = 2 * need.total + 100 * page
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: free)
    fits = (0.5 * free - need.weights - need.work - states) / page
    pages = memory.with_num_pages(CONFIG, 0.5).num_pages
    assert 15 / 16 * fits - 2 <= pages <= fits
    assert pages > CONFIG.pages_per_row


def test_recurrent_states_that_do_not_fit_are_named(monkeypatch):
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: 0)
    with pytest.raises(
        MemoryError, match=rf"of recurrent states for {CONFIG.num_rows} rows, 0\.0 of KV cache for num_pages="
    ):
        ModelMemory(HYBRID, None, 5).with_num_pages(CONFIG, 0.5)
    with pytest.raises(MemoryError, match=r"of weights, 0\.0 of KV cache"):
        ModelMemory(TARGET, None, 5).with_num_pages(CONFIG, 0.5)


@pytest.mark.parametrize("count", [1, 2])
def test_each_shard_has_the_states_of_its_heads(count):
    whole, shard = (
        ModelMemory(HYBRID, None, 5, (shards, None)).budget(CONFIG).cache for shards in (None, Shards(count))
    )
    assert whole == count * shard


def test_half_the_bytes_in_bfloat16():
    full, half = (
        ModelMemory(TARGET, None, 1).budget(dataclasses.replace(CONFIG, dtype=d)) for d in ("float32", "bfloat16")
    )
    assert (full.weights, full.cache) == (2 * half.weights, 2 * half.cache)


@pytest.mark.parametrize(("change", "field"), [({"max_batch": 6}, "cache"), ({"num_pages": 99}, "cache")])
def test_larger_settings_need_more_bytes(change, field):
    less, more = (
        ModelMemory(TARGET, None, 1).budget(config) for config in (CONFIG, dataclasses.replace(CONFIG, **change))
    )
    assert getattr(more, field) > getattr(less, field)


def test_a_cache_that_does_not_fit_is_refused_with_numbers(monkeypatch):
    config = dataclasses.replace(CONFIG, num_pages=15)
    need = ModelMemory(TARGET, DRAFT, 5).budget(config).total
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: need)
    assert ModelMemory(TARGET, DRAFT, 5).with_num_pages(config, 0.9) == config
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: need - 1)
    with pytest.raises(
        MemoryError, match=r"num_pages=15 of 8 .*max_batch=3 x max_len=40.*are free; lower max_batch, max"
    ):
        ModelMemory(TARGET, DRAFT, 5).with_num_pages(config, 0.9)


def test_the_pool_takes_what_remains(monkeypatch):
    """On a GPU the share of its memory that is left, less the null page; elsewhere what the rows can use, up to 4 GiB."""
    one_row = dataclasses.replace(CONFIG, num_pages=CONFIG.pages_per_row)
    assert ModelMemory(TARGET, DRAFT, 5).with_num_pages(CONFIG, 0.9).num_pages == 3 * 5
    monkeypatch.setattr(memory_budget, "CPU_CACHE", 8000)  # a page takes 2,048 bytes
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: 0)
    with pytest.raises(MemoryError, match="num_pages=5 "):
        ModelMemory(TARGET, DRAFT, 5).with_num_pages(CONFIG, 0.9)

    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    need = ModelMemory(TARGET, DRAFT, 5).budget(one_row)
    page = need.cache // (1 + CONFIG.pages_per_row)
    for free in (10**6, 10**8):
        monkeypatch.setattr(memory_budget, "free_bytes", lambda free=free: free)
        fits = (0.5 * free - need.weights - need.work) / page
        pages = ModelMemory(TARGET, DRAFT, 5).with_num_pages(CONFIG, 0.5).num_pages
        assert 15 / 16 * fits - 1 <= pages <= fits
        assert pages % 2 ** max(pages.bit_length() - 5, 0) == 0  # the same, if a little less is free


@pytest.mark.parametrize("count", [2, 4])
def test_gpus_that_share_a_target_need_a_workspace(count, monkeypatch):
    memory = ModelMemory(TARGET, None, 5, (Shards(count), None))
    without = memory.budget(CONFIG).work
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    room = room_for(TARGET.hidden_size, CONFIG.dtype, count)
    [shard, *_] = Workspace.create(mesh_of(count, "tp"), room).memory.addressable_shards
    config = dataclasses.replace(CONFIG, peer_packets=False)
    assert memory.budget(CONFIG).work - memory.budget(config).work == shard.data.nbytes
    assert memory.budget(config).work <= without  # a GPU gathers no pages


def test_free_bytes_are_positive():
    assert memory_budget.free_bytes() > 2**20
