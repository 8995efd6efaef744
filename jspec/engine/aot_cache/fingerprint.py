"""What the programs of an engine are made of, told without tracing them."""

import dataclasses
import functools
import types
from typing import Any

from jspec.drafting.methods import DrafterBuilder
from jspec.engine.runner.programs import StepBuilder
from jspec.sampling.verify import RULES


class _NotOurs(Exception):
    """Something whose code is not jspec's: nothing tells that it has not changed."""


def made_of(target: Any, draft_model: Any, builder: StepBuilder) -> object | None:
    """Everything that tracing the programs depends on, but for the code of jspec and the shapes of arrays, as something
    whose ``repr`` says it all.

    None if a model, the drafter, the rule or the noise is not jspec's own.
    """
    make = builder.make_drafter
    if not isinstance(make, DrafterBuilder):
        return None
    try:
        parts = [_told(part) for part in (make.drafter, RULES[builder.verify], builder.noise)]
        models = [_told(type(model)) for model in (target, draft_model) if model is not None]
    except _NotOurs:
        return None
    # Arrays of experts have the same shape and place whether they are dealt to shards whole or in parts.
    configs = [getattr(model, name, None) for model in (target, draft_model) for name in ("config", "shards")]
    return parts, models, configs, make, builder.config, builder.most


def _told(part: Any) -> str:
    """A function, a class, or an object that acts as a function: where it is defined, and what is in it.

    Raises:
      _NotOurs: that is not in jspec, or what is in it cannot be told.
    """
    if isinstance(part, functools.partial):
        settings = [*part.args, *(part.keywords[name] for name in sorted(part.keywords))]
        inside = [_told(setting) if callable(setting) else repr(setting) for setting in settings]
        return f"{_told(part.func)}({sorted(part.keywords)}, {inside})"
    defined = part if isinstance(part, type | types.FunctionType) else type(part)
    inside = "" if defined is part else repr(part)
    closed = getattr(part, "__closure__", None) or (defined is not part and not dataclasses.is_dataclass(part))
    if not defined.__module__.startswith("jspec.") or closed:
        raise _NotOurs
    return f"{defined.__module__}.{defined.__qualname__}{inside}"
