"""Multi-token prediction layers (DeepSeek-V3, 2024): in the target's own checkpoint, or alone.

In the target's checkpoint they stand behind its last layer: ``model.layers.61.*`` of DeepSeek-V3, which has layers 0 to 60.
Whoever asks for them (``HeadOptions.mtp``) gets them; otherwise that checkpoint is a language model. Alone they have the
layout of SGLang's ``export_deepseek_nextn``: the class of config.json ends with ``NextN``, and the layers begin with
``model.layers.0``. Each layer repeats the target's embedding and output head, which are not loaded."""

import dataclasses
from typing import Any

from jspec._validation import require
from jspec.checkpoints.dequantize.fp8 import FP8Blocks
from jspec.checkpoints.dequantize.layout import dequantized, stored_shapes, with_note
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.heads.format import HeadFormat
from jspec.checkpoints.heads.layers import layer_fields, refuse_draft_vocabulary, require_no_windows
from jspec.checkpoints.heads.options import HeadOptions
from jspec.checkpoints.heads.quantized import names_of_weights
from jspec.checkpoints.huggingface.config import decoder_config, stored_quantization
from jspec.checkpoints.huggingface.kept_weights import with_kept_weights
from jspec.checkpoints.huggingface.names import renamed, tensor_table
from jspec.checkpoints.huggingface.parts import rearrange, rearranged_tensors
from jspec.checkpoints.layout import PREFIX, Layout, mtp_mark
from jspec.config.heads import MTPConfig, mtp_layers

ALONE = "NextN"
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's weights


def read(folder: Folder, fields: Fields, tensors: dict[str, Tensor], options: HeadOptions) -> Layout:
    """The ``Layout`` of the multi-token prediction layers in a folder.

    Raises:
      Refusal: it holds none.
    """
    alone = is_alone(fields)
    target = decoder_config(folder, _of_target(fields) if alone else fields)
    first = 0 if alone else target.num_layers
    count = target.num_layers if alone else target.mtp_layers
    if mtp_mark(first) not in names_of_weights(tensors):
        raise Refusal(
            f"{folder.given}: holds no multi-token prediction layers (tensor {mtp_mark(first)!r}), which draft='mtp' asks "
            "for; give another draft"
        )
    config = options.of_mtp(MTPConfig(mtp_layers(target, count)))
    places = {f"layers.{i}.": f"{PREFIX}layers.{first + i}." for i in range(count)}
    table, prefixes = renamed(tensor_table(config), places), tuple(places.values())
    copies, layers = {place + name for place in prefixes for name in COPIES}, range(first, first + count)
    shapes = stored_shapes(table, rearranged_tensors(config.layers, layers, PREFIX))
    replaced = dequantized(tensors, shapes, stored_quantization(fields), folder.given)
    layout = Layout(
        config,
        "multi-token prediction layers",
        table,
        rearrange(config.layers, replaced.tensors, layers, PREFIX),
        left_out=frozenset(name for name in tensors if name in copies or not name.startswith(prefixes)),
    )
    layout, stored = with_note(layout, replaced), stored_quantization(fields)
    return with_kept_weights(layout, stored) if isinstance(stored, FP8Blocks) and replaced.note else layout


def is_alone(fields: Fields) -> bool:
    """Whether config.json is that of multi-token prediction layers without their target."""
    names = fields.raw.get("architectures")
    return isinstance(names, list) and len(names) == 1 and str(names[0]).endswith(ALONE)


def _of_target(fields: Fields) -> Fields:
    """The config.json ``fields`` of layers alone, as one of a language model that has only these."""
    [name] = fields.raw["architectures"]
    own = {"architectures": [str(name).removesuffix(ALONE)], "num_nextn_predict_layers": 0}
    every_layer_has_experts = {"mlp_layer_types": None, "first_k_dense_replace": 0}
    return dataclasses.replace(fields, raw={**fields.raw, **own, **every_layer_has_experts})


def hf_config(config: MTPConfig) -> dict[str, Any]:
    """The config.json of layers alone, which are Llama's.

    Raises:
      ValueError: it cannot state ``config``.
    """
    require_no_windows(config.layers)
    refuse_draft_vocabulary(config)
    plain = config.norm_output and not config.mask_first
    require(plain, "norm_output", config.norm_output, "True, and mask_first=False: no layout states anything else")
    return {**layer_fields(config.layers), "architectures": [f"{config.layers.architecture}{ALONE}"]}


FORMAT = HeadFormat(
    recognises=lambda fields, _: is_alone(fields),
    read=read,
    write_config=lambda config, *_: hf_config(config),
    write_tensors=lambda tensors: {PREFIX + name: array for name, array in tensors.items()},
)
