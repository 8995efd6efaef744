"""Checks of keys and lists of modules that the readers of a ``quantization_config`` share."""

import dataclasses
import functools
import re
import time
from collections.abc import Iterable
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.quantization.formats import INSTEAD

KEYS = ("quantization_config", "compression_config")  # the second is what early llm-compressor wrote
# The names of modules are matched with regular expressions that a checkpoint brings. Only simple ones are taken, because
# others can keep a matcher busy forever: its work grows with the power of how many repetitions and choices there are. What
# is left of such patterns takes a few milliseconds for each name, and a checkpoint has thousands of names. Beginnings of
# names, ``model.layers.3.mlp.gate.*`` for example, take no more than names, and a mixture may have one for each layer.
MAX_PATTERNS, MAX_BEGINNINGS, MAX_PATTERN_LENGTH, MAX_CHOICES = 20, 1000, 100, 3
MAX_SECONDS = 0.5  # of CPU time in which the patterns of a list are matched; a checkpoint has two lists at most
_ATOM = r"(?:\w|-|\.|\\[.dw]|\[\^?[\w.-]+\]|\((?:\?:)?(?:[\w.|-]|\\\.)*\)(?![*+?]))"
_SIMPLE = re.compile(rf"\^?(?:{_ATOM}[*+?]?)*\$?", re.ASCII)
_TAIL = re.compile(r"(\.\*)?\$?$")
_CHOICE = re.compile(r"\(|(?<!\()(?<!\\d)[*+?]")  # repeated digits are none: a name has few side by side


@dataclasses.dataclass(frozen=True)
class Modules:
    """Which modules of a network a list in config.json means.

    Attributes:
      names: their names, ``lm_head``, or classes, of which only ``Linear`` is known.
      patterns: regular expressions that the beginnings of their names match.
      key: the key of config.json, for messages.
    """

    names: frozenset[str]
    patterns: tuple[re.Pattern, ...]
    key: str
    _spent: list[float] = dataclasses.field(default_factory=lambda: [0.0], compare=False, repr=False)  # seconds
    _matched: dict[str, bool] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def include(self, names: Iterable[str]) -> bool:
        """Whether a linear map, to which a checkpoint may give any of these names, is among them.

        Raises:
          Refusal: matching the patterns takes too long.
        """
        if "Linear" in self.names:
            return True
        return any(name in self.names or self._matches(name) for name in names)

    @functools.cached_property
    def _any(self) -> re.Pattern:
        """One pattern that matches what any of ``patterns`` does, because each call of a matcher takes a microsecond."""
        return re.compile("|".join(f"(?:{pattern.pattern})" for pattern in self.patterns))

    def _matches(self, name: str) -> bool:
        if not self.patterns:
            return False
        if name not in self._matched:
            began = time.thread_time()
            self._matched[name] = self._any.match(name) is not None
            self._spent[0] += time.thread_time() - began
            if self._spent[0] > MAX_SECONDS:
                raise Refusal(
                    f"{self.key} has patterns whose matching takes more than {MAX_SECONDS:g} s, "
                    f"{self.patterns[0].pattern!r} for example; list the names of modules"
                )
        return self._matched[name]


def quantization_of(fields: Fields) -> list[Fields]:
    """What config.json says of quantised weights, under one of ``KEYS`` or under both; empty if it says nothing.

    In multimodal configs it may stand in ``text_config``, where it counts if nothing stands outside, as in transformers."""
    text = dict(fields.raw).get("text_config")  # of which nobody is told that it was looked up
    within = isinstance(text, dict) and not text.keys().isdisjoint(KEYS)
    places = [fields, *([nested] if within and (nested := fields.nested("text_config")) is not None else [])]
    said = ([found for key in KEYS if (found := place.nested(key)) is not None] for place in places)
    return next(filter(None, said), [])


def require_one_of(fields: Fields, name: str, *known: Any, absent: Any = None):
    """Raise a ``Refusal`` unless the value under ``name``, or without one ``absent``, is one of ``known``."""
    value = absent if fields.raw.get(name) is None else fields.raw[name]
    if not any(type(value) is type(entry) and value == entry for entry in known):
        raise fields.refuse(name, f"{' or '.join(map(repr, known))}; {INSTEAD}")


def read_modules(fields: Fields, name: str, absent: Iterable[str] = ()) -> Modules:
    """The list of modules under ``name``: names, and after ``re:`` regular expressions."""
    listed = absent if fields.raw.get(name) is None else fields.raw[name]
    if not isinstance(listed, list | tuple) or not all(isinstance(entry, str) for entry in listed):
        raise fields.refuse(name, "a list of module names")
    patterns = [entry.removeprefix("re:") for entry in listed if entry.startswith("re:")]
    num_choosing = sum(_CHOICE.search(_TAIL.sub("", pattern, count=1)) is not None for pattern in patterns)
    if num_choosing > MAX_PATTERNS or len(patterns) - num_choosing > MAX_BEGINNINGS:
        most = f"{MAX_PATTERNS} patterns, and {MAX_BEGINNINGS} that end with their only .*"
        raise fields.refuse(name, f"at most {most}; list the names of modules")
    return Modules(
        frozenset(entry for entry in listed if not entry.startswith("re:")),
        tuple(_compiled(fields, name, pattern) for pattern in patterns),
        fields.prefix + name,
    )


def _compiled(fields: Fields, name: str, pattern: str) -> re.Pattern:
    simple = len(pattern) <= MAX_PATTERN_LENGTH and _SIMPLE.fullmatch(pattern)
    try:
        if simple and len(_CHOICE.findall(pattern)) <= MAX_CHOICES:
            return re.compile(pattern)
    except re.error:
        pass
    raise Refusal(
        f"{fields.where}: {fields.prefix}{name} has the pattern {pattern[:80]!r}: expected names of modules, or patterns of "
        f"at most {MAX_PATTERN_LENGTH} letters, ., [..] and up to {MAX_CHOICES} of *, +, ? and (a|b); list the names instead"
    )
