"""Arguments that explain themselves: checks that name field, value and fix; aliases; a suggestion for a near miss."""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping


def resolve_names(where: str, given: Mapping, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> dict:
    """Return ``given`` under canonical names.

    Raises:
      TypeError: an unknown name (with the nearest known one), or a name given together with its alias.
    """
    known, aliases, resolved = list(known), dict(aliases or {}), {}
    for name, value in given.items():
        canonical = aliases.get(name, name)
        if canonical not in known:
            near = difflib.get_close_matches(name, [*known, *aliases], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise TypeError(f"{where} has no argument {name!r}{hint}")
        if canonical in resolved:
            other = next(n for n in given if n != name and aliases.get(n, n) == canonical)
            raise TypeError(f"{where}: {name!r} and {other!r} are the same argument; give one of them")
        resolved[canonical] = value
    return resolved


def named_arguments(**aliases: str):
    """Class decorator: the constructor accepts ``alias=canonical`` names and suggests a fix for unknown ones.

    The class keeps them as ``aliases``.
    """

    def decorate(cls):
        construct = cls.__init__
        known = [name for name in inspect.signature(construct).parameters if name != "self"]

        @functools.wraps(construct)
        def __init__(self, *args, **kwargs):
            kwargs = resolve_names(cls.__name__, kwargs, known, aliases)
            for name, _ in zip(known, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"{cls.__name__}: {name!r} is given twice, by position and by name")
            construct(self, *args, **kwargs)

        cls.__init__, cls.aliases = __init__, aliases
        return cls

    return decorate


def require(ok: bool, field: str, value, expected: str):
    """Raise a ValueError that names the field, the value and what would be right, unless ``ok``."""
    if not ok:
        raise ValueError(f"{field}={value!r}: expected {expected}")


def is_int(value) -> bool:
    """An integer, numpy's included, but no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value) -> bool:
    """A finite real number, but no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
