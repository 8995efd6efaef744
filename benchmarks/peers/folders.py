"""Folders that hold the config.json of a shape and nothing else, as its checkpoints on the Hugging Face hub have it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks.peers.rows import Row
from benchmarks.shapes import head_for
from jspec.checkpoints.huggingface.config import sizes
from jspec.checkpoints.huggingface.families import MODEL_TYPES
from jspec.config import DeltaNets, Experts, ModelConfig
from jspec.config.heads import EagleConfig

_FP8 = {"num_bits": 8, "type": "float"}
_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def write(folder: pathlib.Path, fields: Mapping[str, Any]) -> str:
    """Make ``folder`` with this config.json; its name."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))
    return str(folder)


def target_fields(row: Row) -> dict[str, Any]:
    """config.json of the target of a row."""
    text = model_fields(row.shape)
    fields = text if row.shape.delta_nets is None else _wrapped(text, row.shape)
    return fields if row.stored is None else {**fields, "quantization_config": quantization_fields(row)}


def head_fields(row: Row) -> dict[str, Any]:
    """config.json of the EAGLE head of a row: that of a decoder of one layer."""
    head = head_for(row.shape, "eagle")
    assert isinstance(head, EagleConfig)
    return model_fields(head.decoder)


def model_fields(config: ModelConfig) -> dict[str, Any]:
    """config.json of a language model in bfloat16, of a class that the rows or ``benchmarks.host.loading`` have."""
    types = {architecture: model_type for model_type, architecture in MODEL_TYPES.items()}
    rope = config.rope
    assert rope is not None
    whole = dataclasses.replace(config, rope=dataclasses.replace(rope, fraction=1.0))
    fields = {
        "architectures": [config.architecture],
        "model_type": types[config.architecture],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # its older name
        **sizes(whole),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.qkv_bias,
    }
    if config.experts is not None:
        fields |= _expert_fields(config.experts, config)
    if config.delta_nets is not None:
        fields |= _delta_net_fields(config.delta_nets, config)
    return fields


def _expert_fields(experts: Experts, config: ModelConfig) -> dict[str, Any]:
    """What is added for a mixture of experts."""
    fields: dict[str, Any] = {"num_experts_per_tok": experts.chosen}
    if experts.stored == "mxfp4":
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        return fields | {
            "num_local_experts": experts.count,
            "swiglu_limit": experts.clamp,
            "sliding_window": next(filter(None, config.windows)),
            "layer_types": ["sliding_attention" if window else "full_attention" for window in config.windows],
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain},
        }
    fields |= {"num_experts": experts.count, "moe_intermediate_size": experts.width}
    if experts.shared:
        return fields | {"shared_expert_intermediate_size": experts.shared * experts.width}
    return fields | {"norm_topk_prob": experts.renormalise, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _delta_net_fields(nets: DeltaNets, config: ModelConfig) -> dict[str, Any]:
    """What is added, and said otherwise, where some layers have gated delta nets."""
    rope = config.rope
    assert rope is not None
    pairs = int(rope.fraction * config.head_dim) // 2  # of a head that rotate, of images by time, height and width
    return {
        "rope_scaling": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.theta,
            "partial_rotary_factor": rope.fraction,
            "mrope_section": [len(range(start, pairs, 3)) for start in range(3)],
            "mrope_interleaved": True,
        },
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "layer_types": ["linear_attention" if linear else "full_attention" for linear in nets.layers],
        "full_attention_interval": nets.layers.index(False) + 1,
        "linear_conv_kernel_dim": nets.taps,
        "linear_num_key_heads": nets.key_heads,
        "linear_num_value_heads": nets.value_heads,
        "linear_key_head_dim": nets.key_size,
        "linear_value_head_dim": nets.value_size,
        "mtp_num_hidden_layers": config.mtp_layers,
        "mtp_use_dedicated_embeddings": False,
    }


def _wrapped(text: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """config.json of a multimodal model with a language model, and the smallest vision model, which nobody asks."""
    vision = {"depth": 1, "hidden_size": 1152, "num_heads": 16, "out_hidden_size": config.hidden_size}
    model_type = text["model_type"].removesuffix("_text")
    return {
        "architectures": [config.architecture.replace("ForCausalLM", "ForConditionalGeneration")],
        "model_type": model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": config.tie_embeddings,
        "text_config": {key: value for key, value in text.items() if key != "architectures"},
        "vision_config": {"model_type": model_type, **vision, "deepstack_visual_indexes": []},
    }


def quantization_fields(row: Row) -> dict[str, Any]:
    """The ``quantization_config`` of published checkpoints of a format."""
    if row.stored == "fp8_block":
        known = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return {**known, "modules_to_not_convert": _not_in_blocks(row.shape)}
    name, kept, computed = {
        "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None),
        "fp8": ("float-quantized", {**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token", "dynamic": True}),
        "nvfp4": ("nvfp4-pack-quantized", _FP4, {**_FP4, "dynamic": "local"}),
    }[row.stored or ""]
    weights = {"dynamic": False, "symmetric": True, **kept}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": computed and {"symmetric": True, **computed},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _not_in_blocks(config: ModelConfig) -> list[str]:
    """The modules that published checkpoints of FP8 in blocks leave in bfloat16: routers, and in gated delta nets the maps
    that are narrower than a block."""
    prefix = "model.layers" if config.delta_nets is None else "model.language_model.layers"
    routers = [] if config.experts is None else ["mlp.gate", "mlp.shared_expert_gate"][: 1 + config.experts.shared]
    narrow = ["linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b"]
    names = ["lm_head", *(["mtp.fc", *(f"mtp.layers.0.{name}" for name in routers)] if config.mtp_layers else [])]
    for layer in range(config.num_layers):
        of_layer = [*routers, *(narrow if config.has_delta_net(layer) else [])]
        names += [f"{prefix}.{layer}.{name}" for name in of_layer]
    return names
