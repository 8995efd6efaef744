"""Weights that a checkpoint stores in eight bits, and their scales.

A checkpoint has the scales of ``model.layers.0.mlp.down_proj.weight`` in the tensor ``....down_proj.weight_scale``. They
become the parameter ``layers.0.mlp.down.scale``. Weights are read as they are stored, bit for bit."""

import dataclasses
import math
from collections.abc import Callable, Container, Iterable, Mapping

from jspec.checkpoints.files.fp8_numbers import FP8Numbers
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, Tensor
from jspec.checkpoints.quantized.format import StoredFormats, scales_of_channels
from jspec.checkpoints.quantized.scaled import Scaled
from jspec.checkpoints.tensors.layout import PREFIX, Layout
from jspec.checkpoints.tensors.names import OUTPUT_HEAD, Placement, tensor_table
from jspec.checkpoints.tensors.parts import modules_of_parts
from jspec.config import ModelConfig
from jspec.config.model import count
from jspec.config.model_fields import PLAIN_HEAD
from jspec.config.tensor_names import names_of
from jspec.quantization.formats import INSTEAD

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


def with_stored_quantization(
    config: ModelConfig, stored: StoredFormats, called: Callable[[str], tuple[str, ...]]
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
        what = stored.form.name if isinstance(stored, Scaled) else stored.summary
        raise Refusal(
            f"{stored.where}: quantization_config says that the weights are {what}, which is not read of "
            f"{config.architecture}, whose experts are in one tensor; {INSTEAD}"
        )
    if not isinstance(stored, Scaled):
        return config
    # An embedding is no linear map, so it is never quantised, and neither is an output head that is tied to it.
    others = PLAIN_HEAD if config.tie_embeddings else ()
    quantized = dataclasses.replace(config, quantization=stored.form.name, other_formats=others)
    if _HEAD in _plain(quantized, stored, called):
        quantized = dataclasses.replace(quantized, other_formats=PLAIN_HEAD)
    return config if any(name != _HEAD for name in _plain(quantized, stored, called)) else quantized


def _plain(quantized: ModelConfig, stored: Scaled, called: Callable[[str], tuple[str, ...]]) -> list[str]:
    """The names of the linear maps that are not quantised, by config.json, of those that are in a model of the config
    ``quantized``; other arguments as for ``with_stored_quantization``."""
    scales, modules = quantized.stored_params(), modules_of_parts(quantized)
    maps = [name.removesuffix(".weight") for name, at in tensor_table(quantized).items() if at.param in scales]
    maps = list(dict.fromkeys(modules.get(name, name) for name in maps))
    return [name for name in maps if not stored.includes(called(name))]


def holds_otherwise(config: ModelConfig, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the files hold a weight of a layer with scales that a model of ``config`` does not quantise, such as a router,
    or the betas and decays of a gated delta net; or one in floats and without scales that such a model quantises.

    Args:
      config: the model's config, with quantisation.
      tensors: those in the files, by name.
    """
    params, modules, end = config.stored_params(), modules_of_parts(config), ".weight"
    for tensor, at in tensor_table(config).items():
        module = tensor.removesuffix(end)
        name = modules.get(module, module) + end
        if at.param not in params:
            if at.param.startswith("layers.") and f"{name}_scale" in tensors:
                return True
            continue
        for called in (name, name.removeprefix(PREFIX)):
            in_floats = called in tensors and tensors[called].dtype in FLOAT_DTYPES
            if in_floats and tensors.keys().isdisjoint((f"{called}_scale", f"{called}_scale_inv")):
                return True
    return False


def with_scales(layout: Layout, stored: Scaled, where: str) -> Layout:
    """``layout`` with the tensors that hold the scales of its quantised weights.

    Args:
      layout: that of a language model whose config says what is quantised.
      stored: what config.json says of its weights.
      where: the folder, for messages.

    Raises:
      Refusal: scales have a shape that they cannot have, or count for blocks of a weight.
    """
    params, table, tensors = layout.config.stored_params(), {}, dict(layout.tensors)
    for name, at in layout.table.items():
        table[name] = at
        if at.param not in params:
            continue
        scale, channels = f"{name}_scale", at.shape[0]
        if name in tensors:
            tensors[name] = FP8Numbers.of(tensors[name])
        table[scale] = Placement(params[at.param].names["scale"], at.start, (channels,))
        inverse = tensors.get(f"{scale}_inv")
        if stored.block[0] is None and scale not in tensors and inverse is not None and math.prod(inverse.shape) == 1:
            # What transformers calls the scale of a weight, and Ministral 3 with it, is the scale all the same.
            tensors[scale] = tensors.pop(f"{scale}_inv")
        if f"{scale}_inv" in tensors:
            raise Refusal(f"{where}: tensor '{scale}_inv' holds scales of blocks, expected {scale!r}; {INSTEAD}")
        if scale in tensors:
            tensors[scale] = _scales(tensors[scale], channels, stored, where)
    left_out, notes = scales_left_out(tensors, table)
    note = f"the {stored.form.name} weights and their scales are kept as they are stored"
    return dataclasses.replace(
        layout,
        table=table,
        tensors=tensors,
        left_out=layout.left_out | left_out,
        notes=(*layout.notes, note, *notes),
        holds_scales=True,
    )


def scales_left_out(
    names: Iterable[str], table: Container[str], *, of_cache_alone: bool = False
) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names of tensors that hold scales of activations or of the cache, and a note that says how many are left out.

    Args:
      names: of the tensors in the files.
      table: names of those that the model needs.
      of_cache_alone: whether those of activations are none of them.

    Returns:
      both empty if there are none.
    """
    ends, what = (_CACHE, "the cache") if of_cache_alone else (_ACTIVATIONS, "activations or of the cache")
    scales = frozenset(name for name in names if name not in table and name.endswith(ends))
    note = f"no parameters of the model: {count(len(scales), 'scale')} of {what}"
    return scales, (note,) if scales else ()


def without_cache_scales(layout: Layout) -> Layout:
    """``layout``, of a model whose weights are not quantised, without the scales of its cache, which may be."""
    scales, notes = scales_left_out(layout.tensors, layout.table, of_cache_alone=True)
    return dataclasses.replace(layout, left_out=layout.left_out | scales, notes=(*layout.notes, *notes))


def _scales(tensor: Tensor, channels: int, stored: Scaled, where: str) -> Tensor:
    """The tensor of scales ``tensor``, of a weight with ``channels`` output channels."""
    shapes = stored.shapes_of_scales(channels, 1)
    if tensor.shape not in shapes:
        raise Refusal(
            f"{where}/{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}: expected {list(shapes[0])}, "
            f"a scale for each {stored.each}; fetch it again"
        )
    return scales_of_channels(tensor, channels, stored.form.scales == "nonzero")
