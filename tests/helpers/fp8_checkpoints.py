"""Tiny checkpoints whose linear maps are FP8 with scales, as llm-compressor and vLLM lay them out."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, write_weights

from jspec.models.quantization import quantize
from jspec.quantization.formats import known_format

# The tensors of linear maps, by what their names end with; an output head and routers are none of them.
_NAMES = r"proj|proj_with_mqa|fc1|fc2|w1|w2|w3|project_in|project_out|in_proj_qkvz?|in_proj_z"
LINEAR = re.compile(rf"(?<!router\.)({_NAMES})\.weight$")
FP8 = np.dtype(known_format("fp8").numbers)
GPT_OSS = "GptOssForCausalLM"  # its experts are stacked in one tensor
DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"


def compressed_tensors(strategy: str = "channel", ignore: Sequence[str] = ("lm_head",), **changes) -> dict[str, Any]:
    """``quantization_config`` as llm-compressor writes it.

    Args:
      strategy: what has a scale: each output ``channel``, or a whole ``tensor``.
      ignore: the modules that are not quantised.
      changes: keys in which it differs; those of ``weights`` begin with ``weights__``, and those of the group with
        ``group__``.
    """
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": strategy,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group: dict[str, Any] = {"weights": weights, "input_activations": activations, "targets": ["Linear"]}
    whole = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }
    for key, value in changes.items():
        within = {"weights": weights, "group": group}.get(key.partition("__")[0], whole)
        within[key.partition("__")[2] or key] = value
    return whole


def vllm_fp8(ignored: Sequence[str] = ("lm_head",), **changes) -> dict[str, Any]:
    """``quantization_config`` of the method ``fp8``, with a scale for each weight."""
    return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": list(ignored), **changes}


def fp8_checkpoint(
    path: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    quantization: dict[str, Any] | None = None,
    head: bool = False,
    scale_dtype=ml_dtypes.bfloat16,
    shards: int = 1,
    **overrides,
) -> Path:
    """Write a random checkpoint with FP8 weights, and beside it, as ``<name>-wide``, the float32 one that it stands for.

    Args:
      path: the folder; the wide one holds float32 weights, each an FP8 number times its scale.
      architecture: as for ``tiny_checkpoint``.
      quantization: its ``quantization_config``; None for that of ``compressed_tensors()``.
      head: whether the output head is quantised too.
      scale_dtype: of the scales in the files.
      shards, overrides: as for ``tiny_checkpoint``.
    """
    quantization = compressed_tensors() if quantization is None else quantization
    wide = tiny_checkpoint(path.with_name(f"{path.name}-wide"), architecture, **overrides)
    tensors = load_file(wide / "model.safetensors")
    stored = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    one_scale = quantization["quant_method"] == "fp8" or (
        quantization["config_groups"]["group_0"]["weights"]["strategy"] == "tensor"
    )
    groups = quantization.get("config_groups")
    kind = "int8" if groups is not None and groups["group_0"]["weights"]["type"] == "int" else "fp8"
    for name, array in tensors.items():
        if LINEAR.search(name) or (head and name == "lm_head.weight"):
            weight, scale = _quantized(array, kind, one_scale, scale_dtype)
            stored |= {name: weight, f"{name}_scale": scale}
            tensors[name] = weight.astype(np.float32) * scale.astype(np.float32).reshape(-1, 1)
        else:
            tensors[name] = stored[name].astype(np.float32)
    path.mkdir()
    config = {**json.loads((wide / "config.json").read_text()), "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path, stored, shards)
    write_weights(wide, tensors)
    return path


def names_in(folder) -> list[str]:
    """Names of the tensors in model.safetensors."""
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        return list(file.keys())


def changed(folder, **changes):
    """Put other tensors into a checkpoint, or leave out those that are None; ``__`` stands for a dot in a name."""
    stored = {name: raw_tensor(folder, name) for name in names_in(folder)}
    stored |= {name.replace("__", "."): array for name, array in changes.items()}
    write_weights(folder, {name: array for name, array in stored.items() if array is not None})
    return folder


def raw_tensor(folder, name) -> np.ndarray:
    """A tensor of model.safetensors, read without jspec, because safetensors reads no FP8 for NumPy."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    entry = json.loads(data[8 : 8 + length])[name]
    kinds = {"F8_E4M3": FP8, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16, "I8": np.int8}
    kinds |= {"I32": np.int32, "I64": np.int64, "U8": np.uint8}
    start, stop = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[start:stop], kinds[entry["dtype"]]).reshape(entry["shape"])


def _quantized(weight: np.ndarray, kind: str, one_scale: bool, scale_dtype) -> tuple[np.ndarray, np.ndarray]:
    """FP8 or int8 numbers ``[out, in]``, and scales ``[out, 1]`` or ``[1]``, which are rounded to their dtype first."""
    form = known_format(kind)
    if not one_scale:
        _, scale = quantize(weight, kind)
        scale = scale.astype(scale_dtype)[:, None]
    else:
        scale = np.array([np.abs(weight).max() / form.largest], scale_dtype)
    scaled = np.clip(weight / scale.astype(np.float32), -form.largest, form.largest)
    return (np.rint(scaled) if kind == "int8" else scaled).astype(form.numbers), scale


KINDS = {
    "channel": compressed_tensors(),
    "tensor": compressed_tensors("tensor"),
    "fp8": vllm_fp8(),
    "int8": compressed_tensors(format="int-quantized", weights__type="int"),
    "int8 of a tensor": compressed_tensors("tensor", format="naive-quantized", weights__type="int"),
}


def stored_in(kind: str) -> str:
    return "int8" if kind.startswith("int8") else "fp8"
