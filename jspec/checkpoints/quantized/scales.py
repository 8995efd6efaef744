"""Weights that a checkpoint stores in eight bits, and their scales.

A checkpoint has the scales of ``model.layers.0.mlp.down_proj.weight`` in the tensor ``....down_proj.weight_scale``. They
become the parameter ``layers.0.mlp.down.scale``. Weights are read as they are stored, bit for bit."""

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping

import numpy as np

from jspec.checkpoints.files.fp8_numbers import FP8Numbers
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, Tensor
from jspec.checkpoints.quantized.config_fields import INSTEAD
from jspec.checkpoints.quantized.format import BlockFormat, read_scales
from jspec.checkpoints.quantized.stored_quantization import StoredQuantization
from jspec.checkpoints.tensors.layout import PREFIX, Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, Placement, tensor_table
from jspec.checkpoints.tensors.parts import modules_of_parts
from jspec.config import ModelConfig
from jspec.config.model import count
from jspec.config.tensor_names import names_of

_HEAD = OUTPUT_HEAD.removesuffix(".weight")
# How the names of tensors end that hold scales of queries, keys and values in a cache of eight bits, or of activations, and
# zeros beside them, which compressed-tensors writes even where all are 0.
_CACHE = (
    *(f".{of}_{what}" for of in ("q", "k", "v", "kv") for what in ("scale", "zero_point")),
    *(".output_scale", ".output_zero_point"),
)
_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".activation_scale",
    *_CACHE,
)


@dataclasses.dataclass(frozen=True)
class Scales(Tensor):
    """The scales of a weight ``[out, in]``, one for each output channel: of shape ``[out]``, and float32 when read.

    Attributes:
      stored: the tensor in the files, with as many numbers, or with one that counts for all output channels.
    """

    stored: Tensor

    def check(self):
        read_scales(self.stored)

    def read(self) -> np.ndarray:
        """The scales.

        Raises:
          Refusal: one of them is zero, negative, NaN or infinite.
        """
        return np.broadcast_to(read_scales(self.stored).reshape(-1), self.shape)


def with_stored_quantization(
    config: ModelConfig, stored: StoredQuantization | BlockFormat, called: Callable[[str], tuple[str, ...]]
) -> ModelConfig:
    """``config`` with the quantisation of the weights in the files; ``config`` itself if they are dequantised when read,
    or only the tensors say which are kept, as in blocks and where some maps of layers are not quantised.

    Args:
      config: the model's config, without quantisation.
      stored: what config.json says of its weights.
      called: module name -> the names that the checkpoint may have for the module.

    Raises:
      Refusal: the files hold the experts of a layer in one tensor.
    """
    if names_of(config.architecture).stacked_maps is not None:
        what = stored.summary if isinstance(stored, BlockFormat) else stored.quantization
        raise Refusal(
            f"{stored.where}: quantization_config says that the weights are {what}, which is not read of "
            f"{config.architecture}, whose experts are in one tensor; {INSTEAD}"
        )
    if isinstance(stored, BlockFormat):
        return config
    # An embedding is no linear map, so it is never quantised, and neither is an output head that is tied to it.
    quantized = dataclasses.replace(config, quantization=stored.quantization, quantized_head=not config.tie_embeddings)
    if _HEAD in _plain(quantized, stored, called):
        quantized = dataclasses.replace(quantized, quantized_head=False)
    return config if any(name != _HEAD for name in _plain(quantized, stored, called)) else quantized


def _plain(quantized: ModelConfig, stored: StoredQuantization, called: Callable[[str], tuple[str, ...]]) -> list[str]:
    """The names of the linear maps that are not quantised, by config.json, of those that are in a model of the config
    ``quantized``; other arguments as for ``with_stored_quantization``."""
    scales, modules = quantized.scale_names(), modules_of_parts(quantized)
    maps = [name.removesuffix(".weight") for name, at in tensor_table(quantized).items() if at.param in scales]
    maps = list(dict.fromkeys(modules.get(name, name) for name in maps))
    return [name for name in maps if not stored.includes(called(name))]


def holds_others(config: ModelConfig, names: Container[str]) -> bool:
    """Whether a layer has a weight with scales that is none of those that are quantised in a model of ``config``, such as a
    router, or the betas and decays of a gated delta net.

    Args:
      config: the model's config, with quantisation.
      names: of the tensors in the files.
    """
    scales, modules, end = config.scale_names(), modules_of_parts(config), ".weight"
    plain = (
        name for name, at in tensor_table(config).items() if at.param not in scales and at.param.startswith("layers.")
    )
    return any(f"{modules.get(name, name)}{end}_scale" in names for name in (one.removesuffix(end) for one in plain))


def holds_plain(config: ModelConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the files hold a weight in floats and without scales that is quantised in a model of ``config``.

    Args:
      config: the model's config, with quantisation.
      tensors: those in the files, by name.
    """
    scales, modules, end = config.scale_names(), modules_of_parts(config), ".weight"
    maps = {name.removesuffix(end) for name, at in tensor_table(config).items() if at.param in scales}
    called = (name for one in maps for name in (modules.get(one, one), modules.get(one, one).removeprefix(PREFIX)))
    return any(
        name + end in tensors
        and tensors[name + end].dtype in FLOAT_DTYPES
        and not {f"{name}{end}_scale", f"{name}{end}_scale_inv"} & tensors.keys()
        for name in called
    )


def with_scales(layout: Layout, stored: StoredQuantization, where: str) -> Layout:
    """``layout`` with the tensors that hold the scales of its quantised weights.

    Args:
      layout: that of a language model whose config says what is quantised.
      stored: what config.json says of its weights.
      where: the folder, for messages.

    Raises:
      Refusal: scales have a shape that they cannot have, or count for blocks of a weight.
    """
    params, table, tensors = layout.config.scale_names(), {}, dict(layout.tensors)
    for name, at in layout.table.items():
        table[name] = at
        if at.param not in params:
            continue
        scale, channels = f"{name}_scale", at.shape[0]
        if name in tensors:
            tensors[name] = FP8Numbers.of(tensors[name])
        table[scale] = Placement(params[at.param], at.start, (channels,))
        if stored.scales == "tensor" and scale not in tensors and _is_number(tensors.get(f"{scale}_inv")):
            # What transformers calls the scale of a weight, and Ministral 3 with it, is the scale all the same.
            tensors[scale] = tensors.pop(f"{scale}_inv")
        if f"{scale}_inv" in tensors:
            raise Refusal(f"{where}: tensor '{scale}_inv' holds scales of blocks, expected {scale!r}; {INSTEAD}")
        if scale in tensors:
            tensors[scale] = _scales(tensors[scale], channels, stored, where)
    left_out, notes = scales_left_out(tensors, table)
    note = f"the {stored.quantization} weights and their scales are kept as they are stored"
    return dataclasses.replace(
        layout,
        table=table,
        tensors=tensors,
        left_out=layout.left_out | left_out,
        notes=(*layout.notes, note, *notes),
        holds_scales=True,
    )


def scales_left_out(names: Iterable[str], table: Container[str]) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of tensors that hold scales of activations or of the cache, and a note that says how many are left out.

    Args:
      names: of the tensors in the files.
      table: names of those that the model needs.

    Returns:
      both empty if there are none.
    """
    scales = frozenset(name for name in names if name not in table and name.endswith(_ACTIVATIONS))
    note = f"no parameters of the model: {count(len(scales), 'scale')} of activations or of the cache"
    return scales, (note,) if scales else ()


def without_cache_scales(layout: Layout) -> Layout:
    """``layout``, of a model whose weights are not quantised, without the scales of its cache, which may be."""
    scales = frozenset(name for name in layout.tensors if name not in layout.table and name.endswith(_CACHE))
    if not scales:
        return layout
    note = f"no parameters of the model: {count(len(scales), 'scale')} of the cache"
    return dataclasses.replace(layout, left_out=layout.left_out | scales, notes=(*layout.notes, note))


def _is_number(tensor: Tensor | None) -> bool:
    """Whether a tensor holds one number."""
    return tensor is not None and math.prod(tensor.shape) == 1


def _scales(tensor: Tensor, channels: int, stored: StoredQuantization, where: str) -> Scales:
    """The tensor of scales ``tensor``, of a weight with ``channels`` output channels."""
    shapes = [(channels, 1), (channels,)] if stored.scales == "channel" else [(1,), (), (1, 1)]
    if tensor.shape not in shapes:
        raise Refusal(
            f"{where}/{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}: expected {list(shapes[0])}, "
            f"a scale for each {'output channel' if stored.scales == 'channel' else 'weight'}; fetch it again"
        )
    return Scales(tensor.name, tensor.file, tensor.path, (channels,), tensor.dtype, tensor)
