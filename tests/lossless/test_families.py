"""Whole steps with a target of every family: the joint distribution of completions, the acceptance of every round.

The target reads texts through pages and drafts of every kind; the oracle has causal passes over whole histories alone."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx
from tiny import ARCHITECTURES

from jspec.models.cache_pools import LayerKV
from jspec.models.flatten import copied
from jspec.pallas.attention.fp8 import decode_latents
from lossless.checks import LAST, p_values
from lossless.head_program import (
    ANY_TARGET,
    FOUR_BITS,
    FP8_BLOCKS,
    GEMMA4_ASSISTANT,
    LLAMA,
    MXFP4,
    NVFP4,
    ROUNDED,
    ROUNDED_LATENTS,
    HeadOracle,
    HeadProgram,
)
from lossless.losslessness import Losslessness, Run
from lossless.statistics import LEVEL
from lossless.steps import K

FAMILIES = tuple(name for name in ARCHITECTURES if name != LLAMA)  # test_heads.py has Llama's
RULES = ("rejection", "block", "match")
# Rules go round, so that each meets every head and every family.
ALL = [
    *(HeadProgram(rule, GEMMA4_ASSISTANT, architecture="Gemma4ForCausalLM") for rule in RULES),
    *(
        HeadProgram(RULES[(i + j) % len(RULES)], head, architecture=family)
        for i, family in enumerate(FAMILIES)
        for j, head in enumerate(ANY_TARGET)
    ),
]
QUICK = (
    HeadProgram("rejection", "eagle", architecture="GptOssForCausalLM"),
    HeadProgram("match", "medusa", architecture="Gemma2ForCausalLM"),
    HeadProgram("block", "mlp", architecture="OPTForCausalLM"),
    HeadProgram("rejection", GEMMA4_ASSISTANT, architecture="Gemma4ForCausalLM"),
    HeadProgram("match", "mtp", architecture=FP8_BLOCKS),
    HeadProgram("block", "eagle", architecture=FOUR_BITS),
    HeadProgram("rejection", "eagle", architecture=ROUNDED),
)
NIGHTLY = (
    HeadProgram("rejection", "medusa", architecture=NVFP4),
    HeadProgram("match", "medusa", architecture=MXFP4),
    HeadProgram("match", "mtp", architecture=ROUNDED),
    HeadProgram("rejection", "eagle", architecture=ROUNDED_LATENTS),
    HeadProgram("rejection", "eagle", architecture="Qwen3_5ForCausalLM"),
)


def test_every_rule_is_tested_with_every_head_and_family():
    for name, levels in (("head", (*ANY_TARGET, GEMMA4_ASSISTANT)), ("architecture", FAMILIES)):
        assert {(getattr(one, name), one.verify) for one in ALL} == {(a, rule) for a in levels for rule in RULES}


def without_sinks(target):
    """The target without the sinks of its attention heads."""
    broken = copied(target)
    for layer in broken.layers:
        layer.attention.sinks = None
    return broken


def with_values_of_one_head(target):
    """The target with the values of its first attention head for all of them."""
    broken = copied(target)
    for layer in broken.layers:
        values, heads = layer.attention.values.weight[...], layer.attention.num_heads
        layer.attention.values.weight = nnx.Param(jnp.tile(values[: len(values) // heads], (heads, 1)))
    return broken


def with_states_that_forget(target):
    """The target whose gated delta nets forget faster."""
    broken = copied(target)
    for layer in broken.layers:
        if layer.delta_net is not None:
            layer.delta_net.decay = nnx.Param(layer.delta_net.decay[...] + 3.0)
    return broken


def with_an_earlier_cache(target):
    """The target whose layer without a cache reads that of the first layer with a window, and not of the last."""
    broken = copied(target)
    layers = list(broken.config.layers)
    assert layers[3].reads_cache_of == 1
    layers[3] = dataclasses.replace(layers[3], reads_cache_of=0)
    broken.config = dataclasses.replace(broken.config, layers=tuple(layers))
    return broken


class UnroundedInRounds(nnx.Module):
    """A linear map that rounds its inputs in prefill alone."""

    def __init__(self, linear):
        self.rounds, self.plain = linear, copied(linear)
        self.plain.quantize_inputs = None

    def __call__(self, x):
        return (self.plain if x.shape[1] == K + 1 else self.rounds)(x)


def with_verify_passes_that_do_not_round(target):
    """The target whose attention reads inputs in verify passes as they were before they were rounded."""
    broken = copied(target)
    for layer in broken.layers:
        layer.attention_norm.quantize_outputs = None
        layer.attention.qkv = UnroundedInRounds(layer.attention.qkv)
    return broken


class UnroundedLatentsInRounds(nnx.Module):
    """Attention over latents that in verify passes sees their own as they were before they were rounded."""

    def __init__(self, attention):
        self.attention = attention

    def __call__(self, x, positions, kv, view):
        attended, written = self.attention(x, positions, kv, view)
        if x.shape[1] == K + 1:
            numbers = decode_latents(kv.k, kv.scales.k[:, None, None], jnp.float32)
            attended, _ = self.attention(x, positions, LayerKV(numbers, None), view)
        return attended, written


def with_verify_passes_over_other_latents(target):
    """The target whose verify passes see their own latents as they were before they were rounded."""
    broken = copied(target)
    for layer in broken.layers:
        layer.attention = UnroundedLatentsInRounds(layer.attention)
    return broken


class Limited(nnx.Module):
    """A mixture of experts that leaves out the last tokens of a pass, as if they were beyond a capacity."""

    def __init__(self, mixture):
        self.mixture = mixture

    def __call__(self, x):
        made, count = self.mixture(x), x.shape[0] * x.shape[1]
        kept = jnp.arange(count, dtype=jnp.int32) < count * 3 // 4
        return jnp.where(kept.reshape(*x.shape[:2], 1), made, jnp.zeros((), made.dtype))


def with_a_capacity(target):
    """The target with experts that drop tokens."""
    broken = copied(target)
    for layer in broken.layers:
        layer.mlp = Limited(layer.mlp)
    return broken


class TestSteps(Losslessness):
    tables, oracle = None, HeadOracle
    runs = (
        *(Run(program, 8_000) for program in QUICK),
        *(Run(program, 8_000, "nightly") for program in NIGHTLY),
        *(Run(program, 100_000, "long") for program in ALL),
    )
    seed = 73

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("family", "broken"),
        [
            ("GptOssForCausalLM", without_sinks),
            (ROUNDED, with_verify_passes_that_do_not_round),
            (ROUNDED_LATENTS, with_verify_passes_over_other_latents),
            pytest.param("Gemma4ForCausalLM", with_an_earlier_cache, marks=pytest.mark.nightly),
            pytest.param("Qwen3_5ForCausalLM", with_states_that_forget, marks=pytest.mark.nightly),
            pytest.param("MixtralForCausalLM", with_a_capacity, marks=pytest.mark.long),
            pytest.param("Glm4MoeLiteForCausalLM", with_values_of_one_head, marks=pytest.mark.long),
        ],
    )
    def test_a_broken_target_is_detected(self, family, broken):
        run = Run(HeadProgram("rejection", "eagle", architecture=family, broken=broken), 20_000)
        sampled = [pair for pair in self.with_oracles(run.program, self.play(run)) if pair[0].ask.warp.temperature]
        assert min(p_values(sampled, LAST)) < LEVEL
