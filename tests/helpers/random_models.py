"""Random pydantic models, as tools of users have them for arguments, from seeds."""

import datetime
import enum
import pathlib
import random
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model

WORDS = (
    "left",
    "right",
    "C",
    "F",
    "two words",
    "a-b",
    "x/y",
    "null",
    "true",
    "12",
    "None",
    "1.5",
    "über",
    '"q"',
    "[]",
    "",
)
PATTERNS = ("^[a-z]{2,5}$", "^[0-9]{3}", "^(ab|cd)+$", "^x|^y", r"^\d{2}/\d{2}$", r"^[A-Z]\.?$")
NAMES = ("path", "mode", "unit", "count", "size", "items", "deep", "flag", "other", "type")


class Node(BaseModel):
    value: int
    children: "list[Node]" = Field(default=[], max_length=2)
    next: "Node | None" = None
    label: Literal["a", "b"] | None = None


class Models:
    """Makes models from a seed.

    Args:
      seed: of the models.
    """

    def __init__(self, seed: int):
        self._random, self._count = random.Random(seed), 0

    def model(self, depth: int = 2) -> type[BaseModel]:
        """A model of up to four fields, of which some have a default or an alias."""
        self._count += 1
        fields = {}
        for name in self._random.sample(NAMES, self._random.randint(1, 4)):
            options = {}
            if self._random.random() < 0.2:
                options["alias"] = self._random.choice(("fromDate", "x_y", "a.b", "from"))[:9] + str(len(fields))
            if self._random.random() < 0.3:
                options["description"] = "what it is"
            default = ... if self._random.random() < 0.6 else None
            fields[name] = (self.kind(depth), Field(default, **options))
        return create_model(f"Model{self._count}", **fields)

    def kind(self, depth: int) -> Any:
        """The type of a field."""
        makers = [self._enum, self._literal, self._string, self._integer, self._number, self._optional, self._plain]
        makers += [self._union, self._list, self._map, self._tuple, self._nested] if depth else []
        return self._random.choice(makers)(depth)

    def _plain(self, depth: int) -> Any:
        del depth
        return self._random.choice(
            (bool, int, str, float, datetime.date, datetime.datetime, uuid.UUID, pathlib.Path, bytes, Any)
        )

    def _enum(self, depth: int) -> Any:
        del depth
        self._count += 1
        words = self._random.sample(WORDS, self._random.randint(1, 4))
        if self._random.random() < 0.3:
            words = [*words, self._random.randint(0, 12)]
        return enum.Enum(f"Enum{self._count}", {f"m{i}": word for i, word in enumerate(words)})

    def _literal(self, depth: int) -> Any:
        del depth
        values = self._random.sample((*WORDS, 1, 12, None, True, False), self._random.randint(1, 4))
        return Literal[tuple(values)]  # type: ignore[valid-type]

    def _string(self, depth: int) -> Any:
        del depth
        if self._random.random() < 0.4:
            return Annotated[str, Field(pattern=self._random.choice(PATTERNS))]
        least = self._random.choice((None, 1, 3))
        return Annotated[str, Field(min_length=least, max_length=self._random.choice((None, 4, 9)))]

    def _integer(self, depth: int) -> Any:
        del depth
        kind = self._random.random()
        if kind < 0.3:
            return Annotated[int, Field(multiple_of=5, ge=0)]
        return Annotated[int, Field(ge=self._random.choice((None, -3, 10)), lt=self._random.choice((None, 200)))]

    def _number(self, depth: int) -> Any:
        del depth
        return Annotated[float, Field(gt=self._random.choice((None, 0, -1.5)), le=self._random.choice((None, 1, 99.5)))]

    def _optional(self, depth: int) -> Any:
        return self.kind(max(depth - 1, 0)) | None

    def _union(self, depth: int) -> Any:
        if self._random.random() < 0.3:
            return self._discriminated(depth)
        return self.kind(depth - 1) | self.kind(depth - 1)

    def _discriminated(self, depth: int) -> Any:
        self._count += 2
        parts = [
            create_model(f"Kind{self._count}{tag}", kind=(Literal[tag], ...), value=(self.kind(depth - 1), ...))  # type: ignore[arg-type]
            for tag in ("cat", "dog")
        ]
        return Annotated[parts[0] | parts[1], Field(discriminator="kind")]

    def _list(self, depth: int) -> Any:
        least = self._random.choice((None, None, 1, 2))
        most = self._random.choice((None, 2, 3)) if least else self._random.choice((None, 0, 1, 2))
        return Annotated[list[self.kind(depth - 1)], Field(min_length=least, max_length=most)]

    def _map(self, depth: int) -> Any:
        return dict[str, self.kind(depth - 1)]

    def _tuple(self, depth: int) -> Any:
        return tuple[self.kind(depth - 1), self.kind(depth - 1)]

    def _nested(self, depth: int) -> Any:
        return Node if self._random.random() < 0.2 else self.model(depth - 1)
