"""``Fields``: typed reading of a JSON object. Every error names the file, the key, its value and what is expected.

``Fields`` also records which keys were asked for, so that a reader can name those of a file that nothing looked at."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jspec._validation import is_int
from jspec.checkpoints.files.refusal import Refusal

LARGEST = 2**31 - 1
LARGEST_NUMBER = 1e30
_REQUIRED = object()


class _Recorded(dict[str, Any]):
    """A dict that adds each key that a reader looks up to ``asked``; copying the dict looks nothing up."""

    def __init__(self, values: Mapping[str, Any], asked: set[str], prefix: str):
        super().__init__(values)
        self._asked, self._prefix = asked, prefix

    def __getitem__(self, key: str) -> Any:
        self._asked.add(self._prefix + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(f"{self._prefix}{key}")
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._asked.add(self._prefix + key)
        return super().get(key, default)


@dataclasses.dataclass(frozen=True)
class Fields:
    """A JSON object of a checkpoint.

    In all methods, ``absent`` is returned when the key is missing or null; without ``absent`` the key has to be there.
    A value of the wrong type or out of range raises a ``Refusal``.

    Attributes:
      raw: key -> value.
      where: the file, for messages.
      prefix: path of a nested object, for messages: ``rope_scaling.`` if ``raw`` is the value of that key.
      asked: the path of each key that was looked up in ``raw``, in the objects nested in it, and in the copies that
        ``dataclasses.replace`` makes of them.
    """

    raw: Mapping[str, Any]
    where: str
    prefix: str = ""
    asked: set[str] = dataclasses.field(default_factory=set, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "raw", _Recorded(self.raw, self.asked, self.prefix))

    def integer(self, name: str, absent: Any = _REQUIRED, low: int = 1, high: int = LARGEST) -> Any:
        """The integer under ``name``, which has to be in ``low..high``; true and 1.0 are no integers."""
        return self._checked(name, absent, lambda v: is_int(v) and low <= v <= high, f"an integer in {low}..{high}")

    def number(self, name: str, absent: Any = _REQUIRED) -> Any:
        """The positive finite number under ``name``."""
        return self._checked(name, absent, _is_positive, "a positive number")

    def numbers(self, name: str) -> tuple[float, ...]:
        """The list of positive finite numbers under ``name``, which is not empty."""

        def valid(value) -> bool:
            return isinstance(value, list) and bool(value) and all(map(_is_positive, value))

        value: Any = self._checked(name, _REQUIRED, valid, "a list of positive numbers")
        return tuple(map(float, value))

    def flag(self, name: str, absent: bool = False) -> bool:
        """The boolean under ``name``."""
        return self._checked(name, absent, lambda v: isinstance(v, bool), "true or false")

    def text(self, name: str, absent: Any = _REQUIRED) -> Any:
        """The string under ``name``."""
        return self._checked(name, absent, lambda v: isinstance(v, str), "a string")

    def only(self, name: str, value: bool | float | str, why: str = ""):
        """Raise a ``Refusal`` unless the key is absent or has this ``value``; ``why`` no other is read, for the message."""
        read: Any
        if isinstance(value, bool):
            read, words = self.flag, str(value).lower()
        elif isinstance(value, int):
            read, words = functools.partial(self.integer, low=min(value, 1)), str(value)
        else:
            read, words = (self.text, repr(value)) if isinstance(value, str) else (self.number, f"{value:g}")
        if read(name, value) != value:
            raise self.refuse(name, f"{words}, {why}" if why else words)

    def nested(self, name: str) -> "Fields | None":
        """The object under ``name``; None if the key is missing, or its value null or empty."""
        value = self._checked(name, {}, lambda v: isinstance(v, dict), "an object or null")
        return Fields(value, self.where, f"{self.prefix}{name}.", self.asked) if value else None

    def refuse(self, name: str, expected: str) -> Refusal:
        """The exception for a value under ``name`` that is not what is ``expected``; the caller raises it."""
        return Refusal(f"{self.where}: {self.prefix}{name}={_short(self.raw.get(name))}: expected {expected}")

    def _checked(self, name, absent, valid, expected):
        value = self.raw.get(name)
        if value is None:
            if absent is _REQUIRED:
                raise Refusal(f"{self.where}: {self.prefix}{name} is missing: expected {expected}")
            return absent
        if not valid(value):
            raise self.refuse(name, expected)
        return value


def _is_positive(value) -> bool:
    # A bound instead of math.isfinite, which raises for JSON integers beyond the range of floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST_NUMBER


def _short(value) -> str:
    text = repr(value).replace("\n", "")  # of an array of NumPy
    return text if len(text) <= 80 else text[:77] + "..."
