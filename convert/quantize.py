"""What quantisation makes of a language model's parameters, one weight at a time; see ``jspec.models.quantized``."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from convert.checkpoint import LazyArray
from convert.refusal import Refusal
from convert.source import Source, param_dtype
from jspec.config import ModelConfig
from jspec.heads import HeadConfig, PardConfig, decoder_of
from jspec.models.quantized import STORED, quantize

EMBEDDING = "embedding"
Shapes = dict[str, tuple[int, ...]]


def quantized(source: Source, quantization: str) -> Source:
    """``source`` with a config that asks for quantised weights.

    Raises:
      Refusal: it is a draft head.
    """
    config = source.config
    if isinstance(config, ModelConfig):
        config = dataclasses.replace(config, quantization=quantization)
    elif isinstance(config, PardConfig):
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization=quantization))
    else:
        raise Refusal(
            f"{source.folder.given}: quantize={quantization!r} is for targets and draft models, and this is a draft head "
            f"({source.layout.label}); convert it as it is"
        )
    return dataclasses.replace(source, layout=dataclasses.replace(source.layout, config=config))


def quantization_of(config: ModelConfig | HeadConfig) -> str | None:
    """``int8``, ``fp8``, or None."""
    decoder = decoder_of(config)
    return None if decoder is None else decoder.quantization


def scale_names(config: ModelConfig | HeadConfig, shapes: Shapes) -> dict[str, str]:
    """Parameter -> the name of its scales, for each of ``shapes`` that ``config`` quantises.

    Those are the linear maps, and an embedding that is the output head as well.
    """
    if quantization_of(config) is None:
        return {}
    names = {name: f"{name.removesuffix('.weight')}.scale" for name, shape in shapes.items() if len(shape) == 2}
    names[EMBEDDING] = "embedding_scale"
    if "head.weight" in names:
        del names[EMBEDDING]
    return names


def stored_params(
    config: ModelConfig | HeadConfig, shapes: Shapes, dtype: str
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Parameter -> shape and dtype in a converted folder, scales included.

    Args:
      config: what the folder holds.
      shapes: of its parameters without scales.
      dtype: of what is not quantised.
    """
    params = {name: (shape, param_dtype(name, dtype)) for name, shape in shapes.items()}
    quantization = quantization_of(config)
    for name, scale in scale_names(config, shapes).items():
        assert quantization is not None
        params[name] = shapes[name], STORED[quantization]
        params[scale] = shapes[name][:1], np.dtype(np.float32)
    return params


def lazy_params(source: Source, dtype: str) -> dict[str, LazyArray]:
    """Every parameter of the folder that ``source`` becomes, made when it is written."""
    makers = {name: functools.partial(source.param, name, dtype) for name in source.shapes}
    for name, scale in scale_names(source.config, source.shapes).items():
        makers |= _pair(source, name, scale)
    stored = stored_params(source.config, source.shapes, dtype)
    return {name: LazyArray(shape, kind, makers[name]) for name, (shape, kind) in stored.items()}


def quantized_param(source: Source, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The parameter ``name``, rounded once, from the numbers on disk, and its scales.

    Raises:
      Refusal: it has NaN or infinity.
    """
    quantization, weight = quantization_of(source.config), source.param(name, source.exact_dtype)
    assert quantization is not None
    if not np.isfinite(weight).all():
        raise Refusal(
            f"{source.folder.given}: parameter {name!r} has NaN or infinity, which {quantization} weights cannot hold; "
            "convert it without quantize"
        )
    return quantize(weight, quantization)


def _pair(source: Source, name: str, scale: str) -> dict[str, Callable[[], np.ndarray]]:
    """Makers of a weight and its scales: the first that is called makes both, and the other's are kept for it."""
    kept: dict[str, np.ndarray] = {}

    def make(one: str) -> np.ndarray:
        if one not in kept:
            kept[name], kept[scale] = quantized_param(source, name)
        return kept.pop(one)

    return {one: functools.partial(make, one) for one in (name, scale)}
