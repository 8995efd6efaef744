"""From a checkpoint folder to the module of a draft, for a target that is loaded already."""

import dataclasses
import pathlib

import numpy as np

from convert.loading import load_draft
from jspec.config import ModelConfig
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig
from jspec.models import Decoder, build, build_head


def load_draft_module(path: pathlib.Path, dtype: str, aux_convention: str | None, target: Decoder):
    """(config, module) of what drafts, ready to serve.

    A head that has the target's embedding or output head over again borrows them instead.
    """
    config, params = load_draft(path, dtype, aux_convention)
    if isinstance(config, ModelConfig):
        return config, build(config, params, dtype)
    config = _borrow(config, params, target)
    head = build_head(config, params, dtype)
    return config, head.prepare() if isinstance(config, Eagle3Config) else head


def _borrow(config: HeadConfig, params: dict, target: Decoder) -> HeadConfig:
    """``config`` without the copies that ``params`` holds of the target's weights; they are taken out of ``params``."""
    if isinstance(config, EagleConfig | Eagle3Config) and config.own_embedding:
        if _same(params["embedding"], target.embedding[...]):
            del params["embedding"]
            config = dataclasses.replace(config, own_embedding=False)
    if isinstance(config, Eagle3Config) and config.own_head and not config.reduced:
        theirs = target.embedding[...] if target.head is None else target.head.weight[...]
        if _same(params["head.weight"], theirs):
            del params["head.weight"]
            config = dataclasses.replace(config, own_head=False)
    return config


def _same(ours, theirs) -> bool:
    return ours.shape == theirs.shape and np.array_equal(ours, np.asarray(theirs))
