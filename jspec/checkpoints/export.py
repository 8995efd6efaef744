"""``export_draft`` writes a draft head as a checkpoint in the public layout of its method."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jspec._validation import require
from jspec.checkpoints.files.tensor import NUMPY_DTYPES
from jspec.checkpoints.huggingface.model import param_dtype
from jspec.checkpoints.tensors.names import Placement, tensor_table
from jspec.config.heads import HeadConfig
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
    layout: str | None = None,
):
    """Write a draft head as a checkpoint that vLLM, SGLang and jspec read.

    EAGLE is written in SafeAILab's layout, EAGLE-3 and P-EAGLE in the speculators format, which defines what its layer
    ids mean, layers for multi-token prediction in SGLang's, MLP speculators in ibm-fms', Medusa heads in FasterDecoding's,
    and block drafters in DeepSpec's layout if the anchor drafts or there is a Markov head, otherwise, and with windows or
    causal layers, in z-lab's. ``load_draft`` reads the same config and params back, except for the ids of the begin and end
    of a sequence, which the target decides.

    Args:
      folder: the folder to write to; it is created if it does not exist.
      config: the config of the draft head.
      params: dotted name -> array, as ``load_draft`` returns them.
      target_name: name or path of the target, which some layouts state.
      target_architectures: the ``architectures`` in the target's config.json, which the speculators format states.
      dtype: the dtype of the written weights: ``float32`` or ``bfloat16`` (rounded to nearest even).
      extra: additional keys for config.json. A key that the layout writes itself keeps the layout's value.
      layout: ``native`` or ``speculators``, for methods that are written in both; None is what the method usually has.

    Raises:
      ValueError: the layout cannot state ``config``, or the names and shapes of ``params`` are not those of ``config``.

    Example::

        from convert import load_draft

        config, params = load_draft("path/to/head")
        export_draft(Path("path/to/exported"), config, params, target_name="path/to/target")
    """
    require(dtype in NUMPY_DTYPES, "dtype", dtype, f"one of {', '.join(NUMPY_DTYPES)}")
    require(config.quantization is None, "quantization", config.quantization, "None: these layouts have no scales")
    formats = [entry for entry in map(resolve, entry_of(config).formats) if entry.write_config is not None]
    if not formats:
        raise ValueError(f"config={type(config).__name__}: expected a draft head; PARD is a language model")
    named = {entry.name: entry for entry in reversed(formats)}
    ok = layout in (None, *named)
    require(ok, "layout", layout, f"None or one of {', '.join(named)} for the method {config.method}")
    chosen = formats[0] if layout is None else named[layout]
    written = chosen.write_config(config, target_name, target_architectures)
    _require_params(config, params)
    stored = {name: np.asarray(array).astype(param_dtype(config, name, dtype)) for name, array in params.items()}
    tensors = chosen.write_tensors(to_tensors(tensor_table(config), stored))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder / chosen.file, tensors)
    write_json(folder / "config.json", {**(extra or {}), **written, "torch_dtype": dtype})


def to_tensors(table: Mapping[str, Placement], params: Params) -> dict[str, np.ndarray]:
    """Tensor name -> array, from params under dotted names; a stacked parameter is split into its tensors.

    Example: ``layers.0.attention.qkv.weight`` becomes the weights of ``q_proj``, ``k_proj`` and ``v_proj``."""
    return {name: np.asarray(params[param])[start : start + shape[0]] for name, (param, start, shape) in table.items()}


def save_weights(file: Path, tensors: Mapping[str, np.ndarray]):
    """Write ``tensors`` (name -> array) as a safetensors file.

    Raises:
      OSError: the disk is full or fails.
    """
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    try:
        save_file(arrays, file, metadata={"format": "pt"})
    except SafetensorError as error:  # which tells of the disk in its text alone
        if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), str(file)) from None


def write_json(file: Path, content: Mapping[str, Any]):
    """Write ``content`` as an indented JSON file."""
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _require_params(config: HeadConfig, params: Params):
    expected = config.param_shapes()
    shapes = {name: np.shape(array) for name, array in params.items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise ValueError(f"parameter {name!r} has shape {shapes.get(name)}, expected {expected.get(name)}")
