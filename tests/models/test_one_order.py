"""Which models have one order of sums on a GPU."""

import dataclasses

import pytest
from flax import nnx
from tiny import LLAMA, tiny_checkpoint

import jspec
from jspec.config import Experts, LayerConfig
from jspec.config.heads import Eagle3Config, MedusaConfig
from jspec.models import init, one_order

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
        (dataclasses.replace(LLAMA, attention_gate=True), "attention_gate=True"),
        (dataclasses.replace(LLAMA, layers=SHARED), "layers.reads_cache_of=0"),
        (dataclasses.replace(HEAD, fuse_bias=True), "fuse_bias=True"),
        (
            dataclasses.replace(HEAD, layers=dataclasses.replace(HEAD.layers, activation="relu")),
            "layers.activation='relu'",
        ),
        (MedusaConfig(LLAMA.vocab_size, LLAMA.hidden_size, num_heads=2), "MedusaConfig"),
    ],
    ids=str,
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
