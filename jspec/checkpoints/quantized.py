"""Which parameters of a converted folder are quantised, and what every parameter is stored as."""

import numpy as np

from jspec.checkpoints.source import param_dtype
from jspec.config import ModelConfig
from jspec.heads import HeadConfig, decoder_of
from jspec.models.quantized import STORED

EMBEDDING = "embedding"
Shapes = dict[str, tuple[int, ...]]


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
