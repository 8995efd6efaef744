"""Params as a checkpoint in the public layout of their method, the inverse of ``load_draft``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jspec._arguments import require
from jspec.checkpoints.names import Placement, tensor_table
from jspec.checkpoints.source import NUMPY_DTYPES, param_dtype
from jspec.heads import HeadConfig
from jspec.registry import entry_of, resolve

Params = Mapping[str, jax.typing.ArrayLike]


def export_draft(
    folder: Path,
    config: HeadConfig,
    params: Params,
    *,
    target_name: str,
    target_architectures: Sequence[str] = (),
    dtype: str = "bfloat16",
    extra: Mapping[str, Any] | None = None,
):
    """Write a draft head for vLLM, SGLang or jspec to read.

    EAGLE goes into SafeAILab's layout, EAGLE-3 and P-EAGLE into the speculators format, which states what its layer ids
    mean, an MLP speculator into ibm-fms' and Medusa into FasterDecoding's. ``load_draft`` reads back the same config
    and params, up to what the target decides: end and begin of sequence.

    Args:
      folder: where to write, created if need be.
      config: the head.
      params: dotted name -> array, as ``load_draft`` returns them.
      target_name: name or path of the target, for the layouts that state it.
      target_architectures: of the target's config.json, for the speculators format.
      dtype: of the weights: ``float32`` or ``bfloat16`` (rounded to nearest even).
      extra: more keys for config.json.

    Raises:
      ValueError: ``config`` has no place in its method's layout, or ``params`` are not those of ``config``.
    """
    require(dtype in NUMPY_DTYPES, "dtype", dtype, f"one of {', '.join(NUMPY_DTYPES)}")
    formats = [found for found in map(resolve, entry_of(config).formats) if found.write_config is not None]
    if not formats:
        raise ValueError(f"config={type(config).__name__}: expected a draft head; PARD is a language model")
    written = formats[0].write_config(config, target_name, target_architectures)
    _require_params(config, params)
    stored = {name: np.asarray(array).astype(param_dtype(config, name, dtype)) for name, array in params.items()}
    tensors = formats[0].write_tensors(to_tensors(tensor_table(config), stored))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder / formats[0].file, tensors)
    write_json(folder / "config.json", {**(extra or {}), **written, "torch_dtype": dtype})


def to_tensors(table: Mapping[str, Placement], params: Params) -> dict[str, np.ndarray]:
    """Params (dotted names) under the names of ``table``, the stacked ones parted."""
    return {name: np.asarray(params[param])[start : start + shape[0]] for name, (param, start, shape) in table.items()}


def save_weights(file: Path, tensors: Mapping[str, np.ndarray]):
    """``tensors`` as a safetensors file."""
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, file, metadata={"format": "pt"})


def write_json(file: Path, content: Mapping[str, Any]):
    """``content`` as a readable JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _require_params(config: HeadConfig, params: Params):
    expected = config.param_shapes()
    found = {name: np.shape(array) for name, array in params.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(f"parameter {name!r} has shape {found.get(name)}, expected {expected.get(name)}")
