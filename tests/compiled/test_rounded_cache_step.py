"""Rounds and prefill over a cache in eight bits, of keys and values or of latents, as XLA compiles them for an H200, without
one: pools are neither copied nor converted, and a layer has no more launches than over a cache in bfloat16."""

import dataclasses
import functools

import jax
import pytest
from deviceless import compiled_for_h200, compiled_round, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import launched, moves
from benchmarks.rounds.programs import Decoding, with_kv_cache
from benchmarks.shapes import LLAMA_8B, head_for
from jspec.config import EngineConfig, Latent, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding as EngineDecoding
from jspec.engine.runner.programs import Programs
from jspec.engine.runner.step_builder import StepBuilder
from jspec.models.flatten import flatten

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LARGE = 1 << 20  # bytes
SHAPE, K = dataclasses.replace(LLAMA_8B, num_layers=2, windows=()), 2
LATENTS = dataclasses.replace(  # the attention of GLM-4.7-Flash
    SHAPE,
    architecture="DeepseekV3ForCausalLM",
    num_heads=20,
    num_kv_heads=20,
    head_dim=256,
    latent=Latent(512, 64, 256, 768),
)
KINDS = ["fp8", "fp8_per_token_head"]
SHAPES = pytest.mark.parametrize("shape", ["heads", "latents"])
CONFIG = EngineConfig(max_batch=16, max_len=1024, dtype="bfloat16", reproducible=False, expand_latents=True)


@functools.cache
def rounds(kind: str | None, shape: str = "heads"):
    """Rounds of 16 rows with an EAGLE head, and the bytes of the target's cache."""
    config = LATENTS if shape == "latents" else SHAPE
    head = head_for(SHAPE, "eagle")
    target, module = with_kv_cache(abstract_module(config), kind), abstract_module(head, drafts=True)
    what = Decoding("eagle", K, 16, start=512, new=256)
    step, state = compiled_round(what, target, module, head)
    return step, bytes_of(state.cache)


def bytes_of(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_moves_no_cache_and_writes_to_the_one_that_it_was_given(kind, shape):
    step, cache = rounds(kind, shape)
    assert [op.line for op in moves(step.as_text(), LARGE)] == []
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= cache > 8 * LARGE
    assert memory.temp_size_in_bytes < rounds(None, shape)[0].memory_analysis().temp_size_in_bytes + cache / 4


@SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_launches_no_more_than_in_bfloat16(kind, shape):
    plain, more = (len(launched(rounds(which, shape)[0].as_text(), loop=True)) for which in (None, kind))
    assert more <= plain


@SHAPES
def test_a_cache_takes_half_the_bytes(shape):
    plain, half, with_scales = (rounds(kind, shape)[1] for kind in (None, *KINDS))
    assert plain / 2 <= half < 1.001 * plain / 2
    assert with_scales < 1.032 * plain / 2


@SHAPES
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_moves_no_pool(kind, shape):
    """What the bytes of pages in use stand for is computed, or the keys and values that follow, a layer at a time."""
    config = LATENTS if shape == "latents" else SHAPE
    head, engine = head_for(SHAPE, "eagle"), CONFIG.for_target(config)
    target = with_kv_cache(abstract_module(config), kind)
    (target_leaves, merge_target), (draft_leaves, merge_draft) = flatten(target), flatten(abstract_module(head))
    decoding = EngineDecoding(drafter_for(head, config, Speculation(K)), "rejection")
    builder = StepBuilder(merge_target, merge_draft, decoding, engine, K, config.vocab_size)
    leaves = target_leaves, draft_leaves
    state = jax.eval_shape(lambda: builder.empty_state(leaves))
    prefill = Programs(builder, target_leaves).prefill[2048 // engine.chunk]
    how = {"donate_argnums": prefill.donate, "compiler_options": prefill.options}
    step = compiled_for_h200(prefill.function, leaves, state, prefill.idle, **how)
    pool = state.cache[0].k.size
    assert pool > 9e6
    assert [op.line for op in moves(step.as_text(), pool / 2)] == []
    assert step.memory_analysis().alias_size_in_bytes >= bytes_of((state.cache, state.draft))
    assert (
        step.as_text().count('"mosaic_gpu_v2"') == SHAPE.num_layers
    )  # the drafter's layer only writes keys and values
