"""Weights of eight bits, and models of four: rounding in exact arithmetic, products against what a weight stands for."""

import dataclasses
import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from causal_heads import causal_drafts
from engines import V, causal, target
from flax import nnx
from heads import VARIANTS, compile_fast, dequantized_head, plain_config, random_head
from normals import normal_numbers
from tiny import LLAMA
from weight_only_problems import assert_product_is_rounded_once

from jspec.config import EngineConfig, ModelConfig
from jspec.config.heads import PardConfig
from jspec.config.model_fields import PLAIN_HEAD
from jspec.loading.memory_budget import ModelMemory
from jspec.models import abstract_params, build, flat_params, init, quantization
from jspec.models.layers import Linear
from jspec.models.quantization import quantize
from jspec.quantization import int4
from jspec.quantization.formats import known_format
from jspec.quantization.weight import Weight

CONFIG = dataclasses.replace(LLAMA, num_layers=2, windows=(), qkv_bias=True)
KINDS = ("int8", "fp8")
ALL = (*KINDS, "int4", "fp8_block")
CODES = np.arange(256, dtype=np.uint8).view(known_format("fp8").numbers)
FP8 = sorted({Fraction(float(x)) for x in CODES if np.isfinite(x)})
FEW = EngineConfig(max_batch=2, max_len=32, page_size=16)


def with_kind(kind: str | None, tied: bool = False, head: bool = True) -> ModelConfig:
    return dataclasses.replace(CONFIG, quantization=kind, tie_embeddings=tied, other_formats=() if head else PLAIN_HEAD)


def nearest(quotient: Fraction, kind: str) -> Fraction:
    """Round to nearest, ties to even, in exact arithmetic."""
    if kind == "int8":
        return Fraction(round(quotient))
    best = min(abs(code - quotient) for code in FP8)
    closest = [code for code in FP8 if abs(code - quotient) == best]
    even = [code for code in closest if np.array(float(code), known_format("fp8").numbers).view(np.uint8) % 2 == 0]
    return closest[0] if len(closest) == 1 else even[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rounding_agrees_with_exact_arithmetic(kind, dtype):
    weight = normal_numbers((5, 37), dtype=dtype)
    weight[1] *= dtype(0.01)
    rounded, scale = quantize(weight, kind)
    assert (rounded.dtype, scale.dtype, scale.shape) == (known_format(kind).numbers, np.float32, (5,))
    for row, numbers, by in zip(weight, rounded, scale, strict=True):
        assert by == np.float32(float(np.abs(row.astype(np.float64)).max()) / known_format(kind).largest)
        for number, stored in zip(row, numbers, strict=True):
            quotient = Fraction(float(np.float32(float(number) / float(by))))
            assert Fraction(float(stored)) == nearest(quotient, kind)
    assert np.abs(rounded.astype(np.float32)).max(axis=1).tolist() == [known_format(kind).largest] * 5


def test_ties_go_to_even():
    """A row whose scale is 1."""
    row = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]], np.float32)
    assert quantize(row, "int8")[0].tolist() == [[127, 0, 2, 2, 0, -2, 126]]
    row = np.array([[448, 17, 19, -17, 432, 2**-10, 3 * 2**-10]], np.float32)  # the last two between subnormals
    assert quantize(row, "fp8")[0].astype(float).tolist() == [[448, 16, 20, -16, 448, 0, 2**-8]]


@pytest.mark.parametrize("kind", KINDS)
def test_output_channels_of_zeros_stay_zeros(kind):
    """Zeros, and numbers whose scale a GPU would take for zero."""
    weight = np.zeros((3, 8), np.float32)
    weight[1, 2], weight[2, 3] = 1e-38, -2.0
    rounded, scale = quantize(weight, kind)
    assert scale[:2].tolist() == [1, 1]
    assert not rounded[:2].astype(np.float32).any()
    assert rounded[2, 3].astype(np.float32) == -known_format(kind).largest


@pytest.mark.parametrize("kind", ALL)
def test_blocks_of_conversion_change_nothing(kind, monkeypatch):
    weight = normal_numbers((23, 8))
    at_once = quantize(weight, kind)
    monkeypatch.setattr(quantization, "_BLOCK", 40)
    monkeypatch.setattr(int4, "_BLOCK", 300)
    for array, in_blocks in zip(at_once, quantize(weight, kind), strict=True):
        np.testing.assert_array_equal(array, in_blocks)


@pytest.mark.parametrize(("rows", "gpu"), [((2, 3), False), ((1, 1), False), ((1, 1), True)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_agree_with_dequantised_weights(kind, dtype, rows, gpu, monkeypatch):
    """Sums of the stored numbers, scaled and rounded once; also in the way a GPU takes for one row."""
    if gpu:
        on_gpu = lambda kernel, reference, *args: kernel(*args)  # noqa: E731
        monkeypatch.setattr("jspec.pallas.matmul.one_token.by_platform", on_gpu)
    rounded, scale = quantize(normal_numbers((13, 64)), kind)
    weight = Weight(jnp.asarray(rounded), jnp.asarray(scale), form=known_format(kind))
    assert_product_is_rounded_once(weight, rows, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_no_dequantised_weight_is_made(kind):
    """The scale is applied to sums: scaling the weight would make a copy of it in the dtype of x."""
    linear = Linear(16, 8, bias=True, quantization=kind, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    jaxpr = str(jax.make_jaxpr(linear)(jnp.ones((3, 16), jnp.bfloat16)))
    assert re.search(r"f32\[3,8\] = mul", jaxpr)
    assert not re.search(r"\[8,16\] = (mul|div)", jaxpr)
    assert jaxpr.count("bf16[8,16] = convert_element_type") == 1


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_a_model_agrees_with_its_dequantised_weights(kind, tied, head):
    config = with_kind(kind, tied, head)
    model = init(config, nnx.Rngs(0))
    params = flat_params(model)
    scales = {name: value for name, value in params.items() if name.endswith("scale")}
    assert len(scales) == 2 * 4 + head
    assert (model.output_weight.scale is not None) == head
    dequantized, form = {name: value for name, value in params.items() if name not in scales}, known_format(kind)
    for name, stored in config.stored_params().items():
        arrays = {part: params[param] for part, param in stored.names.items()}
        assert (arrays["weight"].dtype, arrays["scale"].dtype) == (form.numbers, form.scale)
        dequantized[name] = Weight.of(arrays, form, stored.shape[1]).dequantize()
    tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, config.vocab_size)
    expected = causal(build(with_kind(None, tied), dequantized))(tokens)
    np.testing.assert_allclose(causal(model)(tokens), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(model.embed(tokens), dequantized["embedding"][tokens])


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if config.quantization is not None])
def test_a_head_agrees_with_its_dequantised_weights(name):
    """Its drafts over entire texts, and its cache."""
    model, config, head = target(), VARIANTS[name], random_head(VARIANTS[name])
    full_config, full_head = plain_config(config), dequantized_head(config, head)
    text = jax.random.randint(jax.random.key(1), (3, 16), 0, V, jnp.int32)
    length = jnp.array([3, 7, 12], jnp.int32)

    def drafts(config, head):
        return compile_fast(lambda text, length: causal_drafts(config, head, model, text, length, 3))(text, length)

    actual, expected = drafts(config, head), drafts(full_config, full_head)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert np.isneginf(actual.logits).any() == (config.reduced or getattr(config, "candidates", 0) > 0)


@pytest.mark.parametrize("kind", ALL)
def test_random_weights_are_as_large_as_those_of_another_model(kind):
    plain, rounded = (Linear(400, 300, quantization=k, dtype=jnp.float32, rngs=nnx.Rngs(0)) for k in (None, kind))
    assert float(rounded.stored.dequantize().std()) == pytest.approx(float(plain.weight[...].std()), rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [None, *ALL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_arrays(tied, kind, dtype):
    config = with_kind(kind, tied)
    leaves = abstract_params(config, dtype).values()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    settings = dataclasses.replace(FEW, dtype=dtype)
    assert ModelMemory(config, None, 1).budget(settings).weights == size
    assert ModelMemory(config, PardConfig(config, 0), 1).budget(settings).weights == 2 * size
    assert config.num_parameters == with_kind(None, tied).num_parameters


def test_unknown_quantizations_are_refused():
    with pytest.raises(ValueError, match="quantization='int2': expected one of None, int8, fp8, int4"):
        with_kind("int2")


def test_params_have_to_be_quantised():
    """A cast would leave the rounded numbers without the scale that they need."""
    plain = flat_params(init(CONFIG, nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"parameter 'head\.scale' is missing"):
        build(with_kind("int8"), plain)
    params = flat_params(init(with_kind("int8"), nnx.Rngs(0)))
    params["layers.0.mlp.down.weight"] = plain["layers.0.mlp.down.weight"]
    with pytest.raises(ValueError, match=r"'layers\.0\.mlp\.down\.weight' is float32: expected int8"):
        build(with_kind("int8"), params)
    with pytest.raises(ValueError, match=r"parameter 'head\.scale' is unknown"):
        build(CONFIG, plain | {"head.scale": params["head.scale"]})
