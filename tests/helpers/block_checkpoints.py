"""Tiny checkpoints whose linear maps are stored with a scale for each block, as the libraries of each format pack them."""

import functools
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from fp8_checkpoints import FP8, LINEAR, write_both
from packed_weights import (
    Stored,
    auto_round_config,
    auto_round_floats,
    awq,
    awq_config,
    bitsandbytes,
    bitsandbytes_config,
    bitsandbytes_int8,
    bytes_config,
    codes_in_bytes,
    compressed_config,
    fp8,
    fp8_config,
    gptq,
    gptq_config,
    model_optimizer_config,
    mxfp4,
    mxfp4_config,
    mxfp8,
    mxfp8_config,
    nvfp4,
    nvfp4_config,
    pack_config,
    pack_quantized,
    scaled_inputs,
    torchao,
    torchao_codes,
    torchao_config,
)
from safetensors.numpy import load_file
from tiny import tiny_checkpoint, tiny_config


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
# shared experts, the second would begin within a group of 128 inputs, so they are an MLP.
KEPT_LATENTS = types.MappingProxyType({"kv_lora_rank": 160, "qk_nope_head_dim": 40, "v_head_dim": 56})
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
    "packed in no other order": Kind(
        pack_config(group_size=32),
        functools.partial(pack_quantized, group_size=32, order=False),
        "int4_32_float16",
        _of_groups(32),
    ),
    "packed in another order": Kind(
        pack_config(group_size=32, actorder="group"),
        functools.partial(pack_quantized, group_size=32, order=True),
        "int4_32_float16_ordered",
        _of_groups(32),
    ),
    "codes in bytes": Kind(bytes_config(), codes_in_bytes, "int4_128_float16", _of_groups(128)),
    "awq modelopt": Kind(
        model_optimizer_config("W4A16_AWQ", group_size=128), scaled_inputs, "int4_128_float16_scaled", _of_groups(128)
    ),
    "auto-round mxfp4": MXFP4._replace(
        config=auto_round_floats("mx_fp", 4, 32, "auto_round:llm_compressor"), words="mxfp4"
    ),
    "mxfp8": MXFP4._replace(config=mxfp8_config(), store=mxfp8, words="mxfp8"),
    "mxfp8 modelopt": MXFP4._replace(config=model_optimizer_config("MXFP8", group_size=32), store=mxfp8, words="mxfp8"),
    "bitsandbytes nf4": Kind(bitsandbytes_config(), bitsandbytes, "nf4_64", _of_groups(64)),
    "bitsandbytes nf4 twice": Kind(
        bitsandbytes_config(bnb_4bit_use_double_quant=True),
        functools.partial(bitsandbytes, double=True),
        "nf4_64",
        _of_groups(64),
    ),
    "bitsandbytes fp4": Kind(
        bitsandbytes_config(kind="fp4"), functools.partial(bitsandbytes, kind="fp4", block=32), "fp4_32", _of_groups(32)
    ),
    "bitsandbytes int8": Kind(bitsandbytes_config(8), bitsandbytes_int8, "int8"),
    "torchao int8": Kind(torchao_config(), torchao, "int8"),
    "torchao int4 zeros": Kind(
        torchao_config(
            "IntxWeightOnlyConfig",
            *("PerGroup", {"group_size": 32}),
            weight_dtype={"_type": "torch.dtype", "_data": "int4"},
        ),
        torchao_codes,
        "int4_32_float32_zeros",
        _of_groups(32),
    ),
    "torchao fp8 tensor": Kind(
        torchao_config("Float8WeightOnlyConfig", "PerTensor"),
        functools.partial(torchao, dtype=FP8, of_channels=False),
        "fp8",
    ),
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
    quantization = {**kind.config, "ignore": []} if head and "ignore" in kind.config else kind.config
    return write_both(path, stored, quantization, shards, wide, tensors)


def _is_stored(name: str) -> bool:
    """Whether a tensor is quantised: no output head, no router, and no map of a multi-token prediction layer's inputs."""
    return (bool(LINEAR.search(name)) or "_with_mqa." in name) and "eh_proj" not in name
