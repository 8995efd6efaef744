"""Which linear maps have eight bits in a model of int4: those where four cost most, as long as the mean stays small."""

import dataclasses

import pytest
from engines import TARGET

from benchmarks.shapes import SHAPES
from jspec.config.eight_bit_maps import MOST_BITS, eight_bit_maps
from jspec.config.model_fields import HEAD

SMALL = dataclasses.replace(  # SmolLM2-135M's shape, whose queries, keys and values are a sixth of its maps
    SHAPES["llama-3.1-8b"].target,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    tie_embeddings=True,
    windows=(),
)
CONFIGS = {"135M": SMALL} | {name: pair.target for name, pair in SHAPES.items() if not name.startswith("tiny")}


def mean_bits(config) -> float:
    stored = [one for name, one in config.stored_params().items() if name not in (f"{HEAD}.weight", "embedding")]
    sizes = [one.shape[0] * one.shape[1] for one in stored]
    scales = [8 * one.form.arrays(one.shape)["scale"].bytes for one in stored]
    return sum(one.form.bits * size + bits for one, size, bits in zip(stored, sizes, scales, strict=True)) / sum(sizes)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_mean_is_bounded_and_the_head_has_eight_bits(name):
    config = CONFIGS[name].with_quantization("int4")
    assert config.head_quantization == "int8"
    assert 4.1 < mean_bits(config) <= MOST_BITS
    layers = [int(of_map.split(".")[1]) for of_map, _ in config.other_formats if ".mlp." in of_map]
    assert not any(config.has_experts(layer) for layer in layers)


def test_values_are_apart_where_queries_take_too_many_bits():
    chosen = [
        {name for name, _ in CONFIGS[name].with_quantization("int4").other_formats} for name in ("135M", "llama-3.1-8b")
    ]
    small, large = chosen
    assert {name for name in small if name.endswith("values")} == {f"layers.{i}.attention.values" for i in range(29)}
    assert {name for name in small if name.endswith("qkv")} == {"layers.29.attention.qkv"}  # all of the last layer
    assert {"layers.29.mlp.gate_up", "layers.0.mlp.down", "layers.28.mlp.down"} < small
    assert "layers.15.mlp.down" not in small
    assert {f"layers.{i}.attention.qkv" for i in range(32)} < large
    assert not any(name.endswith("values") for name in large)


def test_joined_tensors_and_latents_have_no_values_apart():
    joined = dataclasses.replace(SMALL, architecture="Phi3ForCausalLM")
    assert not any(
        name.endswith("values") for name, _ in eight_bit_maps(dataclasses.replace(joined, quantization="int4"))
    )


def test_other_formats_alone_part_values():
    """A format of queries that is not that of most maps leaves values with them."""
    config = dataclasses.replace(TARGET, quantization="int8", other_formats=(("layers.0.attention.qkv", "fp8"),))
    assert "layers.0.attention.values.weight" not in config.param_shapes()
    apart = dataclasses.replace(config, other_formats=(("layers.0.attention.values", "fp8"),))
    shapes, whole = apart.param_shapes(), config.param_shapes()["layers.0.attention.qkv.weight"]
    parts = [shapes[f"layers.0.attention.{name}.weight"] for name in ("qkv", "values")]
    assert (sum(rows for rows, _ in parts), parts[0][1]) == whole
    assert apart.num_parameters == config.num_parameters
