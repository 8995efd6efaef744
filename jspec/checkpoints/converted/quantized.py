"""The shapes and dtypes of the parameters in a converted folder, of which some may be quantised."""

import numpy as np

from jspec.checkpoints.files.tensor import NUMPY_DTYPES, STORED_DTYPES
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig


def stored_params(config: ModelConfig | HeadConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Parameter name -> (shape, dtype) in a converted folder, including the scales of quantised parameters.

    Args:
      config: the config of the language model or the draft head.
      dtype: the dtype of the parameters that are neither quantised nor integers.
    """
    shapes, own = config.param_shapes(), config.param_dtypes()
    params = {n: (shape, np.dtype(own[n]) if n in own else NUMPY_DTYPES[dtype]) for n, shape in shapes.items()}
    for stored in config.stored_params().values():
        params |= {name: (array.shape, STORED_DTYPES[array.dtype]) for name, array in stored.arrays.items()}
    return params
