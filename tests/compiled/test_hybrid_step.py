"""Programs of a target with gated delta nets as XLA compiles them for an H200, without one.

None moves a recurrent state, and a decode program launches as many kernels for one more layer as it is known to. Layers with
full attention attend in prefill with the kernel that is chosen for heads of their sizes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of, mosaic_kernels_of
from deviceless import compiled_for_h200, why_not

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import launched, moves
from benchmarks.shapes import QWEN36_27B, QWEN36_35B_A3B, TINY, head_for, qwen3_5
from jspec.config import EngineConfig, Speculation
from jspec.drafting.methods import drafter_for
from jspec.engine.decoding import Decoding
from jspec.engine.runner.programs import PackedProgram, Programs
from jspec.engine.runner.saved import save_states, states
from jspec.engine.runner.step_builder import StepBuilder
from jspec.models.flatten import flatten

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

K = 4
CONFIG = EngineConfig(max_batch=16, max_len=1024, dtype="bfloat16", reproducible=False)


@functools.cache
def built(layers: int, target=QWEN36_27B):
    """The programs of an engine whose target has so many layers, the last with attention; its weights; its state."""
    nets = dataclasses.replace(target.delta_nets, layers=(True,) * (layers - 1) + (False,))
    experts = target.experts and dataclasses.replace(target.experts, layers=target.experts.layers[:layers])
    shape = dataclasses.replace(target, num_layers=layers, windows=(), delta_nets=nets, experts=experts)
    head = head_for(shape, "mtp")
    (of, merge), (by, merge_head) = flatten(abstract_module(shape)), flatten(abstract_module(head))
    decoding = Decoding(drafter_for(head, shape, Speculation(K)), "rejection")
    builder = StepBuilder(merge, merge_head, decoding, CONFIG.for_target(shape), K, shape.vocab_size)
    return Programs(builder, of), (of, by), jax.eval_shape(lambda: builder.empty_state((of, by)))


@functools.cache
def compiled(layers: int, which: str):
    programs, leaves, state = built(layers)
    row = np.int32(0)
    program, args = {
        "decode": (programs.decode[16, K], None),
        "prefill": (programs.prefill[16], None),
        "save": (programs.save_states, (row,)),
        "restore": (programs.restore_states, (row, jax.eval_shape(save_states, state, row))),
    }[which]
    args = (program.idle,) if isinstance(program, PackedProgram) else args
    before = program.spec.operands.of(leaves, state)
    return compiled_for_h200(
        program.function, *before, *args, donate_argnums=program.donate, compiler_options=program.options
    )


@pytest.mark.parametrize("which", ["decode", "prefill", "save", "restore"])
def test_no_state_is_moved(which):
    _, _, state = built(2)
    sizes = [x.S.size * 4 for x in states(state.cache) if x is not None]
    assert min(sizes) > 50e6
    program = compiled(2, which)
    assert [op.line for op in moves(program.as_text(), min(sizes) / 4)] == []
    assert program.memory_analysis().alias_size_in_bytes >= sum(sizes)


@pytest.mark.nightly
def test_no_state_of_a_draft_model_is_moved():
    """Beside a small target, a draft model of the size of Qwen3.5-0.8B, with a gated delta net in one of two layers."""
    shape = qwen3_5(4, 1024, 3584, (8, 2), 16, vocab_size=TINY.vocab_size)
    nets = dataclasses.replace(shape.delta_nets, layers=(True, False))
    shape = dataclasses.replace(shape, num_layers=2, windows=(), delta_nets=nets)
    (of, merge), (by, merge_draft) = flatten(abstract_module(TINY)), flatten(abstract_module(shape))
    decoding = Decoding(drafter_for(shape, TINY, Speculation(K)), "rejection")
    config = CONFIG.for_target(TINY, shape)
    builder = StepBuilder(merge, merge_draft, decoding, config, K, TINY.vocab_size)
    program, leaves = Programs(builder, of).decode[16, K], (of, by)
    state = jax.eval_shape(lambda: builder.empty_state(leaves))
    compiled = compiled_for_h200(
        program.function, leaves, state, program.idle, donate_argnums=program.donate, compiler_options=program.options
    )
    [size] = [x.S.size * 4 for x in states(state.draft) if x is not None]
    assert size > 25e6
    assert [op.line for op in moves(compiled.as_text(), size / 4)] == []
    assert compiled.memory_analysis().alias_size_in_bytes >= size


def test_one_more_layer_takes_13_launches():
    fewer, more = (len(launched(compiled(layers, "decode").as_text(), loop=True)) for layers in (2, 3))
    assert more - fewer == 13


@pytest.mark.parametrize(
    ("target", "segments", "chosen"),  # other numbers of segments than other tests have: traces of layers are shared
    [(QWEN36_27B, 32, True), (QWEN36_27B, 64, True), (QWEN36_35B_A3B, 128, True), (QWEN36_27B, 4, False)],
    ids=["27b-2048", "27b-4096", "35b-8192", "27b-256-has-too-few-blocks"],
)
def test_full_attention_of_prefill_has_the_kernel_where_blocks_fill_the_card(target, segments, chosen):
    programs, leaves, state = built(2, target)
    program = programs.prefill[segments]
    text = for_cuda(program.function, (leaves, state, program.idle))
    assert ("prefill_attention" in mosaic_kernels_of(text), "attend_split" in kernels_of(text)) == (chosen, not chosen)
