"""The engine's programs as XLA compiles them for an H200, without one: none of them moves the pools of pages.

A decode program takes some rows out of the batch and puts them back, a prefill pass scatters segments of many prompts, and a
request may come back from host memory; the pools go through all of that in place."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from deviceless import compiled_for_h200, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import moves
from benchmarks.shapes import LLAMA_8B, head_for
from jspec.config import EngineConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.runner.programs import PackedProgram, Programs
from jspec.engine.runner.saved import save
from jspec.engine.runner.state import of_rows
from jspec.engine.runner.step_builder import StepBuilder
from jspec.models.flatten import flatten

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

CONFIG = EngineConfig(max_batch=16, max_len=1024, dtype="bfloat16", reproducible=False)
SHAPE = dataclasses.replace(LLAMA_8B, num_layers=2, windows=())
K = 2
WHICH = [
    "decode 1 row",
    "decode 16 rows",
    "decode 16 rows, processing",
    "draft 16 rows",
    "verify pass of 16 rows",
    "finish 16 rows",
    "prefill of 2 chunks",
    "prefill of 64 chunks",
    "catch_up",
    "save",
    "restore",
]


@functools.cache
def built(config: EngineConfig = CONFIG):
    """The programs of an engine with an EAGLE head, its weights, and its state, as shapes."""
    target, head = abstract_module(SHAPE), head_for(SHAPE, "eagle")
    (target_leaves, merge_target), (draft_leaves, merge_draft) = flatten(target), flatten(abstract_module(head))
    make = drafter_for(head, SHAPE, Speculation(K))
    builder = StepBuilder(merge_target, merge_draft, Decoding(make, "rejection"), config, K, SHAPE.vocab_size)
    leaves = target_leaves, draft_leaves
    return Programs(builder, target_leaves), leaves, jax.eval_shape(lambda: builder.empty_state(leaves))


def program(which: str):
    programs = built()[0]
    return {
        "decode 1 row": programs.decode[1, K],
        "decode 16 rows": programs.decode[16, K],
        "decode 16 rows, processing": programs.processing_decode[16],
        "draft 16 rows": programs.draft[16, False],
        "verify pass of 16 rows": programs.verify_pass[16],
        "finish 16 rows": programs.finish[16, True],
        "prefill of 2 chunks": programs.prefill[2],
        "prefill of 64 chunks": programs.prefill[64],
        "catch_up": programs.catch_up,
        "save": programs.save,
        "restore": programs.restore,
    }[which]


@functools.cache
def compiled(which: str):
    programs, leaves, state = built()
    chosen, row, pages = program(which), np.int32(0), np.zeros(programs.most_moved, np.int32)
    args = (chosen.idle,) if isinstance(chosen, PackedProgram) else (row, pages)
    if which == "restore":
        args = *args, jax.eval_shape(save, state, row, pages)
    if which in ("verify pass of 16 rows", "finish 16 rows"):
        drafting, reading, grammar = programs.draft[16, False], programs.verify_pass[16], programs.grammar[16]
        proposal = jax.eval_shape(drafting.function, leaves, state, drafting.idle)[1]
        taken = (proposal,)
        if which == "finish 16 rows":
            verified = jax.eval_shape(reading.function, leaves, state, proposal, reading.idle)[1]
            taken = verified, jax.eval_shape(grammar.function, state.outcome, grammar.idle)
        args = *taken, *args
    before = chosen.spec.operands.of(leaves, state)
    return compiled_for_h200(
        chosen.function, *before, *args, donate_argnums=chosen.donate, compiler_options=chosen.options
    )


@pytest.mark.parametrize("which", WHICH)
def test_no_pool_is_moved(which):
    _, _, state = built()
    pools = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.cache, state.draft))]
    assert min(pools) > 30e6
    assert [op.line for op in moves(compiled(which).as_text(), min(pools) / 2)] == []
    assert compiled(which).memory_analysis().alias_size_in_bytes >= sum(pools)


def test_admission_touches_no_pool():
    """``admit`` is given the arrays of rows alone."""
    programs, _, state = built()
    entering = jax.eval_shape(programs.admit.function, of_rows(state), programs.admit.idle)
    assert set(entering[0]) == set(of_rows(state))


def test_pages_that_fill_the_memory_cause_no_rematerialization(capfd):
    """XLA would try, and warn that it could not. The warning comes where the option is missing, so it would be seen."""
    programs, leaves, state = built(dataclasses.replace(CONFIG, num_pages=170_000))
    prefill = programs.prefill[2]
    warned = []
    for options in (prefill.options, {}):
        compiled_for_h200(
            prefill.function, leaves, state, prefill.idle, donate_argnums=prefill.donate, compiler_options=options
        )
        warned.append("rematerialization" in capfd.readouterr().err)
    assert warned == [False, True]
