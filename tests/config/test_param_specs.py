"""The module built from a config has exactly the parameters that the config declares."""

import dataclasses
import math

import pytest
from engines import OF_HYBRIDS, TARGET
from head_configs import HEADS, QUANTIZED, REDUCED

from jspec.checkpoints.tensors.names import tensor_table
from jspec.checkpoints.tensors.params import stored_params
from jspec.config import Experts, Latent
from jspec.config.decoder_params import HEADS as QUERIES
from jspec.config.decoder_params import KV
from jspec.config.model_fields import PLAIN_HEAD
from jspec.config.param_specs import EMBED, Parameter, size_of
from jspec.models import abstract_params

MODELS = [
    dataclasses.replace(TARGET, quantization=kind, **options)
    for kind in (None, "int8", "fp8", "int4", "fp8_block")
    for options in (
        {},
        {"tie_embeddings": True},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True},
        {"qk_norm": True, "qk_norm_over": "projection", "norm_placement": "after", "architecture": "Olmo2ForCausalLM"},
        {"norm_placement": "around", "norm": "rms_offset", "rope": None, "architecture": "Gemma2ForCausalLM"},
        {"norm": "layer", "gated_mlp": False, "position_offset": 2, "qk_norm": True, "mlp_bias": True},
        {"norm": "layer", "norm_placement": "after_sum", "final_norm": False, "architecture": "OPTForCausalLM"},
        {"embedding_size": 6},
        {"experts": Experts(5, 2, 12)},
        {"experts": Experts(5, 2, 12, shared_width=20)},
        {"experts": Experts(5, 2, 12, layers=(True, False, True)), "architecture": "Qwen3MoeForCausalLM"},
        {"embedding_size": 6, "tie_embeddings": True, "architecture": "OPTForCausalLM"},
        {"architecture": "Phi3ForCausalLM", "qkv_bias": True},
        {"other_formats": PLAIN_HEAD},
        {"other_formats": PLAIN_HEAD, "tie_embeddings": True},
        {"attention_sinks": True},
        {"draft_vocab_size": 9},
    )
]
OF_LATENTS = {"architecture": "DeepseekV3ForCausalLM", "windows": (), "num_kv_heads": TARGET.num_heads}
HYBRIDS = [
    OF_HYBRIDS,
    {
        **OF_HYBRIDS,
        "architecture": "Qwen3NextForCausalLM",
        "experts": Experts(5, 2, 12, layers=(True, True, False), shared=1),
    },
    {**OF_HYBRIDS, "architecture": "Qwen3_5MoeForCausalLM", "experts": Experts(5, 2, 12, shared=2, shared_gate=True)},
]
MODELS += [
    dataclasses.replace(TARGET, quantization=kind, **options)
    for kind in (None, "int8", "int4", "fp8_block")
    for options in HYBRIDS
]
MODELS += [
    dataclasses.replace(TARGET, quantization=kind, latent=Latent(160, 2, 10, rank), **OF_LATENTS)
    for kind in (None, "int8", "fp8", "int4", "fp8_block", "nvfp4")
    for rank in (None, 6)
]
OTHERS = (("layers.1.attention.qkv", "nvfp4"), ("layers.0.mlp.down", None), ("project_in", None))
MODELS += [dataclasses.replace(TARGET, quantization="fp8_block", other_formats=OTHERS, embedding_size=6)]
MODELS += [dataclasses.replace(TARGET, quantization="int8", other_formats=OTHERS, experts=Experts(5, 2, 12))]
SHARED = (("layers.0.mlp.shared.gate_up", None), ("layers.2.mlp.shared.down", "nvfp4"), *OTHERS)
OF_OWN_FORMAT = Experts(5, 2, 12, layers=(True, False, True), shared_width=24, shared_gate=True)
MODELS += [dataclasses.replace(TARGET, quantization="int4_32_float16", other_formats=SHARED, experts=OF_OWN_FORMAT)]
APART = (("layers.0.attention.values", "fp8"), ("layers.2.attention.values", None))
MODELS += [dataclasses.replace(TARGET, quantization="int8", other_formats=APART, qkv_bias=True)]
MODELS += [
    dataclasses.replace(
        TARGET, quantization="int4", **{**OF_HYBRIDS, "other_formats": (("layers.1.attention.values", "int8"),)}
    )
]
MODELS += [  # as checkpoints store them
    dataclasses.replace(TARGET, quantization=kind, **{"other_formats": () if "all" in kind else PLAIN_HEAD, **options})
    for kind in ("int4_32_float16_zeros", "int4_all_bfloat16", "int8_32_float32_ordered", "nvfp4", "mxfp4")
    for options in (
        {},
        {"experts": Experts(5, 2, 12)},
        {"other_formats": (*OTHERS, *PLAIN_HEAD), "embedding_size": 6},
        OF_HYBRIDS,
    )
]
CONFIGS = [*MODELS, *HEADS, *REDUCED, *QUANTIZED]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_have_the_declared_parameters(config, dtype):
    built = {name: (leaf.shape, leaf.dtype) for name, leaf in abstract_params(config, dtype).items()}
    assert stored_params(config, dtype) == built


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_counts_and_bytes_follow(config):
    built = abstract_params(config, "bfloat16")
    stored = config.stored_params()
    scales = {name for one in stored.values() for part, name in one.names.items() if part != "weight"}
    numbers = {name: math.prod(leaf.shape) for name, leaf in built.items() if name not in scales}
    shapes = config.param_shapes()  # of what is packed in four bits, in place of the bytes
    numbers |= {name: math.prod(shapes[name]) for name, one in stored.items() if one.form.in_codes}
    assert config.num_parameters == sum(numbers.values())
    assert config.weight_bytes(2) == sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in built.values())


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tensors_fill_every_parameter_once(config):
    """The tensors of a parameter fill its axis 0 one after another, without gap or overlap, up to its end."""
    filled = dict.fromkeys(config.param_shapes(), 0)
    for param, start, shape in tensor_table(config).values():
        assert start == filled[param]
        assert shape[1:] == config.param_shapes()[param][1:]
        filled[param] += shape[0]
    assert filled == {name: shape[0] for name, shape in config.param_shapes().items()}


def test_stacked_tensors_have_names_of_their_parts():
    tensors = {"q.{}": QUERIES, "k.{}": KV, "v.{}": KV}
    stacked = Parameter("layers.{}.qkv.weight", tensors, (EMBED,), ((0,), (1,)), "int8")
    dimensions = {"N": 4, "G": 2, "H": 3, "D": 5}
    assert stacked.tensor_lengths(dimensions) == (12, 6, 6)
    assert stacked.shape(dimensions) == (24, 5)
    assert stacked.axes == (("heads", "kv", "kv"), ("embed",))
    assert stacked.array_name("scale") == "layers.{}.qkv.scale"


def test_sizes_are_products():
    assert size_of("2NH", {"N": 4, "H": 3}) == 24
    assert size_of("Vd", {"V": 7, "Vd": 5}) == 5
    with pytest.raises(AssertionError, match="no product"):
        size_of("N+G", {"N": 4, "G": 3})
