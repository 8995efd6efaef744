"""Values that are a linear map of their own, because they are stored in another format than queries and keys."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from engines import OF_HYBRIDS, TARGET, error_in_shards
from flax import nnx

from jspec.models import Decoder, build, causal_logits, flat_params
from jspec.models.w8a8 import with_quantized_activations

VALUES = (("layers.1.attention.values", None),)
TOKENS = np.random.default_rng(0).integers(TARGET.vocab_size, size=(2, 9))


def logits(model):
    return np.asarray(jax.jit(functools.partial(causal_logits, model))(TOKENS))


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True}, OF_HYBRIDS], ids=["plain", "biases", "gates"])
def test_the_numbers_are_those_of_one_map(options):
    whole = dataclasses.replace(TARGET, **options)
    apart = dataclasses.replace(whole, other_formats=VALUES)
    params = {name: np.asarray(array) for name, array in flat_params(Decoder(whole, rngs=nnx.Rngs(1))).items()}
    expected = logits(build(whole, params))
    start = (whole.num_heads + whole.num_kv_heads) * whole.head_dim
    stop = start + whole.num_kv_heads * whole.head_dim
    for part in ("weight", "bias") if "qkv_bias" in options else ("weight",):
        qkv = params[f"layers.1.attention.qkv.{part}"]
        params[f"layers.1.attention.values.{part}"] = qkv[start:stop]
        params[f"layers.1.attention.qkv.{part}"] = np.concatenate([qkv[:start], qkv[stop:]])
    model = build(apart, params)
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert error_in_shards(model, TOKENS) < 1e-5


def test_a_norm_that_both_read_stays_in_floats():
    """Where inputs of maps are rounded to eight bits, and one of the two maps has others."""
    config = dataclasses.replace(TARGET, quantization="int8", other_formats=VALUES)
    model = with_quantized_activations(Decoder(config, rngs=nnx.Rngs(1)), "int8")
    whole, apart = model.layers[0], model.layers[1]
    assert whole.attention_norm.quantize_outputs == "int8"
    assert apart.attention_norm.quantize_outputs is None
    assert apart.attention.qkv.quantize_inputs == "int8"
    assert apart.attention.values.quantize_inputs is None
    assert np.isfinite(logits(model)).all()
