"""The shapes and dtypes of the parameters in a converted folder, of which some may be quantised."""

import numpy as np

from jspec.checkpoints.files.tensor import NUMPY_DTYPES
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig
from jspec.models.quantization import quantized_shapes, scale_dtype, stored_dtype


def stored_params(config: ModelConfig | HeadConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Parameter name -> (shape, dtype) in a converted folder, including the scales of quantised parameters.

    Args:
      config: the config of the language model or the draft head.
      dtype: the dtype of the parameters that are neither quantised nor integers.
    """
    shapes, own = config.param_shapes(), config.param_dtypes()
    params = {n: (shape, np.dtype(own[n]) if n in own else NUMPY_DTYPES[dtype]) for n, shape in shapes.items()}
    scales = config.scale_names()
    for name, kind in config.quantizations().items():
        of_weight, of_scale = quantized_shapes(shapes[name], kind)
        params[name], params[scales[name]] = (of_weight, stored_dtype(kind)), (of_scale, scale_dtype(kind))
    for name, shape, dtype in config.companions().values():
        params[name] = shape, np.dtype(dtype)
    return params
