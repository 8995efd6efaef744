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

_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"
_HARMLESS = (
    "vocab_size",
    "rope.dimension_sections",
    "rope.scaling.finetuned",
)  # tensors say it, or no text depends on it
_NOT_YET = ("glm4moe", "qwen3next")
_WHOLE = "as this architecture rotates whole heads"
_NO_ANGLE = 1e29  # what is divided by more has no angle
# What every llama3 has; the converter takes these lengths for granted.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_Raw = Mapping[str, Any]


class _File(NamedTuple):
    """A file: its header, the metadata of its architecture, and its tensors by name."""

    header: Header
    metadata: Fields
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
    file = _File(header, Fields(own, where, prefix), tensors)
    architecture, model_type, read = ARCHITECTURES[name]
    fields = {"architectures": [architecture], "model_type": model_type, **_decoder(file)}
    fields |= read(file, fields)
    for token in ("bos_token_id", "eos_token_id"):
        if f"tokenizer.ggml.{token}" in header.metadata:
            fields[token] = header.metadata[f"tokenizer.ggml.{token}"]
    try:
        config = model_config(Fields(fields, where), architecture)
    except ValueError as error:
        raise error if isinstance(error, Refusal) else Refusal(f"{where}: {error}") from None
    require_size(config, where)
    unread = [key for key in own if prefix + key not in file.metadata.asked and key not in _HARMLESS]
    return fields | {prefix + key: _plain(own[key]) for key in unread}, sources_of(where, config, tensors)


def _architecture_of(header: Header) -> str:
    """The name of the architecture, which is one of those that are read."""
    name, kind = (header.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    for_now = ", which is not read from GGUF for now" if name in _NOT_YET else ""
    unknown = f"has general.architecture={name!r}{for_now}: expected one of {', '.join(ARCHITECTURES)}"
    give = "give the file of the language model"
    for wrong, words in (
        (kind == "adapter", "is a LoRA adapter; merge it into its base model (llama-export-lora), and give the result"),
        (kind == "mmproj" or name == "clip", f"holds an encoder of images or sounds alone (mmproj); {give}"),
        (kind not in (None, "model"), f"has general.type={kind!r}: expected 'model'; {give}"),
        (name not in ARCHITECTURES, f"{unknown}; give the folder of the original checkpoint"),
        (not header.tensors, f"holds a vocabulary without weights; {give}"),
        (
            header.metadata.get("split.count", 1) != 1,
            "is one of several parts; merge them with llama-gguf-split --merge",
        ),
    ):
        if wrong:
            raise Refusal(f"{header.where}: {words}")
    return str(name)


def _decoder(file: _File) -> dict[str, Any]:
    """The fields that all architectures have."""
    m, embedding = file.metadata, file.tensors.get("token_embd.weight")
    m.only("attention.causal", True, "as text is generated from left to right")
    if embedding is None:
        raise Refusal(f"{m.where}: lacks the tensor 'token_embd.weight'; download it again")
    hidden, heads = m.integer("embedding_length"), m.integer("attention.head_count")
    size = m.integer("attention.key_length", hidden // heads or None)
    m.only("attention.value_length", size, "as keys and values have the same length")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": m.integer("block_count", high=MAX_LAYERS),
        "num_attention_heads": heads,
        "head_dim": size,
        "max_position_embeddings": m.integer("context_length"),
        "rms_norm_eps": _number(m, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(m, "rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(m),
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        # Where it is there, it may differ from the embedding in the type, though the checkpoint had one for both.
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _dense(file: _File, fields: _Raw) -> dict[str, Any]:
    """Attention and an MLP of the same sizes in all layers."""
    file.metadata.only("rope.dimension_count", fields["head_dim"], _WHOLE)
    return {
        "num_key_value_heads": _kv_heads(file, fields),
        "intermediate_size": file.metadata.integer("feed_forward_length"),
    }


def _llama(file: _File, fields: _Raw) -> dict[str, Any]:
    file.metadata.only("expert_count", 0, "because the experts of Mixtral are not read from GGUF")
    read = {**_dense(file, fields), "mlp_bias": any(name.endswith(".ffn_gate.bias") for name in file.tensors)}
    factors = _rope_factors(file, fields["head_dim"] // 2)
    if factors is None:
        return read
    # They divide the angles. Those of a llama3 say which one it is; others are a longrope for texts of any length.
    lengths, factor = 2 * np.pi * fields["rope_theta"] ** (np.arange(factors.size) / factors.size), float(factors.max())
    kept = np.clip((_LLAMA3["original_max_position_embeddings"] / lengths - 1) / 3, 0, 1)
    llama3 = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    other = {"rope_type": "longrope", "factor": 1.0, "attention_factor": 1.0}
    other |= dict.fromkeys(("short_factor", "long_factor"), factors.tolist())
    is_llama3 = np.allclose(factors * ((1 - kept) / factor + kept), 1, rtol=1e-4)
    return {**read, "rope_scaling": llama3 if is_llama3 else other}


def _qwen3moe(file: _File, fields: _Raw) -> dict[str, Any]:
    return {**_dense(file, fields), **_experts(file, fields), "norm_topk_prob": True}


def _gemma3(file: _File, fields: _Raw) -> dict[str, Any]:
    m, layers = file.metadata, fields["num_hidden_layers"]
    window = m.integer("attention.sliding_window", None, low=0) or None
    is_27b = layers == 62  # by this alone llama.cpp knows the one whose scores have another scale
    return {
        **_dense(file, fields),
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"]
        if is_27b
        else fields["head_dim"],
        "sliding_window": window,
        "layer_types": _windows(m, layers, 6 if window else 1),
        "rope_local_base_freq": _number(m, "rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": _number(m, "final_logit_softcapping", None),
    }


def _gemma4(file: _File, fields: _Raw) -> dict[str, Any]:
    m, layers, full = file.metadata, fields["num_hidden_layers"], fields["head_dim"]
    size, shared = m.integer("attention.key_length_swa"), m.integer("attention.shared_kv_layers", 0, 0, layers)
    m.only("attention.value_length_swa", size, "as keys and values have the same length")
    m.only("rope.dimension_count", full, _WHOLE)
    m.only("rope.dimension_count_swa", size, _WHOLE)
    m.only("rope.scaling.type", "none", "as every published model has it")
    kinds, kv_heads = _windows(m, layers), _of_layers(m, "attention.head_count_kv", layers)
    widths, factors = _of_layers(m, "feed_forward_length", layers), _rope_factors(file, full // 2)
    turned = full // 2 if factors is None else int((factors == 1).sum())
    if factors is not None and not np.array_equal(factors > _NO_ANGLE, np.arange(factors.size) >= turned):
        raise Refusal(f"{m.where}: tensor {ROPE_FACTORS!r} holds {factors}: expected ones, and behind them 1e30")
    sizes = [full if kind == _FULL else size for kind in kinds]
    table, has_experts = file.tensors.get("per_layer_token_embd.weight"), m.integer("expert_count", 0, 0) > 0
    experts = _experts(file, fields) if has_experts else {}
    with_values = {layer for layer in range(layers) if f"blk.{layer}.attn_v.weight" in file.tensors}
    return {
        **experts,
        "head_dim": size,
        "num_key_value_heads": kv_heads[0],
        "per_layer_config": {
            str(layer): {"head_dim": sizes[layer], "num_key_value_heads": kv_heads[layer]} for layer in range(layers)
        },
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(kinds[i] == _FULL and i not in with_values for i in range(layers - shared)),
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * turned / full,
                "rope_theta": fields["rope_theta"],
            },
            _SLIDING: {"rope_type": "default", "rope_theta": _number(m, "rope.freq_base_swa", 10_000.0)},
        },
        "final_logit_softcapping": _number(m, "final_logit_softcapping", None),
        "hidden_size_per_layer_input": m.integer("embedding_length_per_layer_input", 0, 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": has_experts,
        "top_k_experts": experts.get("num_experts_per_tok"),
    }


def _gpt_oss(file: _File, fields: _Raw) -> dict[str, Any]:
    m, experts, first = file.metadata, _experts(file, fields), file.tensors.get("blk.0.ffn_down_exps.weight")
    width = experts.pop("moe_intermediate_size")
    m.only("feed_forward_length", width, "expert_feed_forward_length")
    m.only("rope.dimension_count", fields["head_dim"], _WHOLE)
    in_mxfp4 = first is not None and first.type == MXFP4
    return {
        **experts,
        "num_key_value_heads": _kv_heads(file, fields),
        "intermediate_size": width,
        "swiglu_limit": 7.0,
        "sliding_window": m.integer("attention.sliding_window"),
        "layer_types": _windows(m, fields["num_hidden_layers"], 2),
        "rope_scaling": {**fields["rope_scaling"], "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"} if in_mxfp4 else None,
    }


def _qwen35(file: _File, fields: _Raw) -> dict[str, Any]:
    m, layers = file.metadata, fields["num_hidden_layers"]
    mtp = m.integer("nextn_predict_layers", 0, 0, min(layers - 1, 1))  # their layers count among all
    layers -= mtp
    listed, interval = _plain(m.raw.get("attention.recurrent_layers")), m.integer("full_attention_interval", 4)
    linear = [(layer + 1) % interval != 0 for layer in range(layers)] if listed is None else listed[:layers]
    heads, inner = m.integer("ssm.time_step_rank"), m.integer("ssm.inner_size")
    read = {
        "num_hidden_layers": layers,
        "mtp_num_hidden_layers": mtp,
        "num_key_value_heads": _kv_heads(file, fields),
        "layer_types": [_LINEAR if flag else _FULL for flag in linear],
        "linear_conv_kernel_dim": m.integer("ssm.conv_kernel"),
        "linear_key_head_dim": m.integer("ssm.state_size"),
        "linear_num_key_heads": m.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "partial_rotary_factor": m.integer("rope.dimension_count", fields["head_dim"]) / fields["head_dim"],
    }
    if fields["model_type"] == "qwen3_5_text":
        return {**read, "intermediate_size": m.integer("feed_forward_length")}
    m.raw.get("feed_forward_length")  # of no layer
    shared = m.integer("expert_shared_feed_forward_length")
    return {**read, **_experts(file, fields), "shared_expert_intermediate_size": shared}


ARCHITECTURES: dict[str, tuple[str, str, Callable[[_File, _Raw], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "llama", _llama),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _dense),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _dense),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3moe),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text", _gemma4),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", _gpt_oss),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen35),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen35),
}


def _kv_heads(file: _File, fields: _Raw) -> int:
    return file.metadata.integer("attention.head_count_kv", fields["num_attention_heads"])


def _experts(file: _File, fields: _Raw) -> dict[str, int]:
    m = file.metadata
    count = m.integer("expert_count", high=min(MAX_EXPERTS, MAX_TENSORS // fields["num_hidden_layers"]))
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": m.integer("expert_used_count", high=count),
        "moe_intermediate_size": m.integer("expert_feed_forward_length"),
    }


def _rope_scaling(m: Fields) -> dict[str, Any]:
    kind = m.text("rope.scaling.type", "linear" if "rope.scaling.factor" in m.raw else "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise m.refuse("rope.scaling.type", "'none', 'linear' or 'yarn'")
    scaling = {"rope_type": kind, "factor": _number(m, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = m.integer("rope.scaling.original_context_length")
        for key, own in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            scaling[key] = _number(m, f"rope.scaling.yarn_{own}", None)
    return scaling


def _rope_factors(file: _File, pairs: int) -> np.ndarray | None:
    """What the angles of rotary pairs are divided by, float32; None if the file does not say."""
    where, tensor = file.metadata.where, file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type != 0 or tensor.shape != (pairs,):
        raise Refusal(
            f"{where}: tensor {ROPE_FACTORS!r} has type {tensor.type} of ggml and shape {list(tensor.shape)}: expected F32, "
            f"0, and {[pairs]}, as half of attention.key_length"
        )
    try:
        factors = read_range(file.header.path, np.dtype("<f4"), tensor.shape, (), tensor.start)
    except (OSError, ValueError) as error:
        raise Refusal(f"{where}: is damaged ({error}); download it again") from None
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise Refusal(f"{where}: tensor {ROPE_FACTORS!r} holds {factors}: expected positive numbers")
    return factors


def _windows(m: Fields, layers: int, period: int | None = None) -> list[str]:
    """The kind of attention of each layer; by default every ``period``-th has no window."""
    pattern = _plain(m.raw.get("attention.sliding_window_pattern", period))
    if is_int(pattern) and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise m.refuse(
            "attention.sliding_window_pattern", f"an array of {layers} flags, true for a layer with a window"
        )
    return [_SLIDING if flag else _FULL for flag in pattern]


def _of_layers(m: Fields, key: str, layers: int) -> list[int]:
    """The integer of each layer, of which a file has one for all, or an array."""
    numbers = _plain(m.raw.get(key))
    return numbers if isinstance(numbers, list) and len(numbers) == layers else [m.integer(key)] * layers


def _number(m: Fields, key: str, *absent: Any) -> Any:
    """The positive number of a key in the digits that it had in config.json, 1e-06, before it became a float32."""
    number = m.number(key, *absent)
    return number if number is None else float(str(np.float32(number)))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
