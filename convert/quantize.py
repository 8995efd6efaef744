"""Quantises the parameters of a language model or a draft head, one weight at a time; the format is that of
``jspec.models.quantization``.

Weights that a checkpoint holds in that format already are taken from it as they are."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from convert.checkpoint import LazyArray
from convert.chunks import chunk_shapes
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.tensors.params import stored_params
from jspec.models.quantization import quantize


def quantized(source: HuggingFaceModel, quantization: str) -> HuggingFaceModel:
    """``source`` with a config that says that the weights are quantised to ``int8``, ``fp8`` or ``int4``.

    Raises:
      Refusal: its weights are quantised already, and not in blocks of FP8, which are dequantised first.
    """
    if source.layout.dequantized_instead is not None:
        source = dataclasses.replace(source, layout=source.layout.dequantized_instead)
    config = source.config
    if source.layout.holds_scales:
        raise Refusal(
            f"{source.folder.given}: quantize={quantization!r}: expected None, because its weights are "
            f"{config.formats} already (quantization_config); convert it as it is, or quantise its bfloat16 copy"
        )
    config = config.with_quantization(quantization)
    return dataclasses.replace(source, layout=dataclasses.replace(source.layout, config=config))


def lazy_params(source: HuggingFaceModel, dtype: str) -> dict[str, LazyArray]:
    """Name -> array, for every parameter of the converted folder, scales included; each is made when it is written.

    Args:
      source: the open Hugging Face folder.
      dtype: the dtype of the parameters that are neither quantised nor integers.
    """
    makers = {name: functools.partial(source.param, name, dtype) for name in source.shapes}
    pending = {} if source.layout.holds_scales else source.config.stored_params()
    for name, param in pending.items():
        makers |= _pair(source, name, param.names["scale"])
    stored = stored_params(source.config, dtype)
    chunks = chunk_shapes(source.config, stored)
    return {name: LazyArray(shape, kind, makers[name], chunks[name]) for name, (shape, kind) in stored.items()}


def quantized_param(source: HuggingFaceModel, name: str) -> tuple[np.ndarray, np.ndarray]:
    """``(weight, scale)`` of a quantised parameter, as ``jspec.models.quantization.quantize`` returns them.

    It is quantised from the values on disk in a dtype that holds them exactly, so the weights are rounded only once. If
    the files hold it in eight bits, it is as it is stored.

    Raises:
      Refusal: the parameter has NaN or infinity.
    """
    stored, weight = source.config.stored_params()[name], source.param(name, source.exact_dtype)
    if source.layout.holds_scales:
        return weight, source.param(stored.names["scale"], source.exact_dtype)
    quantization = stored.form.name
    if not np.isfinite(weight).all():
        raise Refusal(
            f"{source.folder.given}: parameter {name!r} has NaN or infinity, which {quantization} weights cannot hold; "
            "convert it without quantize"
        )
    return quantize(weight, quantization)


def _pair(source: HuggingFaceModel, name: str, scale: str) -> dict[str, Callable[[], np.ndarray]]:
    """``make`` functions for the arrays of a quantised weight and its scale, by name.

    The first one that is called quantises the weight and keeps the other's array until that is called."""
    kept: dict[str, np.ndarray] = {}

    def make(param: str) -> np.ndarray:
        if param not in kept:
            kept[name], kept[scale] = quantized_param(source, name)
        return kept.pop(param)

    return {param: functools.partial(make, param) for param in (name, scale)}
