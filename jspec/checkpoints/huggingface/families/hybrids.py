"""Families in which three of four layers are gated delta nets: Qwen3-Next, and Qwen3.5 with its successors."""

import functools
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.families.family import Family
from jspec.checkpoints.huggingface.families.family_keys import Choices, expert_counts, qwen3_moe, with_shared_experts
from jspec.checkpoints.huggingface.rope import KEYS, as_of_text, read_partial_rope
from jspec.checkpoints.huggingface.windows import Windows, listed_kinds
from jspec.config import DeltaNets, Experts

LINEAR, FULL = "linear_attention", "full_attention"
MAX_TAPS = 64  # of a convolution; published models have 4


def read_delta_nets(fields: Fields) -> DeltaNets | None:
    """The gated delta nets that config.json describes; None if every layer has attention."""
    listed = _layer_types(fields)
    if LINEAR not in listed:
        return None
    if FULL not in listed:
        raise fields.refuse("layer_types", f"{FULL} for one layer or more")
    sizes = (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        "linear_conv_kernel_dim",
    )
    numbers = [fields.integer(name) for name in sizes]
    if not 2 <= numbers[-1] <= MAX_TAPS:
        raise fields.refuse("linear_conv_kernel_dim", f"an integer in 2..{MAX_TAPS}")
    if numbers[1] % numbers[0]:
        raise fields.refuse("linear_num_value_heads", f"a multiple of linear_num_key_heads, {numbers[0]}")
    return DeltaNets(*numbers, layers=tuple(kind == LINEAR for kind in listed))


def _layer_types(fields: Fields) -> list[str]:
    """``LINEAR`` or ``FULL`` for each layer."""
    count, interval = fields.integer("num_hidden_layers"), fields.integer("full_attention_interval", 4)
    listed = listed_kinds(fields, count, LINEAR, FULL)
    derived = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(count)]
    if listed is None:
        return derived
    if fields.raw.get("full_attention_interval") is not None and listed != derived:
        first = next(layer for layer in range(count) if listed[layer] != derived[layer])
        raise fields.refuse(
            "full_attention_interval",
            f"what layer_types says, which has {listed[first]} for layer {first}; correct the one that is wrong",
        )
    return listed


def _hybrid(fields: Fields) -> Choices:
    """What Qwen3-Next and Qwen3.5 have in common."""
    fields.only("attn_output_gate", True, "as this architecture has it")
    fields.only("mamba_ssm_dtype", "float32", "the only type in which recurrent states are kept")
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "'silu' or 'swish', which gated delta nets also apply to their convolution")
    if fields.text("output_gate_type", "swish") not in ("swish", "silu"):
        raise fields.refuse("output_gate_type", "'swish' or 'silu', the gate of the outputs of gated delta nets")
    return {"delta_nets": read_delta_nets(fields)}


def _mtp_layers(fields: Fields, absent: int) -> Choices:
    """How many layers for multi-token prediction there are."""
    count = fields.integer("mtp_num_hidden_layers", absent, low=0)
    if count > 1:
        raise fields.refuse("mtp_num_hidden_layers", "0 or 1")
    fields.only("mtp_use_dedicated_embeddings", False, "as the layers have no embedding of their own")
    return {"mtp_layers": count}


def qwen3_5(fields: Fields) -> Choices:
    """Qwen3.5, dense."""
    return {**_hybrid(fields), **_mtp_layers(fields, 0)}


def qwen3_5_moe(fields: Fields) -> Choices:
    """Qwen3.5 with experts in every layer, whose weights add up to 1, and one shared expert with a gate."""
    count, chosen = expert_counts(fields, "num_experts" if "num_experts" in fields.raw else "num_local_experts")
    experts = Experts(count, chosen, fields.integer("moe_intermediate_size"))
    return {**qwen3_5(fields), "experts": with_shared_experts(fields, experts)}


def qwen3_next(fields: Fields) -> Choices:
    """Qwen3-Next: experts in the layers that config.json names, one of them shared with a gate. It has no key for its
    layer for multi-token prediction, which every published model has."""
    experts = with_shared_experts(fields, qwen3_moe(fields)["experts"])
    return {**_hybrid(fields), **_mtp_layers(fields, 1), "experts": experts}


def read_hybrid_rope(fields: Fields, windows: Windows) -> Choices:
    """The field ``rope``: a part of each head rotates. Positions of images (``mrope``) are those of text here."""
    for rope in filter(None, map(fields.nested, KEYS)):
        as_of_text(rope)  # which makes the keys of images known, so that nobody is warned of them
    return read_partial_rope(fields, windows)


_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_CHOICES: Choices = {"norm": "rms_offset", "qk_norm": True, "attention_gate": True}

_hybrid_family = functools.partial(
    Family, choices=_CHOICES, biases="configured", ropes=read_hybrid_rope, has_delta_nets=True
)

HYBRIDS = {
    "Qwen3NextForCausalLM": _hybrid_family(
        "Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
        {
            **_DEFAULTS,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        more=qwen3_next,
    ),
    "Qwen3_5ForCausalLM": _hybrid_family(
        "Qwen3.5 0.8B to 27B, Qwen3.6-27B, Qwen3.8-27B",
        {**_DEFAULTS, "num_key_value_heads": 4},
        more=qwen3_5,
    ),
    "Qwen3_5MoeForCausalLM": _hybrid_family(
        "Qwen3.5-35B-A3B to 397B-A17B, Qwen3.6-35B-A3B",
        {
            **_DEFAULTS,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        keys={"intermediate_size": "moe_intermediate_size"},
        more=qwen3_5_moe,
    ),
}
