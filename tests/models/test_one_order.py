"""Which models have one order of sums on a GPU."""

import dataclasses

import pytest
from flax import nnx
from tiny import LLAMA

from jspec.models import Decoder, one_order
from jspec.models.cache_pools import KVRounding


def without_one_order_on_a_gpu(monkeypatch, rounding=None, **fields) -> str | None:
    """What ``without_one_order`` says of a model on a GPU. The tiny maps here have no kernel there, so that something is
    said of every model; what was not compared comes first."""
    monkeypatch.setattr(one_order.jax, "default_backend", lambda: "gpu")
    model = Decoder(dataclasses.replace(LLAMA, **fields), rngs=nnx.Rngs(0))
    model.kv_rounding = rounding
    return one_order.without_one_order("bfloat16", model)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"qk_norm": True}, "qk_norm=True"),
        ({"qkv_bias": True}, "qkv_bias=True"),
        ({"attention_softcap": 3.0}, "attention_softcap=3.0"),
        ({"windows": (8,) * LLAMA.num_layers}, "windows="),
        ({"rounding": (KVRounding(),) * LLAMA.num_layers}, "a cache in eight bits"),
    ],
    ids=str,
)
def test_what_was_not_compared_on_a_gpu_is_named(fields, named, monkeypatch):
    found = without_one_order_on_a_gpu(monkeypatch, **fields)
    assert found is not None
    assert named in found
    assert "compared" in found


def test_layers_of_llama_were_compared(monkeypatch):
    found = without_one_order_on_a_gpu(monkeypatch)
    assert found is None or "compared" not in found
