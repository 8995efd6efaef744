"""The configs and the params in checkpoint folders, from Hugging Face or converted."""

import os
from typing import Any

import numpy as np

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import HeadOptions
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig

Params = dict[str, np.ndarray]


def load_folder(path: str | os.PathLike, dtype: str | None = None) -> tuple[ModelConfig, Params]:
    """The config and the params of a language model, in host memory.

    Args:
      path: a folder with config.json and safetensors, or one that ``convert`` wrote.
      dtype: as for ``Checkpoint.params``.

    Returns:
      the config, and dotted name -> array as ``jspec.models.params.build`` takes them.

    Raises:
      Refusal: one sentence with the file and the reason.

    Example::

        config, params = load_folder("path/to/target", dtype="bfloat16")
        print(config.num_layers, params["embedding.weight"].shape)
    """
    config, params = Checkpoint.open(path).language_model(dtype)
    return config, dict(params)


def load_draft(
    path: str | os.PathLike,
    dtype: str | None = None,
    aux_convention: str | None = None,
    norm_output: str | None = None,
    mask_token_id: int | None = None,
    mask_first: bool | None = None,
    mtp: bool = False,
) -> tuple[ModelConfig | HeadConfig, Params]:
    """The config and the params of a draft model or a draft head, in host memory.

    Args:
      path, dtype: as for ``load_folder``.
      aux_convention: what the layer ids of an EAGLE-3 head mean: ``input_of`` or ``output_of`` these layers. Needed
        when the checkpoint lists ids in a native layout, which does not say.
      norm_output: what its ``norm_output`` means: that the normed output is fed back (``recycled``), or that the output
        head reads it (``before_head``). Needed when a native layout has that key.
      mask_token_id: the token of a P-EAGLE head's mask slots. Needed when config.json does not name it.
      mask_first, mtp: see ``HeadOptions``.

    Returns:
      the config, whose class says which method it is for, and dotted name -> array as ``jspec.models.params.build`` or
      ``build_head`` takes them.

    Raises:
      Refusal: one sentence with the file and the reason.

    Example::

        config, params = load_draft("path/to/eagle3")
        print(config.method, sum(array.size for array in params.values()))
    """
    options = HeadOptions(aux_convention, norm_output, mask_token_id, mask_first, mtp)
    checkpoint = Checkpoint.open(path, options)
    params = checkpoint.params(dtype)
    return checkpoint.config, dict(params)


def read_draft_config(path: str | os.PathLike, **options: Any) -> ModelConfig | HeadConfig:
    """The config that ``load_draft`` would return; the arguments and errors are the same."""
    return Checkpoint.open(path, HeadOptions(**options)).config


def verifier_of(path: str | os.PathLike) -> str | None:
    """As ``Checkpoint.target_name``, of the folder ``path``."""
    return Checkpoint.open(path).target_name
