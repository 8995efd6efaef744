"""Argument checks whose errors name field, value and fix, and the resolution of aliases and of other libraries' names."""

import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping

from jspec._foreign_names import FOREIGN_NAMES

# Errors that a command reports in one sentence with exit code 2: mistakes in its arguments or in a checkpoint.
MISTAKES = (ValueError, TypeError, MemoryError, OSError)
LARGEST_INT = 2**31 - 1  # the largest int32
LARGEST_NUMBER = 1e30  # both it and its reciprocal are normal float32 numbers


def resolve_names(
    where: str,
    given: Mapping,
    known: Iterable[str],
    aliases: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> dict:
    """The arguments ``given``, under their canonical names.

    Args:
      where: the function that was called, for the message.
      given: name -> value, by the names that the caller used.
      known: the canonical names.
      aliases: alias -> canonical name.
      elsewhere: name of an argument of another jspec function -> a sentence that says which function.

    Raises:
      TypeError: a name is unknown, or given together with its alias. For an unknown name that other libraries have, the
        message says what it is called here; for others it has the most similar known name.
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
    """A class decorator: the constructor takes aliases too, and suggests a name for an unknown one.

    ``@named_arguments(max_new_tokens="max_tokens")`` lets a caller write ``max_new_tokens=`` for ``max_tokens=``. The class
    gets the aliases as its attribute ``aliases``.
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
    """Raise a ValueError that names the field, the value and what would be right, unless ``ok``. Of a record the message has
    the class alone, and of other long values the beginning."""
    if not ok:
        shown = f"{type(value).__name__}(...)" if dataclasses.is_dataclass(value) else repr(value)
        raise ValueError(f"{field}={shown if len(shown) <= 200 else f'{shown[:197]}...'}: expected {expected}")


def require_packages(extra: str, *names: str):
    """Raise a ValueError unless these packages are installed, as ``pip install 'jspec[extra]'`` does."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed: expected what pip install 'jspec[{extra}]' installs")


class FieldChecks:
    """Checks of an object's fields, whose errors name the field, the value that it has, and what would be right.

    Args:
      owner: the object.
      part: what errors have before the names of its fields: ``experts.``, for example.
    """

    def __init__(self, owner, part: str = ""):
        self._owner, self._part = owner, part

    def require(self, name: str, ok: bool, expected: str):
        """Raise a ValueError unless ``ok``, as the function ``require`` does."""
        require(ok, f"{self._part}{name}", getattr(self._owner, name), expected)

    def sizes(self, *names: str, expected: str = "an integer of at least 1"):
        """Raise a ValueError unless each of the fields is an integer of at least 1 and below 2^31."""
        for name in names:
            value = getattr(self._owner, name)
            self.require(name, is_int(value) and 1 <= value < 2**31, expected)

    def flags(self, *names: str):
        """Raise a ValueError unless each of the fields is True or False."""
        for name in names:
            self.require(name, isinstance(getattr(self._owner, name), bool), "True or False")

    def positive(self, *names: str):
        """Raise a ValueError unless each of the fields is a positive number."""
        for name in names:
            value = getattr(self._owner, name)
            self.require(name, is_number(value) and value > 0, "a positive number")


def is_text(value) -> bool:
    """Whether ``value`` is a string that UTF-8 can encode, which no half of a surrogate pair can be."""
    if not isinstance(value, str):
        return False
    if value.isascii():  # which needs no copy
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_characters(field: str, text: str):
    """Raise a ValueError if a text has half of a surrogate pair, for which UTF-8 has no bytes and no tokenizer has tokens.

    Python makes such halves of bytes that are no UTF-8, in arguments of a command and in names of files.
    """
    if not is_text(text):
        half = next(i for i, letter in enumerate(text) if "\ud800" <= letter <= "\udfff")
        raise ValueError(
            f"{field} has {text[half]!r} at character {half}, half of a surrogate pair, which is no character; give text "
            "that was decoded as UTF-8, for example with errors='replace'"
        )


def is_one_of(value, known: Iterable) -> bool:
    """Whether ``value`` is one of ``known``, of the same type: 1 is not True, and no array equals a name."""
    return any(value is one or (isinstance(value, type(one)) and value == one) for one in known)


def is_int(value) -> bool:
    """Whether ``value`` is an integer, of Python's or numpy's, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value) -> bool:
    """Whether ``value`` is a finite real number, and not a bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond what a float can be
        return False
