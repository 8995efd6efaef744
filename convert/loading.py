"""A folder as config and params in memory: a Hugging Face folder, or one that ``convert`` wrote."""

import os

import numpy as np

from convert.checkpoint import load_params
from convert.folder import Folder
from convert.hf_config import read_config
from convert.manifest import PARAMS, is_converted, read_manifest
from convert.names import param_shapes, tensor_table
from convert.refusal import Refusal
from convert.source import NUMPY_DTYPES, open_source
from jspec._arguments import require
from jspec.config import ModelConfig


def load_folder(path: str | os.PathLike, dtype: str | None = None) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Config and params of a checkpoint folder, on the host.

    Args:
      path: a folder with config.json and safetensors, or one that ``convert`` wrote.
      dtype: ``float32`` or ``bfloat16`` (rounded to nearest even); None takes the converted folder's own, or the
        narrower of the two that holds every tensor exactly.

    Returns:
      the architecture, and dotted name -> array as ``jspec.models.params.build`` takes them.

    Raises:
      Refusal: one sentence with the file and the reason.
    """
    require(dtype is None or dtype in NUMPY_DTYPES, "dtype", dtype, f"None or one of {', '.join(NUMPY_DTYPES)}")
    if is_converted(path):
        return _load_converted(Folder(path), dtype)
    source = open_source(path)
    source.require_match()
    chosen = dtype or source.exact_dtype
    return source.config, {name: source.param(name, chosen) for name in source.shapes}


def _load_converted(folder: Folder, dtype: str | None) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    manifest, config = read_manifest(folder), read_config(folder)
    stored = load_params(folder.root / PARAMS)
    expected = param_shapes(tensor_table(config))
    where = f"{folder.given}/{PARAMS}"
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored or name not in expected:
            state = "missing" if name not in stored else "unknown"
            raise Refusal(f"{where}: parameter {name!r} is {state}; convert the checkpoint again")
        if stored[name].shape != expected[name]:
            raise Refusal(
                f"{where}: parameter {name!r} has shape {list(stored[name].shape)}, "
                f"but config.json asks for {list(expected[name])}"
            )
    target = NUMPY_DTYPES[dtype or manifest["dtype"]]
    return config, {name: stored.pop(name).astype(target, copy=False) for name in expected}
