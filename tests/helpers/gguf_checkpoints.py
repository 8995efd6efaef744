"""Writes GGUF files of Hugging Face folders by the rules of llama.cpp's ``convert_hf_to_gguf.py``.

Names of tensors come from the table of the package gguf, as they do there, and so does the arithmetic of types. ``RULES``
has a row for each class: its architecture in gguf, what becomes of a tensor, and which keys it has besides those of all."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Named = Iterable[tuple[str, np.ndarray]]
ALWAYS_FLOAT32 = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_conv1d.weight", "_norm.weight")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_OF_ONE_EXPERT = re.compile(r"(.*experts)\.(\d+)(\.[a-z]+_proj\.weight)")


def write_gguf(
    folder: Path,
    path: Path | None = None,
    type_of: Callable[[str, np.ndarray], Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """A GGUF file of the checkpoint in ``folder``.

    Args:
      folder: with config.json and model.safetensors.
      path: of the file; by default ``model.gguf`` in the folder.
      type_of: name and values of a tensor in the file -> its ``gguf.GGMLQuantizationType``, for those that the converter
        quantises; F32 by default.
      settings: keys of config.json besides those in the file, as older versions of transformers wrote them.
      more: keys of the metadata besides those of the architecture, ``tokenizer.ggml.tokens`` for example.
    """
    import gguf

    config = {**json.loads((folder / "config.json").read_text()), **(settings or {})}
    tensors = load_file(folder / "model.safetensors")
    architecture, change, own_keys = RULES[config["architectures"][0]]
    arch, path = getattr(gguf.MODEL_ARCH, architecture), path or folder / "model.gguf"
    mtp = config.get("mtp_num_hidden_layers", 0) if any(name.startswith("mtp.") for name in tensors) else 0
    config = {**config, "mtp_num_hidden_layers": mtp, "block_count": config["num_hidden_layers"] + mtp}
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type("model")
    prefix = f"{gguf.MODEL_ARCH_NAMES[arch]}."
    keys = {prefix + key: value for key, value in {**_keys(config), **own_keys(config)}.items()}
    tokens = {f"tokenizer.ggml.{token}": config.get(token) for token in ("bos_token_id", "eos_token_id")}
    for key, value in {**keys, **tokens, **(more or {})}.items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(arch, config["block_count"])
    for name, array in itertools.chain(*(change(*named, config) for named in _with_experts_together(tensors))):
        called = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert called is not None, name
        data, kind = _stored(called, array, type_of)
        writer.add_tensor(called, data, raw_dtype=kind)
    for array in _rope_freqs(config):
        writer.add_tensor("rope_freqs.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(name: str, array: np.ndarray, type_of: Callable[[str, np.ndarray], Any] | None) -> tuple[np.ndarray, Any]:
    """The data of a tensor in the file, and their type."""
    import gguf

    if array.dtype == np.uint8:
        return array, gguf.GGMLQuantizationType.MXFP4
    array, kind = np.ascontiguousarray(array, np.float32), gguf.GGMLQuantizationType.F32
    if type_of is not None and array.ndim > 1 and name.endswith(".weight") and not name.endswith(ALWAYS_FLOAT32):
        kind = type_of(name, array)
    try:
        return gguf.quants.quantize(array, kind), kind
    except gguf.QuantError:  # rows are not made of whole blocks
        return array.astype(np.float16), gguf.GGMLQuantizationType.F16


def _add(writer, key: str, value: Any):
    adds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        adds[type(value)](key, value)


def _ropes(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary embedding of most layers and that of those with a window, in the words of transformers 5."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "full_attention" in rope:
        return rope["full_attention"], rope["sliding_attention"]
    local = config.get("rope_local_base_freq")
    return {"rope_theta": config.get("rope_theta"), **rope}, {"rope_theta": local} if local else {}


def _keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of all architectures, without that in front."""
    rope, local = _ropes(config)
    kind, keys = rope.get("rope_type", rope.get("type")), {}
    if kind in ("linear", "yarn"):
        keys = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for key, own in (("attention_factor", "attn_factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow")):
            keys[f"rope.scaling.yarn_{own}"] = rope.get(key)
    return keys | {
        "block_count": config["block_count"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("rope_theta"),
        "rope.freq_base_swa": local.get("rope_theta"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get("num_experts_per_tok", config.get("top_k_experts")),
    }


def _with_experts_together(tensors: Mapping[str, np.ndarray]) -> Named:
    """``tensors``, with the maps of the experts of a layer in one, as the converter merges them, and MXFP4 repacked."""
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        if (match := _OF_ONE_EXPERT.fullmatch(name)) is not None:
            experts.setdefault(match[1] + match[3], {})[int(match[2])] = array
        elif name.endswith("_blocks"):
            yield name.removesuffix("_blocks"), _repacked(array, tensors[name.removesuffix("blocks") + "scales"])
        elif not name.endswith("_scales"):
            yield name, array
    for name, of_each in experts.items():
        yield name, np.stack([of_each[expert] for expert in range(len(of_each))])


def _as_it_is(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Named:
    yield name, array


def _llama(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Named:
    """The converter's ``permute``: for each head, number i of each half side by side."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    count = heads.get(name.split(".")[-2])
    if count is not None:
        halves = array.reshape(count, 2, -1, *array.shape[1:])
        array = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(array.shape)
    yield name, array


def _gemma3(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Named:
    yield name, array + np.float32(1) if name.endswith("norm.weight") else array


def _gemma4(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Named:
    layer = _LAYER.search(name)
    if name.endswith("router.scale"):
        yield f"blk.{layer[1]}.ffn_gate_inp.scale", array
    elif name.endswith("per_expert_scale"):
        yield f"blk.{layer[1]}.ffn_down_exps.scale", array
    else:
        yield name if name.endswith(".weight") else f"{name}.weight", array


def _gpt_oss(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Named:
    if name.endswith("sinks"):
        yield f"{name}.weight", array
    elif "experts." not in name:
        yield name, array
    else:
        end = ".bias" if name.endswith("_bias") else ".weight"
        rows = array.swapaxes(1, 2) if array.ndim == 3 and array.dtype != np.uint8 else array
        name = name.removesuffix("_bias")
        if name.endswith("gate_up_proj"):
            yield name.replace("gate_up", "gate") + end, rows[:, ::2]
            yield name.replace("gate_up", "up") + end, rows[:, 1::2]
        else:
            yield name + end, rows


def _repacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """MXFP4 ``[X, out, bytes]`` of ggml: for each group its scale, then 16 bytes with codes i and i + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    groups = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], axis=-1)
    return groups.reshape(*groups.shape[:2], -1)


def _tiled(array: np.ndarray, axis: int, key_heads: int, size: int) -> np.ndarray:
    """Heads of values in the converter's order: the first of each key head, then the second of each."""
    moved = np.moveaxis(array, axis, 0)
    heads = moved.reshape(key_heads, -1, size, *moved.shape[1:])
    tiled = np.concatenate([heads[:, number] for number in range(heads.shape[1])])
    return np.moveaxis(tiled.reshape(moved.shape), 0, axis)


def _qwen35(name: str, array: np.ndarray, config: Mapping[str, Any]) -> Named:
    last, keys, size = config["num_hidden_layers"], config["linear_num_key_heads"], config["linear_value_head_dim"]
    name = name.replace("mtp.layers.0.", f"model.layers.{last}.")
    for own, called in _NEXTN.items():
        name = f"blk.{last}.nextn.{called}.weight" if name == f"mtp.{own}.weight" else name
    for stacked, maps in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        if name.endswith(f"experts.{stacked}"):  # as Qwen3.5 is published
            parts = np.split(array, len(maps), axis=1)
            yield from (
                (f"{name.removesuffix(stacked)}{own}.weight", part) for own, part in zip(maps, parts, strict=True)
            )
            return
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        before = 2 * keys * config["linear_key_head_dim"]
        array = np.concatenate([array[:before], _tiled(array[before:], 0, keys, size)])
    elif name.endswith("in_proj_z.weight"):
        array = _tiled(array, 0, keys, size)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        array = _tiled(array, 0, keys, 1)
    elif name.endswith("out_proj.weight"):
        array = _tiled(array, 1, keys, size)
    if name.endswith("A_log"):
        array = -np.exp(array)
    elif name.endswith("conv1d.weight"):
        array = array.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + np.float32(1)
    yield name.replace(".dt_bias", ".dt_proj.bias"), array


_NEXTN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def _no_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _llama_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"vocab_size": config["vocab_size"], "rope.dimension_count": size}


def _expert_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    shared = config.get("shared_expert_intermediate_size")
    return {"expert_feed_forward_length": config["moe_intermediate_size"], "expert_shared_feed_forward_length": shared}


def _gemma3_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config.get(own) for key, own in _OF_GEMMA.items()}


_OF_GEMMA = {"final_logit_softcapping": "final_logit_softcapping", "attention.sliding_window": "sliding_window"}


def _gemma4_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    layers, shared, full = len(windows), config["num_kv_shared_layers"], config["global_head_dim"]
    width, few = config["intermediate_size"], config.get("num_global_key_value_heads")
    widths = [width if layer < layers - shared else 2 * width for layer in range(layers)]
    kv_heads = [config["num_key_value_heads"] if window else few for window in windows]
    return {
        **_gemma3_keys(config),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "attention.sliding_window_pattern": windows,
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        **({"feed_forward_length": widths} if config.get("use_double_wide_mlp") else {}),
        **({} if few is None else {"attention.head_count_kv": kv_heads}),
        "rope.dimension_count": full,
        "rope.dimension_count_swa": config["head_dim"],
    }


def _gpt_oss_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def _qwen35_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, rope = config["linear_num_value_heads"], config.get("rope_parameters") or {}
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
    return {
        **(_expert_keys(config) if "moe_intermediate_size" in config else {}),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "full_attention_interval": config.get("full_attention_interval") or 4,
        "rope.dimension_count": int(config["head_dim"] * fraction),
        "rope.dimension_sections": [*rope.get("mrope_section", [11, 11, 10]), 0],
        "nextn_predict_layers": config["mtp_num_hidden_layers"] or None,
    }


def _rope_freqs(config: Mapping[str, Any]) -> Iterator[np.ndarray]:
    """What the converter's ``generate_extra_tensors`` adds for llama3, and for Gemma 4."""
    rope, _ = _ropes(config)
    if rope.get("rope_type") == "proportional":
        half = config["global_head_dim"] // 2
        turned = int(config["global_head_dim"] * rope["partial_rotary_factor"] / 2)
        yield np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    elif rope.get("rope_type") == "llama3":
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        original = config.get("original_max_position_embeddings", 8192)  # not that of the rope
        low, high, factors = rope["low_freq_factor"], rope["high_freq_factor"], []
        for pair in range(size // 2):
            length = 2 * np.pi * rope["rope_theta"] ** (2 * pair / size)
            kept = (original / length - low) / (high - low)
            between = 1 / ((1 - kept) / rope["factor"] + kept)
            factors.append(1 if length < original / high else rope["factor"] if length > original / low else between)
        yield np.array(factors, np.float32)


RULES: Mapping[str, tuple[str, Callable[..., Named], Callable[..., dict[str, Any]]]] = {
    "LlamaForCausalLM": ("LLAMA", _llama, _llama_keys),
    "MistralForCausalLM": ("LLAMA", _llama, _llama_keys),
    "Qwen2ForCausalLM": ("QWEN2", _as_it_is, _no_keys),
    "Qwen3ForCausalLM": ("QWEN3", _as_it_is, _no_keys),
    "Qwen3MoeForCausalLM": ("QWEN3MOE", _as_it_is, _expert_keys),
    "Gemma3ForCausalLM": ("GEMMA3", _gemma3, _gemma3_keys),
    "Gemma4ForCausalLM": ("GEMMA4", _gemma4, _gemma4_keys),
    "GptOssForCausalLM": ("GPT_OSS", _gpt_oss, _gpt_oss_keys),
    "Qwen3_5ForCausalLM": ("QWEN35", _qwen35, _qwen35_keys),
    "Qwen3_5MoeForCausalLM": ("QWEN35MOE", _qwen35, _qwen35_keys),
}
