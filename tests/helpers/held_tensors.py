"""Tensors of a checkpoint that are in memory, and what jspec reads of them."""

import pathlib

import ml_dtypes
import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config import read_quantization
from jspec.checkpoints.quantized.format import BlockFormat, WeightTensors

DTYPES = {np.dtype(ml_dtypes.float8_e4m3fn): "float8_e4m3fn"}  # other names are those of NumPy


class Held(Tensor):
    """A tensor that is in memory."""

    def __init__(self, name: str, values: np.ndarray):
        dtype = DTYPES.get(values.dtype, str(values.dtype))
        super().__init__(name, "model.safetensors", pathlib.Path("model.safetensors"), values.shape, dtype)
        object.__setattr__(self, "values", values)

    def read_part(self, index) -> np.ndarray:
        return self.values[index]


def read(config: dict, parts: dict[str, np.ndarray], shape: tuple[int, int] = (64, 96)) -> np.ndarray:
    """What jspec makes of the stored tensors of a map, float32 ``[out, in]``."""
    stored = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert isinstance(stored, BlockFormat)
    tensors = {end: Held(f"map{end}", array) for end, array in parts.items()}
    return stored.weight("map.weight", shape, WeightTensors("map", tensors, "folder")).read()
