"""Programs on a CPU that read bfloat16 weights: none holds a copy of them in float32, twice as large as they are."""

import dataclasses
import functools

import jax
import pytest

from benchmarks.random_modules import abstract_module
from benchmarks.shapes import LLAMA_1B
from jspec.config import EngineConfig, Speculation
from jspec.config.engine import UnpinnedConfig
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.runner.programs import Programs
from jspec.engine.runner.step_builder import StepBuilder
from jspec.models.flatten import flatten

SIZES = {"hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
TARGET = dataclasses.replace(LLAMA_1B, num_layers=2, vocab_size=4096, windows=(), **SIZES)
DRAFT = dataclasses.replace(TARGET, num_layers=1, windows=())
K = 2


@functools.cache
def built(drafts: bool, one_order: bool):
    """The programs of an engine in bfloat16 for one request, its weights, and its state, as shapes."""
    config = EngineConfig(max_batch=1, max_len=64, dtype="bfloat16", reproducible=one_order)
    if one_order:
        config = UnpinnedConfig.of(config, TARGET)
    (target, merge_target), (draft, merge_draft) = flatten(abstract_module(TARGET)), flatten(abstract_module(DRAFT))
    make, most = (
        (drafter_for(DRAFT, TARGET, Speculation(K)), K) if drafts else (drafter_for(None, TARGET, Speculation()), 0)
    )
    draft, merge_draft = (draft, merge_draft) if drafts else ([], lambda _: None)
    builder = StepBuilder(merge_target, merge_draft, Decoding(make, "rejection"), config, most, TARGET.vocab_size)
    leaves = target, draft
    return Programs(builder, target), leaves, jax.eval_shape(lambda: builder.empty_state(leaves))


@pytest.mark.parametrize("one_order", [True, False], ids=["one order", "any order"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "draft model"])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_no_weight_is_widened(kind, drafts, one_order):
    """A plain round reads one token, which XLA multiplies in another way than several. The tied embedding is the largest
    weight, which the loop over rounds looks up and multiplies."""
    programs, leaves, state = built(drafts, one_order)
    program = next(iter(getattr(programs, kind).values()))
    weights = 4 * sum(leaf.size for leaf in jax.tree.leaves(leaves))
    program.compile(leaves, state, program.idle)
    used = program._compiled.memory_analysis().temp_size_in_bytes
    assert used < 0.1 * weights, f"{used / weights:.2f} of the weights in float32"
