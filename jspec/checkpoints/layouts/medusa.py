"""Medusa heads (Cai et al., 2024) without their base model, in the layouts of FasterDecoding, their authors, and vLLM.

Each Medusa head is a chain of residual blocks and an output head. The tensors of Medusa head 2 with one block are

    ==============  =======================  ============================
    part            FasterDecoding           vLLM
    ==============  =======================  ============================
    residual block  ``2.0.linear.weight``    ``blocks.2.layers.0.weight``
    output head     ``2.1.weight``           ``lm_heads.2.weight``
    ==============  =======================  ============================

FasterDecoding's checkpoints of version 2 have no output heads: they use the target's. The blocks in vLLM's layout may
lack biases. The number of Medusa heads is counted from the tensors, because published configs state other numbers."""

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from jspec._validation import require
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import STORED_DTYPES, Tensor, derived
from jspec.checkpoints.huggingface.weights import MEDUSA
from jspec.checkpoints.layouts.format import CheckpointFormat
from jspec.checkpoints.layouts.layers import refuse_draft_vocabulary
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.names import Placement, tensor_table
from jspec.config.heads import MedusaConfig

_FASTER_DECODING = re.compile(r"(\d{1,2})\.(\d{1,2})\.linear\.weight")
_VLLM = re.compile(r"blocks\.(\d{1,2})\.layers\.(\d{1,2})\.weight")
_PREFIX = re.compile(r"medusa_heads?\.")


def is_medusa(names: Iterable[str]) -> bool:
    """Whether any of the tensor names is that of a Medusa head, in either layout."""
    return any(_PREFIX.match(name) or _FASTER_DECODING.fullmatch(name) or _VLLM.fullmatch(name) for name in names)


def read(fields: Fields, tensors: dict[str, Tensor]) -> Layout:
    """The ``Layout`` of a folder with Medusa heads.

    Raises:
      Refusal: the Medusa heads share one output head of their own, cut the vocabulary, lie inside a whole model, or
        contradict config.json.
    """
    tensors = _without_prefix(fields, tensors)
    if fields.flag("original_lm_head"):
        raise fields.refuse(
            "original_lm_head", "null or false: Medusa heads that share an output head are not supported"
        )
    vllm = any(_VLLM.fullmatch(name) for name in tensors)
    block_name = _VLLM if vllm else _FASTER_DECODING
    blocks = [(int(m[1]), int(m[2])) for m in map(block_name.fullmatch, tensors) if m]
    if not blocks:
        raise Refusal(f"{fields.where}: describes Medusa heads, but the files hold none of their residual blocks")
    depth = 1 + max(block for _, block in blocks)
    fields.only("medusa_num_layers", depth, "as many blocks as the tensors of a Medusa head")
    output = tensors.get("lm_heads.0.weight" if vllm else f"0.{depth}.weight")
    config = MedusaConfig(
        vocab_size=fields.integer("vocab_size", None) if output is None else output.shape[0],
        hidden_size=tensors[min(filter(block_name.fullmatch, tensors))].shape[-1],
        num_heads=1 + max(head for head, _ in blocks),
        num_blocks=depth,
        own_head=output is not None,
    )
    if output is not None:
        fields.only("vocab_size", output.shape[0], "the output channels of the output heads")
    if fields.integer("truncated_vocab_size", config.vocab_size) != config.vocab_size:
        expected = f"{config.vocab_size}, the whole vocabulary: Medusa heads that cut it are not supported"
        raise fields.refuse("truncated_vocab_size", expected)
    table = tensor_table(config)
    if not vllm:
        return Layout(config, "Medusa heads", table, tensors)
    table = {_vllm_name(name): placement for name, placement in table.items()}
    return Layout(config, "Medusa heads (vLLM layout)", table, _with_biases(table, tensors))


def _vllm_name(name: str) -> str:
    """The name in vLLM's layout of the tensor that FasterDecoding's layout calls ``name``."""
    index, block, *rest = name.split(".")
    return f"blocks.{index}.layers.{block}.{rest[-1]}" if "linear" in rest else f"lm_heads.{index}.weight"


def hf_config(config: MedusaConfig, target_name: str) -> dict[str, Any]:
    """The config.json of Medusa heads in FasterDecoding's layout.

    Raises:
      ValueError: the Medusa heads have no residual blocks, which the layout cannot state.
    """
    refuse_draft_vocabulary(config)
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
    """``tensors`` under names without the prefix ``medusa_head.`` or ``medusa_heads.``, if they have it."""
    if not any(_PREFIX.match(name) for name in tensors):
        return tensors
    for name in tensors:
        if not _PREFIX.match(name):
            raise Refusal(
                f"{fields.where}: the files hold Medusa heads inside a whole model ({name!r}); put the tensors that begin "
                "with 'medusa_head' into a folder of their own"
            )
    return {_PREFIX.sub("", name, count=1): tensor for name, tensor in tensors.items()}


def _with_biases(table: dict[str, Placement], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors``, with biases of zeros added if the files hold none.

    vLLM's layout has biases only where config.json has ``medusa_fc_bias``; jspec's blocks always have them."""
    completed = dict(tensors)
    if any(name in tensors for name in table if name.endswith(".bias")):
        return completed
    for name, placement in table.items():
        weight = tensors.get(name.removesuffix("bias") + "weight")
        if name.endswith(".bias") and weight is not None:
            completed[name] = derived(weight, np.zeros(placement.shape, STORED_DTYPES[weight.dtype]))
    return completed


FORMAT = CheckpointFormat(
    recognises=lambda fields, names: "medusa_num_heads" in fields.raw or is_medusa(names),
    read=lambda _, fields, tensors, __: read(fields, tensors),
    write_config=lambda config, target_name, _: hf_config(config, target_name),
    file=MEDUSA,
    classes=("MedusaModel",),
    names_target=True,
)
