"""What a GGUF file was made from: the fields of config.json, and of which of its tensors each tensor is made.

llama.cpp's ``convert_hf_to_gguf.py`` makes such files, and a function here undoes what it does for an architecture. What the
metadata do not say is what llama.cpp computes whatever the checkpoint said. Such constants stand here. A key of the
architecture that nothing looks up is handed on under its own name, so that the reader of config.json warns of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec._validation import is_int
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import read_range
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import MAX_TENSORS, Header, TensorInfo
from jspec.checkpoints.gguf.sources import MXFP4, ROPE_FACTORS, Source, sources_of
from jspec.checkpoints.huggingface.config import MAX_LAYERS, model_config, require_size
from jspec.checkpoints.huggingface.families.family_keys import MAX_EXPERTS

_SLIDING, _FULL = "sliding_attention", "full_attention"
_HARMLESS = ("vocab_size", "rope.dimension_sections", "rope.mrope_interleaved", "rope.scaling.finetuned")
_WHOLE = "as this architecture rotates whole heads"
# What every llama3 has; the converter takes these lengths for granted.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_Raw = dict[str, Any]


class _Model(NamedTuple):
    """The metadata of a model, without the architecture in front, which messages have; its file; its tensors, by name."""

    keys: Fields
    header: Header
    tensors: Mapping[str, TensorInfo]


def read_architecture(header: Header) -> tuple[dict[str, Any], dict[str, Source]]:
    """The fields of config.json of the checkpoint that the file was made from, and its tensors by Hugging Face names.

    Raises:
      Refusal: the file holds no language model of an architecture that is read, lacks a key or a tensor, has a tensor that
        has no place in its architecture, or sizes that contradict each other.
    """
    name, where = _architecture_of(header), header.where
    tensors, prefix = {tensor.name: tensor for tensor in header.tensors}, f"{name}."
    own = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    model = _Model(Fields(own, where, prefix), header, tensors)
    architecture, model_type, read = ARCHITECTURES[name]
    fields = {"architectures": [architecture], "model_type": model_type, **_decoder(model)}
    fields |= read(model, fields)
    for token in ("bos_token_id", "eos_token_id"):
        fields[token] = _plain(header.metadata.get(f"tokenizer.ggml.{token}"))
    try:
        config = model_config(Fields(fields, where), architecture)
    except ValueError as error:
        raise error if isinstance(error, Refusal) else Refusal(f"{where}: {error}") from None
    require_size(config, where)
    unread = [key for key in own if prefix + key not in model.keys.asked and key not in _HARMLESS]
    return fields | {prefix + key: _plain(own[key]) for key in unread}, sources_of(where, config, tensors)


def _architecture_of(header: Header) -> str:
    """The name of the architecture, which is one of those that are read."""
    keys, give = Fields(header.metadata, header.where), "give the file of the language model"
    name, kind = keys.text("general.architecture"), keys.text("general.type", "model")
    for_now = " (this one is not read from GGUF for now)" if name in ("glm4moe", "qwen3next") else ""
    known = f"one of {', '.join(ARCHITECTURES)}{for_now}; give the folder of the original checkpoint"
    for wrong, words in (
        (kind == "adapter", "is a LoRA adapter; merge it into its base model (llama-export-lora), and give the result"),
        (kind == "mmproj" or name == "clip", f"holds an encoder of images or sounds alone (mmproj); {give}"),
        (kind != "model", keys.refuse("general.type", f"'model'; {give}")),
        (name not in ARCHITECTURES, keys.refuse("general.architecture", known)),
        (not header.tensors, f"holds a vocabulary without weights; {give}"),
    ):
        if wrong:
            raise words if isinstance(words, Refusal) else Refusal(f"{header.where}: {words}")
    return name


def _decoder(model: _Model) -> _Raw:
    """The fields that all architectures have."""
    keys, embedding = model.keys, model.tensors.get("token_embd.weight")
    keys.only("attention.causal", True, "as text is generated from left to right")
    if embedding is None:
        raise Refusal(f"{keys.where}: lacks the tensor 'token_embd.weight'; download it again")
    hidden, layers = keys.integer("embedding_length"), keys.integer("block_count", high=MAX_LAYERS)
    heads = keys.integer("attention.head_count")
    size = keys.integer("attention.key_length", *([hidden // heads] if heads <= hidden else []))
    keys.only("attention.value_length", size, "as keys and values have the same length")
    rotated, width = keys.integer("rope.dimension_count", size), keys.integer("expert_feed_forward_length", None)
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _of_layers(model, "feed_forward_length", layers, *filter(None, [width]))[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _of_layers(model, "attention.head_count_kv", layers, heads)[0],
        "head_dim": size,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": _number(model, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(model, "rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(model),
        "partial_rotary_factor": None if rotated == size else rotated / size,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in model.tensors),
        "tie_word_embeddings": "output.weight" not in model.tensors,  # which may be the same in another type
    }


def _llama(model: _Model, fields: _Raw) -> _Raw:
    model.keys.only("expert_count", 0, "because the experts of Mixtral are not read from GGUF")
    read = {"mlp_bias": any(name.endswith(".ffn_gate.bias") for name in model.tensors)}
    factors = _rope_factors(model, fields["head_dim"] // 2)
    if factors is None:
        return read
    # Those of a llama3 say which one it is. Any others are a longrope for texts of every length.
    low, high, original = _LLAMA3.values()
    lengths = 2 * np.pi * fields["rope_theta"] ** (np.arange(factors.size) / factors.size)
    kept, factor = np.clip((original / lengths - low) / (high - low), 0, 1), float(factors.max())
    if np.allclose(factors * ((1 - kept) / factor + kept), 1, rtol=1e-4):
        return {**read, "rope_scaling": {"rope_type": "llama3", "factor": factor, **_LLAMA3}}
    either = dict.fromkeys(("short_factor", "long_factor"), factors.tolist())
    return {**read, "rope_scaling": {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0, **either}}


def _gemma3(model: _Model, fields: _Raw) -> _Raw:
    layers, scalar = fields["num_hidden_layers"], fields["head_dim"]
    if layers == 62:  # by this alone llama.cpp knows that of 27B, whose scores have another scale
        scalar = fields["hidden_size"] // fields["num_attention_heads"]
    window = model.keys.integer("attention.sliding_window", None, low=0) or None
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": _kinds(model, layers, 6 if window else 1),
        "rope_local_base_freq": _number(model, "rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": _number(model, "final_logit_softcapping", None),
    }


def _gemma4(model: _Model, fields: _Raw) -> _Raw:
    keys, layers, full = model.keys, fields["num_hidden_layers"], fields["head_dim"]
    size, shared = keys.integer("attention.key_length_swa"), keys.integer("attention.shared_kv_layers", 0, 0, layers)
    keys.only("rope.dimension_count", full, _WHOLE)
    keys.only("rope.dimension_count_swa", size, _WHOLE)
    keys.only("attention.value_length_swa", size, "as keys and values have the same length")
    if fields["rope_scaling"]["rope_type"] != "default":
        raise keys.refuse("rope.scaling.type", "'none' and no factor, as every published model has it")
    kinds, factors = _kinds(model, layers, None), _rope_factors(model, full // 2)
    turned = full // 2 if factors is None else int((factors == 1).sum())
    if factors is not None and not np.array_equal(factors > 1e29, np.arange(factors.size) >= turned):
        raise Refusal(f"{keys.where}: tensor {ROPE_FACTORS!r} holds other numbers than 1, and then 1e30 alone")
    proportional = {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / full}
    widths = _of_layers(model, "feed_forward_length", layers)
    kv_heads = _of_layers(model, "attention.head_count_kv", layers, fields["num_attention_heads"])
    of_layers = zip((full if kind == _FULL else size for kind in kinds), kv_heads, strict=True)
    with_values = {layer for layer in range(layers) if f"blk.{layer}.attn_v.weight" in model.tensors}
    table, has_experts = model.tensors.get("per_layer_token_embd.weight"), keys.integer("expert_count", 0, 0) > 0
    return {
        "head_dim": size,
        "per_layer_config": {str(i): {"head_dim": H, "num_key_value_heads": G} for i, (H, G) in enumerate(of_layers)},
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(kinds[i] == _FULL and i not in with_values for i in range(layers - shared)),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            _FULL: {**proportional, "rope_theta": fields["rope_theta"]},
            _SLIDING: {"rope_type": "default", "rope_theta": _number(model, "rope.freq_base_swa", 10_000.0)},
        },
        "final_logit_softcapping": _number(model, "final_logit_softcapping", None),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0, 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": has_experts,
        **(_experts(model, fields, chosen="top_k_experts") if has_experts else {}),
    }


def _gpt_oss(model: _Model, fields: _Raw) -> _Raw:
    first = model.tensors.get("blk.0.ffn_down_exps.weight")
    in_mxfp4 = first is not None and first.type == MXFP4
    return {
        **_experts(model, fields, count="num_local_experts", width="intermediate_size"),
        "swiglu_limit": 7.0,
        "sliding_window": model.keys.integer("attention.sliding_window"),
        "layer_types": _kinds(model, fields["num_hidden_layers"], 2),
        "rope_scaling": {**fields["rope_scaling"], "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"} if in_mxfp4 else None,
    }


def _qwen35(model: _Model, fields: _Raw) -> _Raw:
    keys, layers = model.keys, fields["num_hidden_layers"]  # those for multi-token prediction among them
    mtp = keys.integer("nextn_predict_layers", 0, 0, min(layers - 1, 1))
    interval, heads = keys.integer("full_attention_interval", 4), keys.integer("ssm.time_step_rank")
    kinds = _kinds(model, layers, interval, "attention.recurrent_layers", "linear_attention")
    keys.only("ssm.v_head_reordered", True, "as llama.cpp has the heads of values")  # a key of other converters
    return {
        "num_hidden_layers": layers - mtp,
        "mtp_num_hidden_layers": mtp,
        "layer_types": kinds[: layers - mtp],
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": keys.integer("ssm.inner_size") // heads,
        "partial_rotary_factor": fields["partial_rotary_factor"] or 1.0,
    }


def _qwen35moe(model: _Model, fields: _Raw) -> _Raw:
    shared = model.keys.integer("expert_shared_feed_forward_length")
    return {**_qwen35(model, fields), **_experts(model, fields), "shared_expert_intermediate_size": shared}


def _experts(model, fields, count="num_experts", chosen="num_experts_per_tok", width="moe_intermediate_size") -> _Raw:
    """The sizes of a mixture of experts, as fields of these names."""
    most = min(MAX_EXPERTS, MAX_TENSORS // fields["num_hidden_layers"])
    return {
        count: (experts := model.keys.integer("expert_count", high=most)),
        chosen: model.keys.integer("expert_used_count", high=experts),
        width: model.keys.integer("expert_feed_forward_length"),
    }


# Name -> class and ``model_type`` of transformers, and what reads the fields that not all have.
ARCHITECTURES: dict[str, tuple[str, str, Callable[[_Model, _Raw], _Raw]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", lambda *_: {}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", lambda *_: {}),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", lambda *of: {**_experts(*of), "norm_topk_prob": True}),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", _gemma4),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", _gpt_oss),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen35moe),
}


def _rope_scaling(model: _Model) -> _Raw:
    keys = model.keys
    kind = keys.text("rope.scaling.type", "linear" if "rope.scaling.factor" in keys.raw else "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise keys.refuse("rope.scaling.type", "'none', 'linear' or 'yarn'")
    scaling = {"rope_type": kind, "factor": _number(model, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
        for key, own in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            scaling[key] = _number(model, f"rope.scaling.yarn_{own}", None)
    return scaling


def _rope_factors(model: _Model, pairs: int) -> np.ndarray | None:
    """What the angles of rotary pairs are divided by, float32 ``[pairs]``; None if the file does not say."""
    where, tensor = model.header.where, model.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type != 0 or tensor.shape != (pairs,):
        raise Refusal(
            f"{where}: tensor {ROPE_FACTORS!r} has the type {tensor.type} of ggml and shape {list(tensor.shape)}: "
            f"expected F32, 0, and {[pairs]}, half of attention.key_length"
        )
    try:
        factors = read_range(model.header.path, np.dtype("<f4"), tensor.shape, (), tensor.start)
    except (OSError, ValueError) as error:
        raise Refusal(f"{where}: is damaged ({error}); download it again") from None
    wrong = factors[~(np.isfinite(factors) & (factors > 0))]
    if wrong.size:
        raise Refusal(f"{where}: tensor {ROPE_FACTORS!r} holds {wrong[0]}: expected positive numbers")
    return factors


def _kinds(model: _Model, layers: int, period: int | None, key="attention.sliding_window_pattern", kind=_SLIDING):
    """The kind of each layer, full attention or ``kind``; by default full attention in every ``period``-th."""
    flags = _plain(model.keys.raw.get(key, period))
    if is_int(flags) and flags > 0:
        flags = [(layer + 1) % flags != 0 for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) != layers:
        raise model.keys.refuse(key, f"an array of {layers} flags, true for {kind}")
    return [kind if flag else _FULL for flag in flags]


def _of_layers(model: _Model, key: str, layers: int, *absent: int) -> list[int]:
    """The integer of each layer, of which a file has one for all, or an array."""
    numbers = _plain(model.keys.raw.get(key))
    listed = isinstance(numbers, list) and len(numbers) == layers
    return numbers if listed else [model.keys.integer(key, *absent)] * layers


def _number(model: _Model, key: str, *absent: Any) -> Any:
    """The positive number of ``key`` in the digits that config.json had, 1e-06, before it became a float32."""
    number = model.keys.number(key, *absent)
    return number if number is None else float(str(np.float32(number)))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
