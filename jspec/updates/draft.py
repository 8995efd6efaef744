"""``draft_of``: the module of a draft model or draft head with new weights."""

from collections.abc import Mapping
from typing import Any

import jax

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.kinds import recognise
from jspec.config.param_specs import Declared
from jspec.models import build_head
from jspec.models.sharding import build_model, mesh_of, on_every_device
from jspec.updates.named import NamedArrays, Names, decoder_tensors, params_as_tensors
from jspec.updates.rounding import ROUNDED, rounded
from jspec.updates.target import few


def draft_of(
    old: Any, checkpoint: Checkpoint | None, given: Mapping[str, Any], names: Names, dtype: str, mesh_shards: Any
) -> Any:
    """A module like ``old``, which drafts, with other weights.

    Args:
      old: the module.
      checkpoint: what it was loaded from, which says what the tensors of a draft head are called; None if it was not.
      given: name -> array.
      names: as for ``LLM.update_weights``. Parameters that ``old`` borrows from its target may be among them.
      dtype: of the engine.
      mesh_shards: the target's shards; None on one device.

    Raises:
      ValueError: a weight is missing, unknown, of another shape or dtype, or not finite, or ``old`` has none.
    """
    config: Any = getattr(old, "config", None)
    if not isinstance(config, Declared):
        raise ValueError("draft was given, but this model has no drafter with weights; leave it out")
    named = _named(config, checkpoint, given, names)
    params, needed, borrowed = {}, config.param_shapes(), {name for _, name in getattr(config, "borrowable", ())}
    lacking = [name for name in named.missing if named.layout.table[name].param in needed]
    if named.unknown or lacking:
        wrong = f"has {few(named.unknown)}, which is no part" if named.unknown else f"lacks {few(lacking)}, a part"
        raise ValueError(f"draft {wrong} of {type(config).__name__}")
    stored = config.stored_params()
    for param in named.tensors_of:
        if param not in needed:
            if param not in borrowed:
                raise ValueError(f"draft has {param!r}, which the draft of this model has not")
            continue
        whole = named.param(param)
        if whole.dtype.kind != "i" and not bool(jax.numpy.isfinite(whole).all()):
            raise ValueError(f"draft: parameter {param!r} has NaN or infinity; the weights of before stand")
        if param not in stored:
            params[param] = whole
        elif (form := stored[param].form.name) in ROUNDED:
            arrays = jax.jit(rounded, static_argnums=1)(whole, form)
            params |= dict(zip(stored[param].names.values(), arrays, strict=True))
        else:
            raise ValueError(f"draft: parameter {param!r} is in {form}, to which new weights are not rounded")
    return built_like(old, params, dtype, mesh_shards)


def built_like(old: Any, params: Mapping[str, Any], dtype: str, mesh_shards: Any) -> Any:
    """A module like ``old``, which drafts, of params that are stored as its are; the other arguments are as for
    ``draft_of``."""
    config, own = old.config, getattr(old, "shards", None)
    if config.language_model is None:
        module = build_head(config, params, dtype).prepare()
    else:
        module = build_model(config.language_model, params, dtype, own).prepare()
    if mesh_shards is not None and own is None:
        module = on_every_device(module, mesh_of(mesh_shards.count, mesh_shards.axis))
    return module


def _named(config: Any, checkpoint: Checkpoint | None, given: Mapping[str, Any], names: Names) -> NamedArrays:
    if names == "jspec":
        return NamedArrays(given, lambda tensors: params_as_tensors(config, tensors))
    if config.language_model is config:
        return NamedArrays(given, lambda tensors: decoder_tensors(config, names, tensors))
    if checkpoint is None or checkpoint.is_converted or not checkpoint.fields.raw:
        raise ValueError(
            "draft: the names of a draft head's tensors are known from its Hugging Face folder alone; give names='jspec'"
        )
    folder, fields, options = checkpoint.folder, checkpoint.fields, checkpoint.options
    return NamedArrays(given, lambda tensors: recognise(folder, fields, tensors, options))
