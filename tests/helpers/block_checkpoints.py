"""Tiny checkpoints whose linear maps are stored with a scale for each block, packed as the libraries of each format do it.

Weights are rounded and packed here number by number, and the weights that they stand for are computed from the numbers
before packing, so that nothing of what reads them is used."""

import functools
import itertools
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from fp8_checkpoints import FP8, LINEAR
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, tiny_config, write_weights

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = tuple[dict[str, np.ndarray], np.ndarray]  # end of a name -> array in the files; the weight, float32 [out, in]


class Coded(NamedTuple):
    """A weight ``[out, in]`` in four or eight bits, before it is packed.

    Attributes:
      codes: int ``[out, in]``, 0..15.
      zeros: int ``[out, groups]``, 0..15.
      scales: ``[out, groups]``.
      groups: int ``[in]``.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @property
    def weight(self) -> np.ndarray:
        """What it stands for, float32, number by number."""
        rows = [
            [
                np.float32(int(code) - int(zeros[group])) * np.float32(scales[group])
                for code, group in zip(codes, self.groups, strict=True)
            ]
            for codes, zeros, scales in zip(self.codes, self.zeros, self.scales, strict=True)
        ]
        return np.array(rows, np.float32)


def coded(
    weight: np.ndarray, group_size: int, symmetric: bool = False, order: bool = False, bits: int = 4, dtype=np.float16
) -> Coded:
    """``weight`` rounded to codes of so many bits.

    Args:
      weight: ``[out, in]``.
      group_size: -1 for one group.
      symmetric: whether the code in the middle is the zero everywhere; some scales are negative then, as AutoRound chooses
        them.
      order: whether the input features of a group are scattered.
      bits: of a code.
      dtype: of the scales.
    """
    (outputs, inputs), last = weight.shape, (1 << bits) - 1
    size = inputs if group_size == -1 else group_size
    groups = np.arange(inputs) // size
    if order:
        groups = np.random.default_rng(inputs).permutation(groups)
    codes = np.zeros(weight.shape, int)
    zeros, scales = np.full((outputs, inputs // size), (last + 1) // 2), np.zeros((outputs, inputs // size), dtype)
    for group in range(inputs // size):
        numbers = weight[:, groups == group]
        low, high = numbers.min(1), numbers.max(1)
        if symmetric:
            scales[:, group] = np.where(-low > high, -low, -high) / ((last + 1) // 2)
        else:
            scales[:, group] = (high - low) / last
            zeros[:, group] = np.clip(np.round(-low / scales[:, group]), 0, last)
        scale, zero = scales[:, group, None].astype(np.float32), zeros[:, group, None]
        codes[:, groups == group] = np.clip(np.round(numbers / scale) + zero, 0, last)
    return Coded(codes, zeros, scales, groups)


def packed(codes: np.ndarray, axis: int, order: Sequence[int] | None = None, bits: int = 4) -> np.ndarray:
    """``codes``, int of two dimensions, n of them in an int32 along ``axis``: code ``order[i]`` of n from bit ``bits i``
    on."""
    rows, n = codes if axis == 1 else codes.T, 32 // bits
    rows, order = np.pad(rows, ((0, 0), (0, -rows.shape[1] % n))), range(n) if order is None else order
    words = [
        [sum(int(row[start + place]) << bits * i for i, place in enumerate(order)) for start in range(0, len(row), n)]
        for row in rows
    ]
    found = np.array(words, np.uint32).view(np.int32)
    return np.ascontiguousarray(found if axis == 1 else found.T)


def gptq(weight: np.ndarray, group_size=8, symmetric=False, order=False, v2=False, g_idx=True, bits=4) -> Stored:
    """As AutoGPTQ and GPTQModel write it: zeros as they are if ``v2``, else less one."""
    rounded = coded(weight, group_size, symmetric, order, bits)
    zeros = packed(rounded.zeros.T, 1, bits=bits)
    if not v2:
        zeros = (zeros.view(np.uint32) - np.uint32(0x11111111 if bits == 4 else 0x01010101)).view(np.int32)
    parts = {
        ".qweight": packed(rounded.codes.T, 0, bits=bits),
        ".qzeros": zeros,
        ".scales": np.ascontiguousarray(rounded.scales.T),
        ".g_idx": rounded.groups.astype(np.int32),
    }
    if not g_idx:
        del parts[".g_idx"]
    return parts, rounded.weight


def awq(weight: np.ndarray, group_size=8) -> Stored:
    """As AutoAWQ writes it in its version ``gemm``."""
    rounded = coded(weight, group_size)
    parts = {
        ".qweight": packed(rounded.codes.T, 1, AWQ_ORDER),
        ".qzeros": packed(rounded.zeros.T, 1, AWQ_ORDER),
        ".scales": np.ascontiguousarray(rounded.scales.T),
    }
    return parts, rounded.weight


def pack_quantized(weight: np.ndarray, group_size=8, symmetric=True, bits=4, dtype=np.float16) -> Stored:
    """As compressed-tensors writes it, with scales of ``dtype``."""
    rounded = coded(weight, group_size, symmetric, bits=bits, dtype=dtype)
    parts = {
        ".weight_packed": packed(rounded.codes, 1, bits=bits),
        ".weight_scale": rounded.scales,
        ".weight_shape": np.array(weight.shape),
    }
    if not symmetric:
        parts[".weight_zero_point"] = packed(rounded.zeros, 0, bits=bits)
    return parts, rounded.weight


def fp8(weight: np.ndarray, block=(40, 24), end=".weight_scale_inv", dtype=np.float32) -> Stored:
    """As DeepSeek publishes it, or llm-compressor writes it; the last block of a row or a column may be smaller."""
    (height, width), (outputs, inputs) = block, weight.shape
    scales = np.zeros((-(-outputs // height), -(-inputs // width)), dtype)
    stored, wide = np.zeros(weight.shape, FP8), np.zeros(weight.shape, np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scales[i, j] = np.abs(weight[at]).max() / 448
            stored[at] = np.clip(weight[at] / scales[i, j].astype(np.float32), -448, 448).astype(FP8)
            wide[at] = stored[at].astype(np.float32) * np.float32(scales[i, j])
    return {".weight": stored, end: scales}, wide


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of NVFP4 and MXFP4 codes


def nvfp4(weight: np.ndarray, model_optimizer: bool = False) -> Stored:
    """As compressed-tensors or NVIDIA Model Optimizer writes it: they have the number of the whole weight the other way
    round."""
    outputs, inputs = weight.shape
    largest = np.abs(weight).max()
    overall = np.float32(largest / (448 * 6)) if model_optimizer else np.float32(448 * 6 / largest)
    codes, wide = np.zeros(weight.shape, np.uint8), np.zeros(weight.shape, np.float32)
    scales = np.zeros((outputs, inputs // 16), FP8)
    for o, group in itertools.product(range(outputs), range(inputs // 16)):
        numbers = weight[o, 16 * group : 16 * group + 16]
        stored = np.abs(numbers).max() / 6
        scales[o, group] = FP8.type(stored / overall if model_optimizer else stored * overall)
        scale = np.float32(scales[o, group])
        scale = scale * overall if model_optimizer else scale / overall
        for k, number in enumerate(numbers, 16 * group):
            nearest = min(range(8), key=lambda code: abs(abs(number) - MAGNITUDES[code] * scale))
            codes[o, k] = nearest + (8 if number < 0 else 0)
            wide[o, k] = np.float32(MAGNITUDES[nearest] * (-1 if number < 0 else 1)) * scale
    packed_codes = codes[:, ::2] | (codes[:, 1::2] << 4)
    if model_optimizer:
        return {".weight": packed_codes, ".weight_scale": scales, ".weight_scale_2": np.array(overall)}, wide
    return {".weight_packed": packed_codes, ".weight_scale": scales, ".weight_global_scale": overall.reshape(1)}, wide


def mxfp4(weight: np.ndarray) -> Stored:
    """As compressed-tensors writes it: a byte n stands for 2^(n - 127), and groups of zeros have 0."""
    outputs, inputs = weight.shape
    codes, wide = np.zeros(weight.shape, np.uint8), np.zeros(weight.shape, np.float32)
    scales = np.zeros((outputs, inputs // 32), np.uint8)
    for o, group in itertools.product(range(outputs), range(inputs // 32)):
        numbers = weight[o, 32 * group : 32 * group + 32]
        largest = float(np.abs(numbers).max())
        scales[o, group] = max(math.frexp(largest)[1] - 1 - 2 + 127, 0) if largest else 0
        scale = math.ldexp(1, int(scales[o, group]) - 127)
        for k, number in enumerate(numbers, 32 * group):
            nearest = min(range(8), key=lambda code: abs(abs(number) - MAGNITUDES[code] * scale))
            codes[o, k] = nearest + (8 if number < 0 else 0)
            wide[o, k] = MAGNITUDES[nearest] * (-1 if number < 0 else 1) * scale
    return {".weight_packed": codes[:, ::2] | (codes[:, 1::2] << 4), ".weight_scale": scales}, wide


def gptq_config(**changes) -> dict[str, Any]:
    """``quantization_config`` as GPTQModel writes it."""
    known = {"bits": 4, "group_size": 8, "desc_act": False, "sym": False, "checkpoint_format": "gptq", "lm_head": False}
    return {"quant_method": "gptq", **known, "pack_dtype": "int32", "dynamic": {}, **changes}


def awq_config(**changes) -> dict[str, Any]:
    """``quantization_config`` as AutoAWQ writes it."""
    known = {"bits": 4, "group_size": 8, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    return {"quant_method": "awq", **known, **changes}


def auto_round_config(packing: str | None, **changes) -> dict[str, Any]:
    """``quantization_config`` as AutoRound writes it."""
    known = {"bits": 4, "group_size": 32, "sym": False, "data_type": "int", "packing_format": packing}
    extra = {"extra_config": {"lm_head": {"bits": 16, "act_bits": 16}}, "block_name_to_quantize": "model.layers"}
    return {"quant_method": "auto-round", **known, "autoround_version": "0.16.1", **extra, **changes}


def fp8_config(**changes) -> dict[str, Any]:
    """``quantization_config`` of DeepSeek-V3, with other blocks."""
    known = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [40, 24]}
    return {"quant_method": "fp8", **known, **changes}


def compressed_config(form: str, **weights) -> dict[str, Any]:
    """``quantization_config`` as llm-compressor writes it; ``weights`` are keys of what it says of weights."""
    group = {"weights": {"dynamic": False, **weights}, "input_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def pack_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``pack-quantized``."""
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 8, "actorder": None}
    return compressed_config("pack-quantized", **{**known, **weights})


def nvfp4_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``nvfp4-pack-quantized``."""
    known = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return compressed_config("nvfp4-pack-quantized", **{**known, **weights})


def mxfp4_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``mxfp4-pack-quantized``."""
    known = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return compressed_config("mxfp4-pack-quantized", **{**known, "scale_dtype": "torch.uint8", **weights})


def model_optimizer_config(algorithm: str = "NVFP4", **changes) -> dict[str, Any]:
    """``quantization_config`` as NVIDIA Model Optimizer writes it."""
    known = {"quant_algo": algorithm, "kv_cache_scheme": None, "group_size": 16, "ignore": ["lm_head*"]}
    return {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.39.0"}, **known, **changes}


class Kind(NamedTuple):
    """A format: its ``quantization_config``, what rounds and packs a weight, what it is called in notes, and what has to be
    of another size than in other tiny checkpoints."""

    config: dict[str, Any]
    store: Callable[[np.ndarray], Stored]
    words: str
    sizes: Mapping[str, int] = types.MappingProxyType({})


_WORDS = "FP8 with a scale for each block of 128 x 128"
# Blocks that are kept as they are stored, as DeepSeek, Qwen and llm-compressor write them. The sizes are those of models
# in which some maps have several blocks, the last of which are smaller.
KEPT_SIZES = types.MappingProxyType({"hidden_size": 160, "intermediate_size": 264})
# With latents, some blocks of 128 rows of the map to keys and values begin and end within heads, which have 96 rows. Of two
# shared experts, the second would begin within a group of 128 inputs.
KEPT_LATENTS = types.MappingProxyType(
    {"kv_lora_rank": 160, "qk_nope_head_dim": 40, "v_head_dim": 56, "n_shared_experts": 1}
)
KEPT = {
    name: Kind(
        config, functools.partial(fp8, block=(128, 128), end=end, dtype=dtype), _WORDS, KEPT_SIZES | KEPT_LATENTS
    )
    for name, config, end, dtype in (
        ("deepseek", fp8_config(weight_block_size=[128, 128]), ".weight_scale_inv", np.float32),
        ("qwen", fp8_config(weight_block_size=[128, 128]), ".weight_scale_inv", ml_dtypes.bfloat16),
        ("qwen instruct", fp8_config(weight_block_size=[128, 128]), ".weight_scale_inv", np.float16),
        (
            "compressed",
            compressed_config(
                "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
            ),
            ".weight_scale",
            ml_dtypes.bfloat16,
        ),
    )
}
SIXTEENS = {"moe_intermediate_size": 32, "q_lora_rank": 32}  # of which 16 or 32 features share a scale
_BLOCK = compressed_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 24])
KINDS = {
    "fp8": Kind(fp8_config(), fp8, "FP8 with a scale for each block of 40 x 24"),
    "fp8 compressed": Kind(_BLOCK, lambda weight: fp8(weight, end=".weight_scale"), "FP8 with a scale for each block"),
    "gptq": Kind(gptq_config(), gptq, "GPTQ, four bits with a scale for each 8 input features"),
    "gptq order": Kind(
        gptq_config(desc_act=True, dynamic={"-:.*gate$": {}}),
        lambda weight: gptq(weight, order=True),
        "GPTQ, four bits",
    ),
    "gptq v2": Kind(gptq_config(checkpoint_format="gptq_v2"), lambda weight: gptq(weight, v2=True), "GPTQ, four bits"),
    "gptq 8 bits": Kind(
        gptq_config(bits=8, desc_act=True),
        lambda weight: gptq(weight, order=True, bits=8),
        "GPTQ, eight bits with a scale for each 8 input features",
    ),
    "gptq 8 bits symmetric": Kind(
        gptq_config(bits=8, sym=True), lambda weight: gptq(weight, symmetric=True, bits=8), "GPTQ, eight bits"
    ),
    "awq": Kind(awq_config(), awq, "AWQ, four bits with a scale for each 8 input features"),
    "packed": Kind(pack_config(), pack_quantized, "four bits with a scale for each 8 input features (pack-quantized)"),
    "packed zeros": Kind(
        pack_config(symmetric=False), lambda weight: pack_quantized(weight, symmetric=False), "(pack-quantized)"
    ),
    "packed 8 bits, zeros": Kind(
        pack_config(num_bits=8, symmetric=False),
        lambda weight: pack_quantized(weight, symmetric=False, bits=8),
        "eight bits with a scale for each 8 input features (pack-quantized)",
    ),
}
NVFP4 = {
    "nvfp4": Kind(nvfp4_config(), nvfp4, "NVFP4, four bits with a scale for each 16 input features", SIXTEENS),
    "nvfp4 modelopt": Kind(
        model_optimizer_config(), lambda weight: nvfp4(weight, model_optimizer=True), "NVFP4, four bits", SIXTEENS
    ),
}
MXFP4 = Kind(
    mxfp4_config(),
    mxfp4,
    "MXFP4, four bits with a power of two for each 32 input features",
    {**SIXTEENS, "v_head_dim": 24},
)


def _of_groups(size: int) -> dict[str, int]:
    """Sizes that groups of ``size`` inputs divide, and of which most maps have several."""
    return {
        "hidden_size": max(size, 64),
        "intermediate_size": max(size, 96) if size == 32 else 2 * size,
        "moe_intermediate_size": size,
        "head_dim": max(size // 4, 16),
    }


def _pack(name: str, group_size: int, symmetric: bool, dtype, bits: int = 4) -> Kind:
    """pack-quantized; a group size of -1 is one group of all inputs."""
    groups = {"strategy": "channel", "group_size": None} if group_size == -1 else {"group_size": group_size}
    store = functools.partial(pack_quantized, group_size=group_size, symmetric=symmetric, dtype=dtype, bits=bits)
    return Kind(pack_config(symmetric=symmetric, num_bits=bits, **groups), store, name, _of_groups(max(group_size, 32)))


# Codes of four bits that are kept as they are stored: the words are the name of what they are kept as.
KEPT_CODES = {
    "gptq": Kind(
        gptq_config(group_size=32), functools.partial(gptq, group_size=32), "int4_32_float16_zeros", _of_groups(32)
    ),
    "gptq symmetric": Kind(
        gptq_config(sym=True, group_size=-1),
        functools.partial(gptq, group_size=-1, symmetric=True, g_idx=False),
        "int4_all_float16",
    ),
    "gptq v2 in order": Kind(  # which ``desc_act`` need not change
        gptq_config(checkpoint_format="gptq_v2", group_size=64, desc_act=True),
        functools.partial(gptq, group_size=64, v2=True),
        "int4_64_float16_zeros",
        _of_groups(64),
    ),
    "awq": Kind(
        awq_config(group_size=32), functools.partial(awq, group_size=32), "int4_32_float16_zeros", _of_groups(32)
    ),
    "awq channel": Kind(
        awq_config(group_size=-1, version="GEMM"), functools.partial(awq, group_size=-1), "int4_all_float16_zeros"
    ),
    "auto-round": Kind(
        auto_round_config(None),
        functools.partial(gptq, group_size=32, g_idx=False),
        "int4_32_float16_zeros",
        _of_groups(32),
    ),
    "auto-round gptqmodel": Kind(
        auto_round_config("auto_round:gptqmodel"),
        functools.partial(gptq, group_size=32, v2=True),
        "int4_32_float16_zeros",
        _of_groups(32),
    ),
    "auto-round awq": Kind(
        auto_round_config("auto_round:auto_awq"),
        functools.partial(awq, group_size=32),
        "int4_32_float16_zeros",
        _of_groups(32),
    ),
    "packed": _pack("int4", 128, True, ml_dtypes.bfloat16),
    "packed zeros": _pack("int4_32_float32_zeros", 32, False, np.float32),
    "packed channel": _pack("int4_all_bfloat16", -1, True, ml_dtypes.bfloat16),
    "packed 8 bits": _pack("int8_all_float16", -1, True, np.float16, 8),  # some scales are negative
    "packed 8 bits, groups": _pack("int8_32_bfloat16_zeros", 32, False, ml_dtypes.bfloat16, 8),
    "gptq 8 bits, groups": Kind(
        gptq_config(bits=8, group_size=64),
        functools.partial(gptq, group_size=64, bits=8),
        "int8_64_float16_zeros",
        _of_groups(64),
    ),
    "gptq in another order": Kind(
        gptq_config(group_size=32, desc_act=True),
        functools.partial(gptq, group_size=32, order=True),
        "int4_32_float16_zeros_ordered",
        _of_groups(32),
    ),
    "gptq 8 bits in another order": Kind(
        gptq_config(group_size=32, desc_act=True, sym=True, bits=8),
        functools.partial(gptq, group_size=32, order=True, symmetric=True, bits=8),
        "int8_32_float16_ordered",
        _of_groups(32),
    ),
    "packed 256": _pack("int4_128_float16", 256, True, np.float16),
    **{name: kind._replace(words="nvfp4") for name, kind in NVFP4.items()},
    "mxfp4": MXFP4._replace(words="mxfp4"),
}


def block_checkpoint(
    path: Path, kind: Kind, architecture: str = "LlamaForCausalLM", *, head: bool = False, shards: int = 1, **overrides
) -> Path:
    """Write a random checkpoint in a format, and beside it, as ``<name>-wide``, the float32 one that it stands for.

    Args:
      path: the folder.
      kind: the format.
      architecture: as for ``tiny_checkpoint``.
      head: whether the output head is stored so too.
      shards, overrides: as for ``tiny_checkpoint``.
    """
    wide = tiny_checkpoint(
        path.with_name(f"{path.name}-wide"), architecture, **{**sizes_of(kind, architecture), **overrides}
    )
    return stored_as(path, wide, kind, head=head, shards=shards)


def sizes_of(kind: Kind, architecture: str) -> dict[str, int]:
    """What has to be of another size in tiny checkpoints of an architecture in this format, of what it has."""
    return {key: size for key, size in kind.sizes.items() if key in tiny_config(architecture)}


def stored_as(path: Path, wide: Path, kind: Kind, *, head: bool = False, shards: int = 1) -> Path:
    """Write the float32 checkpoint ``wide`` in a format to ``path``, and in its place the one that this stands for."""
    tensors, stored = load_file(wide / "model.safetensors"), {}
    for name, array in tensors.items():
        if _is_stored(name) or (head and name == "lm_head.weight"):
            parts, tensors[name] = kind.store(array)
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
        else:
            stored[name] = array.astype(np.float16)
            tensors[name] = stored[name].astype(np.float32)
    path.mkdir()
    quantization = {**kind.config, "ignore": []} if head and "ignore" in kind.config else kind.config
    config = {**json.loads((wide / "config.json").read_text()), "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path, stored, shards)
    write_weights(wide, tensors)
    return path


def _is_stored(name: str) -> bool:
    """Whether a tensor is quantised: no output head, no router, and no map of a multi-token prediction layer's inputs."""
    return (bool(LINEAR.search(name)) or "_with_mqa." in name) and "eh_proj" not in name
