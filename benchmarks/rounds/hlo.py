"""What a program became when XLA compiled it: the kernels that it launches, and the large arrays that it copies or
transposes."""

import re
from typing import NamedTuple

import numpy as np

LAUNCHES_NOTHING = frozenset(
    ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id")
)
MOVES = frozenset(("copy", "copy-start", "transpose"))
BYTES = {"pred": 1, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1}  # others end in their number of bits


class Op(NamedTuple):
    """One instruction: its name, its kind, the types of its result, and its line of the text."""

    name: str
    kind: str
    result: str
    line: str

    @property
    def called(self) -> list[str]:
        """Names of the computations that it runs, branches included."""
        listed = re.findall(r"branch_computations=\{([^}]*)\}", self.line)
        named = re.findall(r"(?:calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.\-]+)", self.line)
        return named + [name.strip().lstrip("%") for group in listed for name in group.split(",")]

    @property
    def bytes(self) -> float:
        """Size of the result in bytes."""
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", self.result)
        return sum(_width(kind) * float(np.prod([int(d) for d in dims.split(",") if d])) for kind, dims in arrays)


def _width(kind: str) -> float:
    bits = re.search(r"\d+$", kind)
    return BYTES[kind] if kind in BYTES else int(bits.group()) / 8 if bits else 0.0


def computations(hlo: str) -> dict[str, list[Op]]:
    """The computations of a compiled program's text by name; that of the program itself is ``ENTRY``."""
    by_name: dict[str, list[Op]] = {}
    name = ""
    for line in hlo.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = "ENTRY" if head.group(1) else head.group(2)
            by_name[name] = []
        elif name and (op := re.match(r"\s+(?:ROOT )?%?(\S+) = (.+?) ([\w\-]+)\(", line)):
            by_name[name].append(Op(op.group(1), op.group(3), op.group(2), line.strip()))
    return by_name


def launched(hlo: str, loop: bool = False) -> list[Op]:
    """What a program launches: kernels, library calls and device copies. The body of a loop or of a ``call`` counts once.

    Args:
      hlo: text of a compiled program.
      loop: whether to count only one round of the program's largest loop.
    """
    by_name = computations(hlo)
    if not loop:
        return _launched(by_name, "ENTRY")
    bodies = re.findall(r" while\(.*body=%?([\w.\-]+)", hlo)
    return max((_launched(by_name, body) for body in bodies), key=len, default=[])


def _launched(by_name: dict[str, list[Op]], name: str) -> list[Op]:
    launches = []
    for op in by_name[name]:
        if op.kind in ("while", "call", "conditional"):
            launches += [inner for name in op.called for inner in _launched(by_name, name)]
        elif op.kind not in LAUNCHES_NOTHING and not op.kind.endswith("-done"):
            launches.append(op)
    return launches


def moves(hlo: str, at_least: float) -> list[Op]:
    """Copies and transposes that write at least so many bytes: instructions of their own, and fusions that are named for
    them."""

    def is_move(op: Op) -> bool:
        named = op.kind == "fusion" and re.search(r"copy|transpose", op.name)
        return op.bytes >= at_least and (op.kind in MOVES or bool(named))

    return [op for op in launched(hlo) if is_move(op)]
