"""Which models have one order of sums on a GPU."""

import dataclasses

import jax
import pytest
from flax import nnx
from tiny import LLAMA, tiny_checkpoint

import jspec
from benchmarks.kernels.invariance.steps import last_layers
from benchmarks.random_modules import random_module
from benchmarks.shapes import GEMMA4_31B, LLAMA_8B, QWEN3_30B_A3B, QWEN36_27B, QWEN36_35B_A3B, TINY_HYBRID
from jspec.config import Experts, LayerConfig
from jspec.config.heads import Eagle3Config, MedusaConfig
from jspec.models import init, one_order
from jspec.pallas import dispatch
from jspec.pallas.matmul import few_tokens

SHARED = tuple(
    LayerConfig(LLAMA.head_dim, LLAMA.num_kv_heads, LLAMA.intermediate_size, reads_cache_of=0 if layer else None)
    for layer in range(LLAMA.num_layers)
)
HEAD = Eagle3Config(dataclasses.replace(LLAMA, num_layers=1, windows=()), LLAMA.vocab_size, LLAMA.hidden_size)


def without_one_order_on_a_gpu(monkeypatch, config) -> str | None:
    """What ``without_one_order`` says of a model on a GPU. The tiny maps here have no kernel there, so that something is
    said of every model; what was not compared comes first."""
    monkeypatch.setattr(one_order.jax, "default_backend", lambda: "gpu")
    return one_order.without_one_order("bfloat16", init(config, nnx.Rngs(0), "float32"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (dataclasses.replace(LLAMA, norm_placement="after_sum"), "norm_placement='after_sum'"),
        (TINY_HYBRID, "delta_nets.key_size=8"),
        (dataclasses.replace(LLAMA, layers=SHARED), "layers.reads_cache_of=0"),
        (dataclasses.replace(HEAD, fuse_bias=True), "fuse_bias=True"),
        (
            dataclasses.replace(HEAD, layers=dataclasses.replace(HEAD.layers, activation="relu")),
            "layers.activation='relu'",
        ),
        (MedusaConfig(LLAMA.vocab_size, LLAMA.hidden_size, num_heads=2), "MedusaConfig"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_was_not_compared_on_a_gpu_is_named(config, named, monkeypatch):
    found = without_one_order_on_a_gpu(monkeypatch, config)
    assert found is not None
    assert f"{named}, of which no passes were compared on a GPU" in found


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        HEAD,
        dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True, norm="rms_wide", windows=(8,) * LLAMA.num_layers),
        dataclasses.replace(LLAMA, experts=Experts(4, 2, 8, scores="sigmoid", corrected=True, shared=1)),
    ],
    ids=["Llama", "EAGLE-3", "norms, biases and windows", "experts"],
)
def test_what_was_compared_is_not_named(config, monkeypatch):
    found = without_one_order_on_a_gpu(monkeypatch, config)
    assert found is None or "compared" not in found


@pytest.mark.parametrize("quantization", [None, "int4", "fp8_block"])
@pytest.mark.parametrize(
    "shape", [LLAMA_8B, QWEN3_30B_A3B, QWEN36_27B, QWEN36_35B_A3B, GEMMA4_31B], ids=lambda shape: shape.architecture
)
def test_layers_of_real_sizes_have_one_order_on_an_h200(shape, quantization, monkeypatch):
    monkeypatch.setattr(one_order.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(dispatch, "_HOPPER", (jax.devices()[0].device_kind,))
    monkeypatch.setattr(few_tokens, "LOWERS", True)
    config = last_layers(shape, 32_768, quantization)
    found = []
    jax.eval_shape(lambda: found.append(one_order.without_one_order("bfloat16", random_module(config))))
    assert found == [None]


def test_drafts_that_decide_nothing_need_no_order(tmp_path, monkeypatch):
    """A draft model with states that have none leaves a target unpinned where it only makes texts come sooner."""
    monkeypatch.setattr(one_order, "RECURRENCE", one_order._unordered("recurrence"))
    target = tiny_checkpoint(tmp_path / "target", max_position_embeddings=128)
    draft = tiny_checkpoint(tmp_path / "draft", "Qwen3_5ForCausalLM", max_position_embeddings=128)

    def pins_shapes(**how) -> bool:
        return jspec.load(target, draft, max_len=64, max_batch=2, **how).engine.config.pins_shapes

    assert not pins_shapes(verify="match", draft_sampling="coupled")
    assert pins_shapes(verify="rejection")
    assert pins_shapes(verify="match", draft_sampling="sample")
