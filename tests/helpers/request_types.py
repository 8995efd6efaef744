"""Fields of the request types in packages of clients, and requests made of them."""

import dataclasses
import itertools
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import typing_extensions

MAX_PLACES = 8  # of a type in a request that are tried

Hint = Any


class Place(typing.NamedTuple):
    """Where an object of a type stands: in a field of another type, as a value, an entry of a list or of an object."""

    parent: type
    field: str
    wrap: str  # of "value", "list" and "object"


Chain = tuple[Place, ...]  # from the request inwards


def is_object(hint: Hint) -> bool:
    return isinstance(hint, type) and typing_extensions.is_typeddict(hint)


def name_of(kind: type) -> str:
    """The name of a type without what packages put around it, as versions of tools: ``BetaToolBash20250124Param`` is
    ``ToolBash``."""
    name = kind.__name__.removeprefix("Beta")
    while name.endswith(("Param", "Params")):
        name = name.removesuffix("s").removesuffix("Param")
    return re.sub(r"_?20\d{6}$", "", name)


def fields_of(kind: type) -> dict[str, Hint]:
    return typing_extensions.get_type_hints(kind)


def members(hint: Hint) -> list[Hint]:
    """The types of a union; the type itself, if it is none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in members(member)]
    return [hint]


def objects_in(hint: Hint, wrap: str = "value") -> Iterator[tuple[type, str]]:
    """The types of objects that a field may have, and how they stand in it."""
    for member in members(hint):
        arguments = typing.get_args(member)
        if is_object(member):
            yield member, wrap
        elif len(arguments) == 2 and typing.get_origin(member) is dict:
            yield from objects_in(arguments[1], "object")
        elif len(arguments) == 1 and typing.get_origin(member) is not typing.Literal:
            yield from objects_in(arguments[0], "list")


@dataclasses.dataclass(frozen=True)
class Examples:
    """Values of fields that an example by type would not do for.

    Attributes:
      values: by the field's name, or by those of the type and the field, ``AllowedTools.tools`` for example.
      needed: names of fields, as in ``values``, that the smallest object has although its type does not require them.
    """

    values: Mapping[str, Any]
    needed: frozenset[str] = frozenset()

    def of(self, hint: Hint, field: str = "", kind: type | None = None) -> list[Any]:
        """Values of a field: every one of its literals, or an example of each of its types."""
        for name in () if kind is None else (f"{name_of(kind)}.{field}", field):
            if name in self.values:
                return [self.values[name]]
        given = [member for member in members(hint) if member is not type(None)]
        if str in given:
            return ["x"]
        literals = [value for m in given if typing.get_origin(m) is typing.Literal for value in typing.get_args(m)]
        return literals or [self._example(member) for member in given]

    def _example(self, hint: Hint) -> Any:
        if is_object(hint):
            return self.least(hint)
        arguments = typing.get_args(hint)
        if typing.get_origin(hint) is dict:
            return {"x": self.of(arguments[1])[0]}
        if len(arguments) == 1:
            return [self.of(arguments[0])[0]]
        return {int: 1, float: 0.5, bool: True}.get(hint, {})

    def least(self, kind: type) -> dict[str, Any]:
        """The smallest object of a type."""
        marked = typing_extensions.get_type_hints(
            kind, include_extras=True
        )  # as ``__required_keys__`` knows no deferred ones
        required = {name for name, hint in marked.items() if typing.get_origin(hint) is typing_extensions.Required}
        required |= {name for name in marked if {name, f"{name_of(kind)}.{name}"} & self.needed}
        return {name: self.of(hint, name, kind)[0] for name, hint in fields_of(kind).items() if name in required}

    def placed(self, chain: Chain, value: Any) -> Iterator[dict[str, Any]]:
        """Requests with a value at a place; one for each role that the message around it may have."""
        roles = [fields_of(place.parent).get("role") for place in chain]
        for chosen in itertools.product(*([None] if hint is None else self.of(hint) for hint in roles)):
            inner = value
            for place, role in zip(reversed(chain), reversed(chosen), strict=True):
                wrapped = {"value": inner, "list": [inner], "object": {"x": inner}}[place.wrap]
                inner = {**self.least(place.parent), **({} if role is None else {"role": role}), place.field: wrapped}
            yield inner
