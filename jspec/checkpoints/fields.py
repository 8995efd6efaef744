"""Typed reading of a JSON object: every error names file, field, value and what would be right."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec._arguments import is_int
from jspec.checkpoints.refusal import Refusal

LARGEST = 2**31 - 1
LARGEST_NUMBER = 1e30
_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Fields:
    """The object ``raw`` of the file ``where``; ``prefix`` is the path of a nested object, as in ``rope_scaling.``."""

    raw: Mapping[str, Any]
    where: str
    prefix: str = ""

    def integer(self, name: str, absent: Any = _REQUIRED, low: int = 1, high: int = LARGEST) -> Any:
        """An integer in ``low..high``, no bool, no float; ``absent`` when the key is absent or null."""
        return self._checked(name, absent, lambda v: is_int(v) and low <= v <= high, f"an integer in {low}..{high}")

    def number(self, name: str, absent: Any = _REQUIRED) -> Any:
        """A positive finite number; ``absent`` when the key is absent or null."""
        return self._checked(name, absent, _is_positive, "a positive number")

    def flag(self, name: str, absent: bool = False) -> bool:
        return self._checked(name, absent, lambda v: isinstance(v, bool), "true or false")

    def text(self, name: str, absent: Any = _REQUIRED) -> Any:
        return self._checked(name, absent, lambda v: isinstance(v, str), "a string")

    def nested(self, name: str) -> "Fields | None":
        """The object under ``name``; None when it is absent, null or empty."""
        value = self._checked(name, {}, lambda v: isinstance(v, dict), "an object or null")
        return Fields(value, self.where, f"{self.prefix}{name}.") if value else None

    def refuse(self, name: str, expected: str) -> Refusal:
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
    # JSON integers have no bound, and one beyond float range would make isfinite raise.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < LARGEST_NUMBER


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
