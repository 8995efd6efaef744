"""The ``max_len`` of an engine that was given none: the target's own, or a step of a ladder that memory allows."""

import dataclasses
import re

import jax.numpy as jnp
import pytest
from engines import LATENTS, TARGET
from tiny import tiny_checkpoint

import jspec
from jspec.config import EngineConfig
from jspec.config.rope import Rope
from jspec.loading import memory_budget
from jspec.loading.engine_config import own_length, reproducible_length
from jspec.loading.memory_budget import LADDER, ModelMemory, lengths_up_to
from jspec.models.cache_pools import gathers_pages

LONG = dataclasses.replace(TARGET, max_position=131_072)
CONFIG = EngineConfig(max_batch=4, max_len=64, page_size=64, dtype="bfloat16", reproducible=False)
HEAD_64 = dataclasses.replace(TARGET, head_dim=64, max_position=131_072)


def longest(monkeypatch, free: int, target=HEAD_64, on_gpu=True, config=CONFIG) -> int:
    """The length for a device with so many free bytes, of which half may be used."""
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: free)
    lengths = lengths_up_to(own_length(target))
    return ModelMemory(target, None, 5).longest_that_fits(lengths, config, 0.5)


def test_lengths_are_steps_below_the_own_length():
    assert lengths_up_to(40_960) == [40_960, 32_768, 16_384, 8_192, 4_096, 2_048]
    assert lengths_up_to(8_192) == [8_192, 4_096, 2_048]
    assert lengths_up_to(100) == [100]


def test_a_longrope_counts_with_its_original_positions():
    factors = (1.0,) * (TARGET.head_dim // 2)
    rope = Rope(kind="longrope", original_max_position=4096, short_factors=factors, long_factors=factors)
    assert own_length(dataclasses.replace(LONG, rope=rope)) == 4096
    assert own_length(LONG) == 131_072


def test_a_reproducible_length_follows_from_target_and_kind_of_device(monkeypatch):
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: pytest.fail("asked for free memory"))
    assert (reproducible_length(LONG, "gpu"), reproducible_length(LONG, "cpu")) == (32_768, 8_192)
    assert reproducible_length(TARGET, "gpu") == TARGET.max_position


@pytest.mark.parametrize("step", [8_192, 65_536, 131_072])
def test_a_gpu_has_memory_for_a_text_of_the_length_and_not_of_the_next(monkeypatch, step):
    sized = dataclasses.replace(CONFIG, max_len=step)
    sized = dataclasses.replace(sized, num_pages=sized.pages_per_row)
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    need = ModelMemory(HEAD_64, None, 5).budget(sized).total
    assert longest(monkeypatch, 2 * need) == step
    assert longest(monkeypatch, 2 * need - 2) == step // 2
    assert longest(monkeypatch, 0) == LADDER[-1]


def test_without_a_gpu_the_texts_of_all_rows_have_4_gib(monkeypatch):
    token = HEAD_64.kv_bytes(1, 2)
    monkeypatch.setattr(memory_budget, "CPU_CACHE", token * (4 * 16_384 + 64))  # and the null page
    assert longest(monkeypatch, 0, on_gpu=False) == 16_384
    assert longest(monkeypatch, 0, on_gpu=False, config=dataclasses.replace(CONFIG, max_batch=5)) == 8_192


def test_pages_that_a_kernel_reads_in_place_need_no_workspace(monkeypatch):
    sized = [dataclasses.replace(CONFIG, max_len=n, num_pages=9) for n in (8_192, 16_384)]
    for target, on_gpu, grows in ((HEAD_64, True, False), (HEAD_64, False, True), (LONG, True, True)):
        monkeypatch.setattr(memory_budget, "on_gpu", lambda on_gpu=on_gpu: on_gpu)
        less, more = (ModelMemory(target, None, 5).budget(config).work for config in sized)
        assert (more > less) == grows
    assert gathers_pages(LATENTS, "bfloat16", on_gpu=True)  # its latents are no power of two
    large = dataclasses.replace(LATENTS.latent, rank=64, rotated=16)
    assert not gathers_pages(dataclasses.replace(LATENTS, latent=large, head_dim=24), "bfloat16", on_gpu=True)
    assert not gathers_pages(HEAD_64, jnp.float32, on_gpu=True)


def test_an_error_names_a_length_that_fits(monkeypatch):
    monkeypatch.setattr(memory_budget, "on_gpu", lambda: True)
    config = dataclasses.replace(CONFIG, max_len=8_192)
    need = ModelMemory(HEAD_64, None, 5).budget(dataclasses.replace(config, num_pages=config.pages_per_row)).total
    monkeypatch.setattr(memory_budget, "free_bytes", lambda: need - 1)
    with pytest.raises(MemoryError, match=r"lower max_batch, max_len or num_pages; max_len=4096 would fit$"):
        ModelMemory(HEAD_64, None, 5).with_num_pages(config, 1.0)
    config = dataclasses.replace(config, max_len=4_096)
    assert ModelMemory(HEAD_64, None, 5).with_num_pages(config, 1.0).pages_per_row == 64


class TestLoad:
    """``jspec.load`` without ``max_len``."""

    @pytest.fixture
    def folder(self, tmp_path):
        return tiny_checkpoint(tmp_path / "target", max_position_embeddings=20_000)

    def test_the_context_length_is_reproducible_unless_told_otherwise(self, folder, monkeypatch):
        assert jspec.load(folder, max_batch=1).engine.config.max_len == 8_192
        loose = jspec.load(folder, max_batch=1, reproducible=False).engine.config
        assert loose.max_len == 20_000
        page = 2 * 20_000 * 8 * 4  # below what it takes
        monkeypatch.setattr(memory_budget, "CPU_CACHE", page)
        less = jspec.load(folder, max_batch=1, reproducible=False).engine.config.max_len
        assert less in LADDER

    @pytest.mark.parametrize("reproducible", [True, False])
    def test_a_given_pool_holds_a_text_of_the_length(self, folder, reproducible):
        config = jspec.load(folder, max_batch=1, num_pages=10, page_size=64, reproducible=reproducible).engine.config
        assert (config.max_len, config.num_pages) == (640, 10)

    def test_a_given_length_is_taken(self, folder):
        for max_len in (100, 20_000):
            assert jspec.load(folder, max_batch=1, max_len=max_len, num_pages=400).engine.config.max_len == max_len
        with pytest.raises(ValueError, match=re.escape("max_len=20001: expected at most 20000")):
            jspec.load(folder, max_len=20_001)
