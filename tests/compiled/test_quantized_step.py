"""The decode step over quantised weights as XLA compiles it for an H200: no dequantised copy of a weight is ever made."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from deviceless import compiled_for_h200, compiled_round, why_not
from matmul_rows import abstract_weight

from benchmarks.random_modules import abstract_module
from benchmarks.rounds.hlo import launched, moves
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import LLAMA_1B, LLAMA_8B, head_for
from jspec.config import Latent
from jspec.models.w8a8 import with_quantized_activations
from jspec.pallas.matmul import matmul
from jspec.pallas.matmul.quantize_activations import quantize_tokens

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

SMALLEST = 2 * 2048 * 2048  # bytes in bfloat16 of the draft's smallest weight; the target's has 4 times as many
KINDS = (
    "int8",
    "fp8",
    "int4",
    "fp8_block",
    "int4_32_float16_zeros",
    "int4_64_bfloat16",
    "int4_all_float32_zeros",
    "int8_32_float16_zeros",
    "mxfp4",
    "mxfp8",
)


def temporaries(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


def assert_makes_no_weight(step, batch: int, K: int):
    """That a round holds logits, but no copy of a weight."""
    assert temporaries(step) < SMALLEST + 6 * 4 * batch * (K + 1) * LLAMA_8B.vocab_size
    assert [op.line for op in moves(step.as_text(), SMALLEST)] == []


@pytest.mark.parametrize(
    ("kind", "batch"), [("int8", 16), ("fp8", 1), ("int4", 1), ("int4", 16), ("fp8_block", 1), ("fp8_block", 16)]
)
def test_a_round_makes_no_dequantised_weight(kind, batch):
    """Of two layers and the output head, and of a draft model with a tied one.

    The loop over rounds is a trap of its own: what does not change from round to round, as a dequantised weight does not,
    might be computed before it."""
    target = abstract_module(dataclasses.replace(LLAMA_8B, num_layers=2, windows=(), quantization=kind))
    draft = dataclasses.replace(LLAMA_1B, num_layers=1, windows=(), quantization=kind)
    what = Decoding("draft_model", 2, batch, start=64, new=32)
    assert_makes_no_weight(compiled_round(what, target, abstract_module(draft, drafts=True), draft)[0], batch, what.K)


def test_a_round_in_several_formats_makes_no_dequantised_weight():
    """Of attention in FP8, MLPs in NVFP4 and in codes of four bits, and an output head in groups of eight."""
    others = tuple((f"layers.0.mlp.{name}", "nvfp4") for name in ("gate_up", "down"))
    others += (("layers.1.mlp.down", "int4"), ("head", "int8_32_float16"))
    target = abstract_module(
        dataclasses.replace(LLAMA_8B, num_layers=2, windows=(), quantization="fp8", other_formats=others)
    )
    draft = dataclasses.replace(LLAMA_1B, num_layers=1, windows=(), quantization="int8")
    what = Decoding("draft_model", 2, 16, start=64, new=32)
    assert_makes_no_weight(compiled_round(what, target, abstract_module(draft, drafts=True), draft)[0], 16, what.K)


@pytest.mark.parametrize(("method", "batch"), [("eagle", 1), ("eagle", 16), ("dspark", 1), ("draft_model", 16)])
def test_an_int8_draft_makes_no_dequantised_weight(method, batch):
    """Of a drafter in int8 with 32,768 tokens, beside a target that is not quantised."""
    target = dataclasses.replace(LLAMA_8B, num_layers=2, windows=())
    plain = dataclasses.replace(LLAMA_1B, num_layers=1, windows=())
    plain = plain if method == "draft_model" else head_for(target, method)
    draft = plain.with_draft_vocabulary(32_768).with_quantization("int8")
    what = Decoding(method, 2, batch, start=64, new=32)
    modules = abstract_module(target), abstract_module(draft, drafts=True)
    assert_makes_no_weight(compiled_round(what, *modules, draft)[0], batch, what.K)


@pytest.mark.parametrize(("kind", "batch", "launches"), [("int8", 16, 8), ("fp8_block", 1, 9), ("mxfp8", 1, 9)])
def test_each_product_of_eight_bits_is_one_launch(kind, batch, launches):
    """Of one more layer, in plain rounds: four products, and what a layer of bfloat16 launches beside them."""

    def round_of(layers: int):
        target = abstract_module(dataclasses.replace(LLAMA_8B, num_layers=layers, windows=(), quantization=kind))
        what = Decoding(None, 0, batch, start=64, new=32)
        return launched(compiled_round(what, target)[0].as_text())

    few, more = round_of(1), round_of(2)
    assert len(more) - len(few) <= launches
    assert sum("mosaic_gpu_v2" in op.line for op in more) == 2 * 4 + 1  # and that of the output head


def round_over_latents(kind: str, batch: int, layers: int) -> str:
    """A plain round of so many layers with the attention of DeepSeek-V3, compiled."""
    sizes = {"hidden_size": 7168, "num_heads": 128, "num_kv_heads": 128, "head_dim": 192, "num_layers": layers}
    latents = {"architecture": "DeepseekV3ForCausalLM", "latent": Latent(512, 64, 128, 1536), "windows": ()}
    target = abstract_module(dataclasses.replace(LLAMA_8B, quantization=kind, **sizes, **latents))
    what = Decoding(None, 0, batch, start=64, new=32)
    return compiled_round(what, target)[0].as_text()


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    "kind", ["fp8_block", "int4", "int4_32_float16_zeros", "int8_64_bfloat16", "nvfp4", "mxfp4", "mxfp8"]
)
def test_maps_of_latents_are_not_dequantised(kind, batch):
    """Neither whole nor the numbers of each latent that share a scale at a time. Those of keys and of values have a launch
    each."""
    few, more = (round_over_latents(kind, batch, layers) for layers in (1, 2))
    assert not re.search(r"(bf16|f32)\[(128,128|16384),(512|128|64|32)\]", more)
    assert [op.line for op in moves(more, 128 * 128 * 512)] == []
    for kernel in ("absorb_queries", "project_values"):
        assert sum(f"jspec_{kernel}" in op.line for op in launched(more)) == 2
    if kind == "fp8_block":  # other maps in codes have launches for the order of their inputs
        assert len(launched(more)) - len(launched(few)) <= 14


@pytest.mark.parametrize("batch", [1, 16])
def test_numbers_of_inputs_are_multiplied_where_activations_are_written(batch):
    """By the fusion that writes what the down projection reads, and in one launch more behind attention's kernel."""

    def launches(form: str) -> int:
        others = ((f"layers.{i}.{name}", form) for i in range(2) for name in ("attention.out", "mlp.down"))
        sizes = {"num_layers": 2, "windows": (), "quantization": "int4", "other_formats": tuple(others)}
        target = abstract_module(dataclasses.replace(LLAMA_8B, **sizes))
        return len(launched(compiled_round(Decoding(None, 0, batch, start=64, new=32), target)[0].as_text()))

    assert launches("int4_scaled") - launches("int4") <= 2


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_one_pass_over_the_weight(kind, rows):
    assert temporaries(compiled_for_h200(matmul, *_product(kind, rows))) < 2**20


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 16, 2048])
def test_rounded_tokens_are_multiplied_in_eight_bits(kind, rows):
    """By jspec's kernel for few tokens in int8, and else by one product of XLA's, of numbers as they are stored."""
    product = compiled_for_h200(lambda x, weight: matmul(quantize_tokens(x, kind), weight), *_product(kind, rows))
    assert temporaries(product) < 4 * rows * 28672 + 2**18  # the sums of all tokens, before their scales
    text, by_jspec = product.as_text(), kind == "int8" and rows < 512
    assert not re.search(r"(bf16|f32)\[(28672,4096|4096,28672)\]", text)  # within a kernel neither
    assert text.count(" dot(") == (0 if by_jspec else 1)
    most = 2 if by_jspec else 3 + (rows == 1)  # rounding, the product, XLA's scales, and of one token a second one
    assert len(launched(text)) <= most


def test_a_round_of_a_target_that_rounds_makes_no_dequantised_weight():
    config = dataclasses.replace(LLAMA_8B, num_layers=2, windows=(), quantization="int8")
    target = with_quantized_activations(abstract_module(config), "int8")
    what = Decoding(None, 0, 16, start=64, new=32)
    step, _ = compiled_round(what, target)
    assert_makes_no_weight(step, 16, what.K)
    assert sum("w8a8_matmul" in op.line for op in launched(step.as_text())) == 2 * 4  # each map of a layer


def test_the_check_detects_a_dequantised_weight():
    def dequantized(x, weight):
        numbers = jax.lax.optimization_barrier(weight.numbers.astype(x.dtype))
        return matmul(x, dataclasses.replace(weight, numbers=numbers))

    x, weight = _product("int8", 5)
    assert temporaries(compiled_for_h200(dequantized, x, weight)) >= 2 * weight.numbers.size


def _product(kind: str, rows: int):
    x = jax.ShapeDtypeStruct((rows, 1, 4096), jnp.bfloat16)
    return x, abstract_weight(kind, (28672, 4096))
