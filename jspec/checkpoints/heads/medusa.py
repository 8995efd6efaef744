"""Medusa heads (Cai et al., 2024) without their base model, in two layouts.

FasterDecoding's ``{head}.{block}.linear.weight`` with ``{head}.{blocks}.weight``, the output head, where there is one;
and vLLM's ``blocks.{head}.layers.{block}.weight`` with ``lm_heads.{head}.weight``, where blocks may lack biases. Heads
are counted: what published configs say of their number is not what the files hold."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from jspec._arguments import require
from jspec.checkpoints.fields import Fields
from jspec.checkpoints.heads.format import HeadFormat
from jspec.checkpoints.layout import Layout, derived
from jspec.checkpoints.names import Placement, tensor_table
from jspec.checkpoints.refusal import Refusal
from jspec.checkpoints.tensor import STORED_DTYPES, Tensor
from jspec.checkpoints.weights import MEDUSA
from jspec.heads import MedusaConfig

_OWN = re.compile(r"(\d{1,2})\.(\d{1,2})\.linear\.weight")
_VLLM = re.compile(r"blocks\.(\d{1,2})\.layers\.(\d{1,2})\.weight")
_PREFIX = re.compile(r"medusa_heads?\.")


def is_medusa(names: Iterable[str]) -> bool:
    """Whether tensors of these names are, or include, Medusa heads."""
    return any(_PREFIX.match(name) or _OWN.fullmatch(name) or _VLLM.fullmatch(name) for name in names)


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The layout of such a folder."""
    tensors = _without_prefix(fields, tensors)
    if fields.flag("original_lm_head"):
        raise fields.refuse(
            "original_lm_head", "null or false: Medusa heads that share an output head are not supported"
        )
    vllm = any(_VLLM.fullmatch(name) for name in tensors)
    blocks = [(int(m[1]), int(m[2])) for m in map((_VLLM if vllm else _OWN).fullmatch, tensors) if m]
    if not blocks:
        raise Refusal(f"{fields.where}: describes Medusa heads, but the files hold none of their residual blocks")
    depth = 1 + max(block for _, block in blocks)
    if fields.integer("medusa_num_layers", depth) != depth:
        raise fields.refuse("medusa_num_layers", f"{depth}, as many blocks as the tensors of a head")
    output = tensors.get("lm_heads.0.weight" if vllm else f"0.{depth}.weight")
    config = MedusaConfig(
        vocab_size=fields.integer("vocab_size", None) if output is None else output.shape[0],
        hidden_size=tensors[min(name for name in tensors if (_VLLM if vllm else _OWN).fullmatch(name))].shape[-1],
        num_heads=1 + max(head for head, _ in blocks),
        num_blocks=depth,
        own_head=output is not None,
    )
    if output is not None and fields.integer("vocab_size", config.vocab_size) != config.vocab_size:
        raise fields.refuse("vocab_size", f"{config.vocab_size}, the rows of the output heads")
    if fields.integer("truncated_vocab_size", config.vocab_size) != config.vocab_size:
        expected = f"{config.vocab_size}, the whole vocabulary: Medusa heads that cut it are not supported"
        raise fields.refuse("truncated_vocab_size", expected)
    rows = table(config, vllm)
    return Layout(
        config, f"Medusa heads{' (vLLM layout)' * vllm}", rows, _with_biases(rows, tensors) if vllm else tensors
    )


def table(config: MedusaConfig, vllm: bool = False) -> dict[str, Placement]:
    """Tensor name -> its place."""
    rows = tensor_table(config)
    return {_vllm_name(name): place for name, place in rows.items()} if vllm else rows


def _vllm_name(name: str) -> str:
    """vLLM's name of a tensor that FasterDecoding's layout calls ``name``."""
    head, block, *rest = name.split(".")
    return f"blocks.{head}.layers.{block}.{rest[-1]}" if "linear" in rest else f"lm_heads.{head}.weight"


def hf_config(config: MedusaConfig, target_name: str) -> dict[str, Any]:
    """config.json of heads in FasterDecoding's layout."""
    require(config.num_blocks > 0, "num_blocks", 0, "at least 1 in this layout")
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_blocks,
        "base_model_name_or_path": target_name,
        "version": "1" if config.own_head else "2",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }


def _without_prefix(fields: Fields, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not any(_PREFIX.match(name) for name in tensors):
        return tensors
    for name in tensors:
        if not _PREFIX.match(name):
            raise Refusal(
                f"{fields.where}: the files hold Medusa heads inside a whole model ({name!r}); put the tensors that begin "
                "with 'medusa_head' into a folder of their own"
            )
    return {_PREFIX.sub("", name, count=1): tensor for name, tensor in tensors.items()}


def _with_biases(rows: dict[str, Placement], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """vLLM leaves biases out unless ``medusa_fc_bias``; zeros are the same heads."""
    found = dict(tensors)
    if any(name in tensors for name in rows if name.endswith(".bias")):
        return found
    for name, place in rows.items():
        weight = tensors.get(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and weight is not None:
            found[name] = derived(weight, np.zeros(place.shape, STORED_DTYPES[weight.dtype]))
    return found


FORMAT = HeadFormat(
    recognises=lambda fields, names: "medusa_num_heads" in fields.raw or is_medusa(names),
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, target_name, _: hf_config(config, target_name),
    file=MEDUSA,
)
