"""Reads the config of Gemma 4 (Google, 2026), whose layers differ in their sizes and in where their keys come from.

Full-attention layers have larger heads, and fewer KV heads, than those with a window. config.json states these sizes in one
of two ways: by ``global_head_dim`` and ``num_global_key_value_heads``, or layer by layer in ``per_layer_config``."""

import dataclasses
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.families.family import Family
from jspec.checkpoints.huggingface.families.family_keys import expert_counts
from jspec.checkpoints.huggingface.rope import read_rope
from jspec.checkpoints.huggingface.windows import Windows, listed_kinds
from jspec.config import OF_TARGET, Experts, LayerConfig

SLIDING, FULL = "sliding_attention", "full_attention"
_DEFAULT_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_OF_A_LAYER = ("head_dim", "num_key_value_heads")  # the keys that ``per_layer_config`` may have


def all_but_every_sixth(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Whether each layer has the window: all but every sixth, and the last one."""
    del fields
    return tuple((layer + 1) % 6 != 0 and layer + 1 < layers for layer in range(layers))


def read_gemma4_ropes(fields: Fields, windows: Windows) -> dict[str, Any]:
    """The fields ``rope`` and ``layer_ropes``: one rope for layers with a window, and one for the others."""
    given, ropes = fields.nested("rope_parameters"), {}
    for kind, default in _DEFAULT_ROPES.items():
        parameters = default if given is None else getattr(given.nested(kind), "raw", None)
        if parameters is None:
            assert given is not None
            raise given.refuse(kind, "the rope of such layers")
        raw = {"max_position_embeddings": fields.raw["max_position_embeddings"], "rope_parameters": parameters}
        ropes[kind] = read_rope(
            dataclasses.replace(fields, raw=raw), partial=parameters.get("rope_type") == "proportional"
        )
    layer_ropes = tuple(ropes[FULL if window is None else SLIDING] for window in windows)
    return {"rope": ropes[FULL], "layer_ropes": layer_ropes}


def gemma4(fields: Fields) -> dict[str, Any]:
    """The choices of ``ModelConfig`` that keys of Gemma 4's own decide."""
    if fields.raw.get("use_bidirectional_attention") == "all":
        raise fields.refuse("use_bidirectional_attention", "null or 'vision', as text is generated from left to right")
    width, tokens = (
        fields.integer("hidden_size_per_layer_input", 0, low=0),
        fields.raw.get("vocab_size_per_layer_input"),
    )
    if width and tokens is not None and fields.integer("vocab_size_per_layer_input") < fields.integer("vocab_size"):
        raise fields.refuse("vocab_size_per_layer_input", "at least vocab_size, as every token has per-layer inputs")
    return {
        "attention_scale": 1.0,
        "embedding_multiplier": fields.integer("hidden_size") ** 0.5,
        "logit_softcap": fields.number("final_logit_softcapping", None),
        "layers": _layers(fields),
        "per_layer_inputs": width or None,
        "per_layer_vocab_size": fields.integer("vocab_size_per_layer_input") if width and tokens is not None else None,
        "experts": _experts(fields),
    }


def _layers(fields: Fields) -> tuple[LayerConfig, ...]:
    kinds = _kinds(fields)
    shared = fields.integer("num_kv_shared_layers", 0, low=0, high=len(kinds))
    first_shared = len(kinds) - shared
    sizes, width = _sizes(fields, kinds), fields.integer("intermediate_size")
    same, double = fields.flag("attention_k_eq_v"), fields.flag("use_double_wide_mlp")
    layers = []
    for number, kind in enumerate(kinds):
        shares, source = number >= first_shared, None
        if shared == len(kinds):
            source = OF_TARGET
        elif shares:
            own = [other for other in range(first_shared) if kinds[other] == kind]
            if not own:
                raise fields.refuse(
                    "num_kv_shared_layers", f"fewer, because no earlier layer has the keys of layer {number}, {kind}"
                )
            source = own[-1]
        layers.append(
            LayerConfig(
                *sizes[number],
                width * (2 if double and shares else 1),
                keys_are_values=same and kind == FULL and not shares,
                reads_cache_of=source,
            )
        )
    return tuple(layers)


def _kinds(fields: Fields) -> list[str]:
    """The kind of attention of each layer."""
    count = fields.integer("num_hidden_layers")
    listed = listed_kinds(fields, count, FULL, SLIDING)
    if listed is None:
        return [SLIDING if slides else FULL for slides in all_but_every_sixth(fields, count)]
    if listed[-1] != FULL:
        raise fields.refuse("layer_types", f"{FULL} for the last layer, as this architecture has it")
    return listed


def _sizes(fields: Fields, kinds: list[str]) -> list[tuple[int, int]]:
    """Size of a head and number of KV heads of each layer."""
    usual = fields.integer("head_dim"), fields.integer("num_key_value_heads")
    if "per_layer_config" not in fields.raw:
        heads = fields.integer("num_global_key_value_heads", None) if fields.flag("attention_k_eq_v") else None
        full = fields.integer("global_head_dim", 512), usual[1] if heads is None else heads
        return [full if kind == FULL else usual for kind in kinds]
    sizes, by_layer = [usual] * len(kinds), fields.nested("per_layer_config")
    if by_layer is None:  # null or empty: no layer differs
        return sizes
    for key in by_layer.raw:
        if not (key.isascii() and key.isdecimal() and int(key) < len(kinds)):
            raise by_layer.refuse(key, f"the number of one of {len(kinds)} layers")
        own = by_layer.nested(key)
        unknown = None if own is None else next((name for name in own.raw if name not in _OF_A_LAYER), None)
        if own is None or unknown is not None:
            raise (own or by_layer).refuse(unknown or key, f"no other keys than {' and '.join(_OF_A_LAYER)}")
        sizes[int(key)] = own.integer("head_dim", usual[0]), own.integer("num_key_value_heads", usual[1])
    return sizes


def _experts(fields: Fields) -> Experts | None:
    """The experts that stand beside the MLP of every layer, if there are any."""
    if not fields.flag("enable_moe_block"):
        return None
    count, chosen = expert_counts(fields, "num_experts", "top_k_experts")
    return Experts(count, chosen, fields.integer("moe_intermediate_size"), beside_mlp=True)


_GEMMA4 = Family(
    "Gemma 4: the text models of E2B, E4B, 26B-A4B and 31B",
    {
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    {"norm": "rms_wide", "norm_placement": "around", "qk_norm": True, "value_norm": True, "layer_scalars": True},
    keys={"hidden_act": "hidden_activation"},
    slides=all_but_every_sixth,
    lists_windows=True,
    biases="configured",
    ropes=read_gemma4_ropes,
    more=gemma4,
)
_UNIFIED = {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024}

GEMMA4 = {
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": dataclasses.replace(
        _GEMMA4, models="Gemma 4 12B: its text model", defaults={**_GEMMA4.defaults, **_UNIFIED}
    ),
}
