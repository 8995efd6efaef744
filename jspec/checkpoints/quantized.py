"""The shapes and dtypes of the parameters in a converted folder, of which some may be quantised."""

import numpy as np

from jspec.checkpoints.tensor import NUMPY_DTYPES
from jspec.config import ModelConfig
from jspec.heads import HeadConfig
from jspec.models.quantized import STORED


def stored_params(config: ModelConfig | HeadConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Parameter name -> (shape, dtype) in a converted folder, including the scales of quantised parameters.

    Args:
      config: the config of the language model or the draft head.
      dtype: the dtype of the parameters that are neither quantised nor integers.
    """
    shapes, own = config.param_shapes(), config.param_dtypes()
    params = {n: (shape, np.dtype(own[n]) if n in own else NUMPY_DTYPES[dtype]) for n, shape in shapes.items()}
    for name, scale in config.scale_names().items():
        assert config.quantization is not None
        params[name] = shapes[name], STORED[config.quantization]
        params[scale] = shapes[name][:1], np.dtype(np.float32)
    return params
