"""Cache key of the engine's compiled programs, computed without tracing."""

import dataclasses
import functools
import types
from typing import Any

from jspec.config import EngineConfig
from jspec.drafting.methods import DrafterBuilder
from jspec.engine.decoding import Decoding
from jspec.sampling.verify import RULES


class _UserCode(Exception):
    """User-defined code: its source is not part of the cache key, so nothing is cached."""


def fingerprint(target: Any, draft_model: Any, decoding: Decoding, config: EngineConfig, most: int) -> object | None:
    """An object whose ``repr`` has everything that tracing depends on, but for the code of jspec and the shapes of arrays.

    None if a model, the drafter, the rule or the noise is user-defined.
    """
    make = decoding.make_drafter
    if not isinstance(make, DrafterBuilder):
        return None
    try:
        functions = [_description(part) for part in (make.drafter, RULES[decoding.rule], decoding.noise)]
        models = [_description(type(model)) for model in (target, draft_model) if model is not None]
    except _UserCode:
        return None
    # Arrays of experts have the same shape and place whether experts are sharded whole or in parts.
    configs = [getattr(model, name, None) for model in (target, draft_model) for name in ("config", "shards")]
    return functions, models, configs, make, config, most


def _description(part: Any) -> str:
    """A function, a class, or a callable object: where it is defined, and its fields.

    Raises:
      _UserCode: it is not defined in jspec, or its fields are not in its ``repr``.
    """
    if isinstance(part, functools.partial):
        settings = [*part.args, *(part.keywords[name] for name in sorted(part.keywords))]
        values = [_description(setting) if callable(setting) else repr(setting) for setting in settings]
        return f"{_description(part.func)}({sorted(part.keywords)}, {values})"
    defined = part if isinstance(part, type | types.FunctionType) else type(part)
    fields = "" if defined is part else repr(part)
    closed = getattr(part, "__closure__", None) or (defined is not part and not dataclasses.is_dataclass(part))
    if not defined.__module__.startswith("jspec.") or closed:
        raise _UserCode
    return f"{defined.__module__}.{defined.__qualname__}{fields}"
