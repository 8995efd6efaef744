"""Weights rounded and packed as the library of each format does it, and ``quantization_config`` as each writes it.

Weights are rounded and packed here number by number, and the weights that they stand for are computed from the numbers
before packing, so that nothing of what reads them is used."""

import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from fp8_checkpoints import FP8

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


def pack_quantized(
    weight: np.ndarray, group_size=8, symmetric=True, bits=4, dtype=np.float16, order: bool | None = None
) -> Stored:
    """As compressed-tensors writes it, with scales of ``dtype``, and before its version 0.20 with the group of each input:
    scattered ones if ``order``, and -1 everywhere if it is False."""
    rounded = coded(weight, group_size, symmetric, bool(order), bits, dtype)
    parts = {
        ".weight_packed": packed(rounded.codes, 1, bits=bits),
        ".weight_scale": rounded.scales,
        ".weight_shape": np.array(weight.shape),
    }
    if not symmetric:
        parts[".weight_zero_point"] = packed(rounded.zeros, 0, bits=bits)
    if order is not None:
        parts[".weight_g_idx"] = rounded.groups.astype(np.int32) if order else np.full(weight.shape[1], -1, np.int32)
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


def mxfp8(weight: np.ndarray) -> Stored:
    """As compressed-tensors and Model Optimizer write it: a byte n stands for 2^(n - 127), and groups of zeros have 0."""
    stored, wide = np.zeros(weight.shape, FP8), np.zeros(weight.shape, np.float32)
    scales = np.zeros((weight.shape[0], weight.shape[1] // 32), np.uint8)
    for o, group in np.ndindex(*scales.shape):
        at = o, slice(32 * group, 32 * group + 32)
        largest = float(np.abs(weight[at]).max())
        scales[o, group] = max(math.ceil(math.log2(largest / 448)) + 127, 0) if largest else 0
        power = np.ldexp(1.0, int(scales[o, group]) - 127)
        stored[at] = np.clip(weight[at] / power, -448, 448).astype(FP8)
        wide[at] = stored[at].astype(np.float64) * power
    return {".weight": stored, ".weight_scale": scales}, wide


def codes_in_bytes(weight: np.ndarray) -> Stored:
    """As llm-compressor writes W4A8: a code of four bits in each byte."""
    rounded = coded(weight, 128, symmetric=True)
    return {".weight": (rounded.codes - 8).astype(np.int8), ".weight_scale": rounded.scales}, rounded.weight


def torchao_codes(weight: np.ndarray, group_size: int = 32, bits: int = 4) -> Stored:
    """As torchao writes integers with scales and zeros for groups."""
    rounded, half = coded(weight, group_size, bits=bits, dtype=np.float32), 1 << (bits - 1)
    codes, zeros = ((array - half).astype(np.int8) for array in (rounded.codes, rounded.zeros))
    return {"._weight_qdata": codes, "._weight_scale": rounded.scales, "._weight_zero_point": zeros}, rounded.weight


def scaled_inputs(weight: np.ndarray, dtype=np.float16) -> Stored:
    """As Model Optimizer writes AWQ, with scales of ``dtype`` and numbers that multiply the inputs, the same for all maps of
    as many."""
    of_inputs = np.random.default_rng(weight.shape[1]).uniform(0.5, 2, weight.shape[1]).astype(np.float32)
    rounded = coded(weight / of_inputs, 128, symmetric=True, dtype=dtype)
    codes = (rounded.codes - 8).astype(np.int8).view(np.uint8) & 15
    parts = {".weight": codes[::2] | codes[1::2] << 4, ".weight_scale": rounded.scales, ".pre_quant_scale": of_inputs}
    return parts, rounded.weight * of_inputs


NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25)
TABLES = {"nf4": NF4, "fp4": (*_FP4, *(-number for number in _FP4))}  # of bitsandbytes, in the order of its codes


def bitsandbytes(weight: np.ndarray, kind: str = "nf4", block: int = 64, double: bool = False) -> Stored:
    """As bitsandbytes writes ``nf4`` or ``fp4`` in blocks of so many numbers, row after row, with ``double`` quantisation or
    not."""
    flat, table = weight.reshape(-1).astype(np.float32), np.float32(TABLES[kind])
    blocks = -(-flat.size // block)
    scales = np.array([np.abs(flat[i * block :][:block]).max() for i in range(blocks)], np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float16", "shape": list(weight.shape)}
    parts = {".weight.absmax": scales}
    if double:
        nested, of_codes = np.float32(np.linspace(-1, 1, 256)), scales - (offset := np.float32(scales.mean()))
        largest = np.array([np.abs(of_codes[i : i + 256]).max() for i in range(0, blocks, 256)], np.float32)
        each = np.repeat(largest, 256)[:blocks]
        chosen = np.abs(of_codes[:, None] / each[:, None] - nested).argmin(axis=1).astype(np.uint8)
        scales = nested[chosen] * each + offset
        parts = {".weight.absmax": chosen, ".weight.nested_absmax": largest, ".weight.nested_quant_map": nested}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
    codes = [int(np.abs(number - table * scales[i // block]).argmin()) for i, number in enumerate(flat)]
    wide = np.array([table[code] * scales[i // block] for i, code in enumerate(codes)], np.float32)
    pairs = [high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True)]
    parts |= {
        ".weight": np.array(pairs, np.uint8)[:, None],
        ".weight.quant_map": table,
        f".weight.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return parts, wide.reshape(weight.shape)


def bitsandbytes_int8(weight: np.ndarray) -> Stored:
    """As bitsandbytes writes LLM.int8."""
    largest = np.abs(weight).max(axis=1).astype(np.float32)
    numbers = np.rint(weight * (127 / largest[:, None])).astype(np.int8)
    parts = {".weight": numbers, ".SCB": largest, ".weight_format": np.array(0, np.uint8)}
    return parts, numbers * (largest / np.float32(127))[:, None]


def torchao(weight: np.ndarray, dtype=np.int8, of_channels: bool = True) -> Stored:
    """As torchao writes int8 or FP8."""
    largest = np.abs(weight).max(axis=1 if of_channels else None, keepdims=True).astype(np.float32)
    scale = largest / np.float32(127 if dtype == np.int8 else 448)
    numbers = (np.rint(weight / scale) if dtype == np.int8 else np.clip(weight / scale, -448, 448)).astype(dtype)
    parts = {"._weight_qdata": numbers, "._weight_scale": scale}
    if dtype == np.int8:
        parts["._weight_zero_point"] = np.zeros(scale.shape, np.int8)
    return parts, numbers.astype(np.float32) * scale


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


def auto_round_floats(data_type: str, bits: int, group_size: int | list[int], packing: str | None, **changes) -> dict:
    """``auto_round_config`` of floats, as AutoRound 0.16.1 wrote it of a tiny model."""
    activations = {"act_bits": bits, "act_data_type": data_type, "act_dynamic": True, "act_group_size": 32}
    known = {"data_type": data_type, "bits": bits, "group_size": group_size, "sym": True, "enable_quanted_input": False}
    return auto_round_config(packing, extra_config=None, **activations, **known, **changes)


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


def bytes_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``int-quantized`` with codes of four bits."""
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    return compressed_config("int-quantized", **{**known, **weights})


def nvfp4_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``nvfp4-pack-quantized``."""
    known = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    return compressed_config("nvfp4-pack-quantized", **{**known, **weights})


def mxfp4_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``mxfp4-pack-quantized``."""
    known = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return compressed_config("mxfp4-pack-quantized", **{**known, "scale_dtype": "torch.uint8", **weights})


def mxfp8_config(**weights) -> dict[str, Any]:
    """``quantization_config`` of the format ``mxfp8-quantized``."""
    known = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    return compressed_config("mxfp8-quantized", **{**known, "scale_dtype": "torch.uint8", **weights})


def model_optimizer_config(algorithm: str = "NVFP4", **changes) -> dict[str, Any]:
    """``quantization_config`` as NVIDIA Model Optimizer writes it."""
    known = {"quant_algo": algorithm, "kv_cache_scheme": None, "group_size": 16, "ignore": ["lm_head*"]}
    return {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.39.0"}, **known, **changes}


def bitsandbytes_config(bits: int = 4, kind: str = "nf4", **changes) -> dict[str, Any]:
    """``quantization_config`` as transformers writes it of bitsandbytes."""
    known = {
        **{
            "_load_in_4bit": bits == 4,
            "_load_in_8bit": bits == 8,
            "load_in_4bit": bits == 4,
            "load_in_8bit": bits == 8,
        },
        **{"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": kind},
        **{
            "bnb_4bit_use_double_quant": False,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_skip_modules": None,
        },
        **{"llm_int8_has_fp16_weight": False, "llm_int8_threshold": 6.0},
    }
    return {"quant_method": "bitsandbytes", **known, **changes}


def torchao_config(
    name: str = "Int8WeightOnlyConfig", granularity: str = "PerRow", of_granularity=None, **changes
) -> dict[str, Any]:
    """``quantization_config`` as transformers writes it of torchao; ``changes`` are of the arguments of its class."""
    data: dict[str, Any] = {
        "granularity": {"_type": granularity, "_version": 1, "_data": of_granularity or {}},
        "set_inductor_config": True,
    }
    if name.startswith("Float8"):
        data["weight_dtype"] = {"_type": "torch.dtype", "_data": "float8_e4m3fn"}
    made_by = {"_type": name, "_version": 2, "_data": data | changes}
    embeddings = {"include_input_output_embeddings": False, "untie_embedding_weights": False}
    return {"quant_method": "torchao", "quant_type": {"default": made_by}, "modules_to_not_convert": None, **embeddings}
