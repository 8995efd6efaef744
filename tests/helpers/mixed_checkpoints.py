"""Tiny checkpoints of which some maps are stored in one format and some in another, as the tools that mix them write it."""

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from fp8_checkpoints import compressed_tensors, write_both
from packed_weights import (
    Stored,
    auto_round_config,
    fp8,
    gptq,
    gptq_config,
    model_optimizer_config,
    nvfp4,
    nvfp4_config,
    pack_config,
    pack_quantized,
)
from safetensors.numpy import load_file
from tiny import tiny_checkpoint

Store = Callable[[np.ndarray], Stored]


class Mix(NamedTuple):
    """A checkpoint of several formats.

    Attributes:
      config: its ``quantization_config``.
      stores: pattern of names of tensors -> what rounds and packs those weights; the first that matches counts.
      kept: names of maps in the params -> the formats in which they are loaded.
      sizes: what has to be of another size than in other tiny checkpoints.
      architecture: that of the model, unless another is asked for.
    """

    config: dict[str, Any]
    stores: Mapping[str, Store]
    kept: Mapping[str, str | None]
    sizes: Mapping[str, int]
    architecture: str = "LlamaForCausalLM"


def mixed_checkpoint(path: Path, mix: Mix, architecture: str = "", **overrides) -> Path:
    """Write a random checkpoint, and beside it, as ``<name>-wide``, the float32 one that it stands for."""
    architecture = architecture or mix.architecture
    wide = tiny_checkpoint(path.with_name(f"{path.name}-wide"), architecture, **{**mix.sizes, **overrides})
    return write_mixed(path, wide, mix, load_file(wide / "model.safetensors"))


def write_mixed(path: Path, wide: Path, mix: Mix, tensors: dict[str, np.ndarray]) -> Path:
    """Write the ``tensors`` of the float32 checkpoint ``wide`` in formats, and in their place those that they stand for."""
    stored = {}
    for name, array in tensors.items():
        store = next((store for names, store in mix.stores.items() if re.fullmatch(names, name)), None)
        if store is None:
            stored[name] = array.astype(np.float16)
            tensors[name] = stored[name].astype(np.float32)
        else:
            parts, tensors[name] = store(array)
            stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    return write_both(path, stored, mix.config, 1, wide, tensors)


def fp8_channel(weight: np.ndarray) -> Stored:
    return fp8(weight, (1, weight.shape[1]), ".weight_scale", ml_dtypes.bfloat16)


def fp8_tensor(weight: np.ndarray) -> Stored:
    parts, wide = fp8(weight, weight.shape, ".weight_scale")
    return {**parts, ".weight_scale": parts[".weight_scale"].reshape(())}, wide


def groups(*of: tuple[dict[str, Any], list[str]], form: str = "mixed-precision", named: bool = True, **more) -> dict:
    """``quantization_config`` of compressed-tensors with a group for each pair (that of a single format, targets).

    Args:
      of: the pairs.
      form: what it calls the format of the whole.
      named: whether each group names its own.
      more: further keys.
    """
    merged = {}
    for number, (config, targets) in enumerate(of):
        own = {"format": config["format"]} if named else {}
        merged[f"group_{number}"] = {**config["config_groups"]["group_0"], **own, "targets": targets}
    return {**of[0][0], "format": form, "config_groups": merged, **more}


ATTENTION, MLP, HEAD = r".*self_attn\..*_proj\.weight", r".*mlp\..*_proj\.weight", r"lm_head\.weight"
INT4, INT4_64, INT8 = (
    functools.partial(pack_quantized, group_size=size, bits=bits) for size, bits in ((32, 4), (64, 4), (32, 8))
)
EVEN = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # sizes that groups of 64 divide
# As maps are called in a model of two layers: those of attention, those of the MLP.
OF_ATTENTION = [f"layers.{i}.attention.{name}" for i in range(2) for name in ("qkv", "out")]
OF_MLP = [f"layers.{i}.mlp.{name}" for i in range(2) for name in ("gate_up", "down")]


def kept(attention: str | None, mlp: str | None, head: str | None = None, **others) -> dict[str, str | None]:
    """Name of a map -> its format; ``__`` stands for a dot in the names of ``others``."""
    found = dict.fromkeys(OF_ATTENTION, attention) | dict.fromkeys(OF_MLP, mlp) | {"head": head}
    return found | {name.replace("__", "."): form for name, form in others.items()}


_PACKED, _PACKED_64, _PACKED_8 = (
    pack_config(group_size=32),
    pack_config(group_size=64),
    pack_config(num_bits=8, group_size=32),
)
MIXES = {
    "FP8 and NVFP4": Mix(
        groups((compressed_tensors(), [r"re:.*self_attn\.(q|k|v|o)_proj$"]), (nvfp4_config(), ["Linear"])),
        {ATTENTION: fp8_channel, MLP: nvfp4},
        kept("fp8", "nvfp4"),
        EVEN,
    ),
    "FP8 of a class and int4 of names": Mix(
        groups(
            (compressed_tensors(), ["Linear"]),
            (_PACKED, ["model.layers.0.mlp.down_proj", r"re:model\.layers\.1\.mlp\..*"]),
        ),
        {r".*\.0\.mlp\.down_proj\.weight|.*\.1\.mlp\..*proj\.weight": INT4, f"{ATTENTION}|{MLP}": fp8_channel},
        kept("fp8", "int4_32_float16", layers__0__mlp__gate_up="fp8"),
        EVEN,
    ),
    "groups of 32 and of 64, and a head in eight bits": Mix(
        groups(
            (_PACKED, ["re:.*self_attn.*"]),
            (_PACKED_64, ["re:.*mlp.*"]),
            (_PACKED_8, ["lm_head"]),
            form="pack-quantized",
            named=False,
            ignore=[],
        ),
        {ATTENTION: INT4, MLP: INT4_64, HEAD: INT8},
        kept("int4_32_float16", "int4_64_float16", "int8_32_float16"),
        EVEN,
    ),
    "values in eight bits": Mix(
        groups((_PACKED, ["Linear"]), (_PACKED_8, ["re:.*(v|up)_proj"])),
        {r".*(v|up)_proj\.weight": INT8, f"{ATTENTION}|{MLP}": INT4},
        kept(
            "int4_32_float16",
            "int4_32_float16",
            **{
                f"layers__{i}__{name}": "int8_32_float16"
                for i in range(2)
                for name in ("attention__values", "mlp__gate_up")
            },
        ),
        EVEN,
    ),
    "GPTQ": Mix(
        gptq_config(
            group_size=32,
            lm_head=True,
            dynamic={
                r"+:.*\.0\.mlp\.down": {"bits": 8, "group_size": 64},
                r"-:.*\.1\.self_attn": {},
                r".*\.1\..*(gate|up)_proj": {"desc_act": True},
                "model.layers.1": {},
                r"model\.layers.*down_proj": {"bits": 8},  # an entry before it names the module
                "lm_head": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False, "mse": 2.4},
            },
        ),
        {
            r".*\.0\.mlp\.down_proj\.weight": functools.partial(gptq, group_size=64, bits=8),
            r".*\.1\..*(gate|up)_proj\.weight": functools.partial(gptq, group_size=32, order=True),
            rf".*\.0\.self_attn\..*_proj\.weight|{MLP}": functools.partial(gptq, group_size=32),
            HEAD: functools.partial(gptq, group_size=32, bits=8, symmetric=True),
        },
        kept(
            None,
            "int4_32_float16_zeros",
            "int8_32_float16",
            layers__0__attention__qkv="int4_32_float16_zeros",
            layers__0__attention__out="int4_32_float16_zeros",
            layers__0__mlp__down="int8_64_float16_zeros",
            layers__1__mlp__gate_up="int4_32_float16_zeros_ordered",
        ),
        {**EVEN, "vocab_size": 128},
    ),
    "AutoRound": Mix(
        auto_round_config(
            "auto_round:auto_gptq",
            sym=True,
            extra_config={
                r".*\.1\.self_attn.*": {"bits": 8},
                r"1\.mlp\.down_proj$": {"bits": 16},
                "model.layers.1.self_attn.o_proj": {"bits": 4, "group_size": 64},
                "model.layers.0.mlp.down_proj": {"sym": False},
                "model.layers.0.mlp.gate_proj": {},
                "lm_head": {"bits": 16, "act_bits": 16},
            },
        ),
        {
            r".*\.1\.mlp\.down_proj\.weight": lambda weight: ({".weight": weight}, weight),
            r".*\.1\.self_attn\.o_proj\.weight": functools.partial(gptq, group_size=64, symmetric=True),
            r".*\.1\.self_attn\..*_proj\.weight": functools.partial(gptq, group_size=32, symmetric=True, bits=8),
            r".*\.0\.mlp\.down_proj\.weight": functools.partial(gptq, group_size=32),
            f"{ATTENTION}|{MLP}": functools.partial(gptq, group_size=32, symmetric=True, g_idx=False),
        },
        kept(
            "int4_32_float16",
            "int4_32_float16",
            layers__1__attention__qkv="int8_32_float16",
            layers__1__attention__out="int4_64_float16",
            layers__0__mlp__down="int4_32_float16_zeros",
            layers__1__mlp__down=None,
        ),
        EVEN,
    ),
    "Model Optimizer": Mix(
        model_optimizer_config(
            "MIXED_PRECISION",
            ignore=[],
            quantized_layers={
                **{
                    f"model.layers.{i}.self_attn.{name}_proj": {"quant_algo": algorithm}
                    for i, algorithm in enumerate(("FP8", "FP8_PER_CHANNEL_PER_TOKEN"))
                    for name in "qkvo"
                },
                **{
                    f"model.layers.0.mlp.{name}_proj": {"quant_algo": "NVFP4", "group_size": 16}
                    for name in ("gate", "up", "down")
                },
            },
        ),
        {
            r".*\.0\.self_attn\..*proj\.weight": fp8_tensor,
            r".*\.1\.self_attn\..*proj\.weight": fp8_channel,
            r".*\.0\.mlp\..*proj\.weight": functools.partial(nvfp4, model_optimizer=True),
        },
        kept("fp8", None, layers__0__mlp__gate_up="nvfp4", layers__0__mlp__down="nvfp4"),
        EVEN,
    ),
}
BLOCKS = Mix(
    groups(
        (compressed_tensors("block", weights__block_structure=[128, 128]), ["re:.*self_attn.*"]),
        (nvfp4_config(), [r"re:.*layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj$"]),
    ),
    {ATTENTION: functools.partial(fp8, block=(128, 128), end=".weight_scale"), r".*experts\..*_proj\.weight": nvfp4},
    kept("fp8_block", "nvfp4"),
    {**EVEN, "moe_intermediate_size": 32},
)
_CHOSEN, _OWN = r".*experts\.\d+\..*_proj", r".*shared_expert\..*_proj"
# Mixtures of Qwen3.5 whose shared expert has another format. The first has what GPTQModel 7.6 writes of a Qwen2-MoE with the
# same ``dynamic``.
SHARED = {
    name: Mix(
        config,
        {f"{maps}.weight": store for maps, store in stores.items()},
        dict(zip(("layers.1.mlp.down", "layers.1.mlp.shared.down"), forms, strict=True)),
        {**EVEN, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 256},
        "Qwen3_5MoeForCausalLM",
    )
    for name, forms, stores, config in (
        (
            "plain shared experts",
            ("int4_32_float16", None),
            {_CHOSEN: functools.partial(gptq, group_size=32, symmetric=True)},
            gptq_config(group_size=32, sym=True, dynamic={"-:.*attn.*": {}, "-:.*shared_expert.*": {}}),
        ),
        (
            "shared experts in eight bits",
            ("int4_32_float16", "int8_32_float16"),
            {_CHOSEN: INT4, _OWN: INT8},
            groups((_PACKED, [f"re:{_CHOSEN}"]), (_PACKED_8, [f"re:{_OWN}"])),
        ),
        ("shared experts alone", (None, "nvfp4"), {_OWN: nvfp4}, groups((nvfp4_config(), [f"re:{_OWN}"]))),
    )
}
