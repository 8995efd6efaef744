"""Arguments that explain themselves: checks that name field, value and fix; aliases; what a foreign name means here."""

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping

from jspec._foreign_names import FOREIGN_NAMES

LARGEST_INT = 2**31 - 1  # what an int32 on the device holds
LARGEST_NUMBER = 1e30  # its reciprocal is a normal float32 too


def resolve_names(
    where: str,
    given: Mapping,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> dict:
    """Return ``given`` under canonical names.

    Args:
      where: what was called, for the message.
      given: arguments by the names that the caller used.
      known: canonical names.
      aliases: other names -> canonical names.
      elsewhere: names that belong to another function of jspec -> a sentence that says to which.

    Raises:
      TypeError: an unknown name, with what it means here if other libraries have it, else with the nearest known one;
        or a name given together with its alias.
    """
    known, aliases, resolved = list(known), dict(aliases or {}), {}
    for name, value in given.items():
        canonical = aliases.get(name, name)
        if canonical not in known:
            raise TypeError(f"{where} has no argument {name!r}{_hint(name, known, aliases, elsewhere or {})}")
        if canonical in resolved:
            other = next(n for n in given if n != name and aliases.get(n, n) == canonical)
            raise TypeError(f"{where}: {name!r} and {other!r} are the same argument; give one of them")
        resolved[canonical] = value
    return resolved


def _hint(name: str, known: list[str], aliases: dict[str, str], elsewhere: Mapping[str, str]) -> str:
    sentence = elsewhere.get(name) or FOREIGN_NAMES.get(name)
    if sentence is not None:
        return f": {sentence}"
    near = difflib.get_close_matches(name, [*known, *aliases], n=1) or difflib.get_close_matches(name, elsewhere, n=1)
    if not near:
        return f"; known are {', '.join(sorted(known))}"
    return f"; did you mean {near[0]!r}?" + (f" ({elsewhere[near[0]]})" if near[0] in elsewhere else "")


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
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond what a float can be
        return False
