"""Interprets the pickle of a state dict without importing or calling anything that the pickle names.

A pickle is a program for a stack machine. This machine knows only the opcodes that ``torch.save`` writes for tensors and
their names. A class or function that the pickle names is put on the stack as a ``Name``, which holds its path as text.
A call that rebuilds a tensor gives a ``View``. Any other name or opcode ends the reading with ``Refused``. PyTorch's own
``weights_only`` unpickler is built in the same way.
"""

import math
import pickletools
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

MAX_ELEMENTS = 2**40
MAX_DIMS = 8
MAX_OPCODES = 2**20  # in a file; a tensor takes about 32
MAX_ARGUMENTS = 8  # of a function or of a persistent id

STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}


class Refused(Exception):
    """The file is damaged or holds more than a state dict.

    The message is the rest of a sentence that begins with the file's name: ``holds a persistent id ...``."""


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names, by its dotted path; it is never imported."""

    path: str


@dataclass(frozen=True)
class Storage:
    """A run of ``numel`` numbers of one dtype, to which the pickle refers by ``key``."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True)
class View:
    """A tensor: a strided view of a storage; offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Machine:
    """The stack machine. Its stack holds plain values, ``Name``, ``Storage`` and ``View``.

    An opcode takes time in proportion to the values that it takes off the stack. A value that the pickle refers to again
    through the memo is not copied or traversed. So the limit on the number of opcodes, counted over all pickles of a
    file, bounds time and memory.

    Attributes:
      storages: key -> storage, for every storage that the pickles refer to.
    """

    def __init__(self):
        self.storages: dict[str, Storage] = {}
        self._opcodes = 0

    def run(self, stream: BinaryIO) -> Any:
        """The value of the pickle that begins at the position of ``stream``.

        Afterwards the position of ``stream`` is the end of that pickle.

        Raises:
          Refused: the pickle holds more than a state dict, or has too many opcodes for one.
          Exception: of any kind, if the pickle is damaged.
        """
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # for each mark, the stack below it
        self._memo: dict[int, Any] = {}
        for opcode, argument, _ in pickletools.genops(stream):
            self._opcodes += 1
            if self._opcodes > MAX_OPCODES:
                raise Refused(f"holds more than {MAX_OPCODES} opcodes, far more than a state dict needs")
            self._step(opcode.name, argument)
        [value] = self._stack
        return value

    def _step(self, opcode: str, argument: Any):
        match opcode:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _ if opcode in _LITERALS:
                self._stack.append(argument)
            case _ if opcode in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode])
            case _ if opcode in _EMPTY:
                self._stack.append(_EMPTY[opcode]())
            case "MARK":
                self._below.append(self._stack)
                self._stack = []
            case "TUPLE":
                items = self._pop_mark()
                self._stack.append(tuple(items))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                self._stack.append(tuple(self._pop(int(opcode[-1]))))
            case "APPEND" | "APPENDS":
                items = self._pop(1) if opcode == "APPEND" else self._pop_mark()
                self._top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop(2) if opcode == "SETITEM" else self._pop_mark()
                _set_items(self._top(dict), items)
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                self._memo[len(self._memo) if opcode == "MEMOIZE" else argument] = self._stack[-1]
            case "BINGET" | "LONG_BINGET":
                self._stack.append(self._memo[argument])
            case "GLOBAL":
                self._stack.append(_name(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                module, attribute = self._pop(2)
                self._stack.append(_name(f"{module}.{attribute}"))
            case "BINPERSID":
                storage = _storage(self._stack.pop())
                self._stack.append(self.storages.setdefault(storage.key, storage))
            case "REDUCE":
                function, arguments = self._pop(2)
                self._stack.append(_rebuild(function, arguments))
            case "BUILD":  # would set the attribute _metadata of the state dict, its modules' versions; it is dropped
                self._pop(1)
                self._top(dict)
            case _:
                _refuse_opcode(opcode, argument)

    def _pop(self, count: int) -> list[Any]:
        """The last ``count`` values, in the order in which they were pushed."""
        return [self._stack.pop() for _ in range(count)][::-1]

    def _pop_mark(self) -> list[Any]:
        """The values that were pushed since the last mark."""
        items, self._stack = self._stack, self._below.pop()
        return items

    def _top(self, kind: type) -> Any:
        """The last value, which stays on the stack and has to be of exactly this type."""
        top = self._stack[-1]
        if type(top) is not kind:
            raise Refused(f"changes a {type(top).__name__} where a state dict has a {kind.__name__}; nothing was run")
        return top


_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict}


def _set_items(target: dict, items: list[Any]):
    # Only strings are accepted as keys, because hashing must not take long. A tuple that nests the previous tuple twice,
    # 60 levels deep, takes years to hash. Integers can be chosen so that all have the same hash, which makes a dict slow.
    # The hash of a string is computed once and is randomised in each process.
    for key in items[::2]:
        if type(key) is not str:
            raise Refused(f"holds a {type(key).__name__} for a key, expected a state dict")
    target.update(zip(items[::2], items[1::2], strict=True))


def _name(path: str) -> Name:
    """The ``Name`` for a dotted path, which has to be one that tensors need."""
    if path not in STORAGES and path not in _REBUILDS:
        raise Refused(f"asks for {path}, which no tensor needs; nothing of it was run")
    return Name(path)


def _refuse_opcode(opcode: str, argument: Any) -> NoReturn:
    if opcode == "INST":
        _name(argument.replace(" ", "."))
    raise Refused(f"holds the opcode {opcode}, which no tensor needs; nothing of it was run")


def _storage(persistent_id: Any) -> Storage:
    """The storage that a persistent id describes.

    The id is ``("storage", type, key, device, number of elements)``. The device on which the storage was is of no
    interest here. Old files have a sixth element, which is not None if the storage is a view of another; this is refused."""
    if type(persistent_id) is not tuple or len(persistent_id) > MAX_ARGUMENTS or persistent_id[0] != "storage":
        raise Refused("holds a persistent id that is no storage; nothing of it was run")
    _, kind, key, _, numel, *view = persistent_id
    if not isinstance(kind, Name) or kind.path not in STORAGES or any(part is not None for part in view):
        raise Refused("holds a storage of no known type, or a view of another; nothing of it was run")
    if type(key) is not str or not _is_count(numel):
        raise Refused("holds a storage without a key or a size")
    return Storage(key, STORAGES[kind.path], numel)


def _rebuild(function: Any, arguments: Any) -> Any:
    """The value of a call in the pickle, by our own function for the one that the pickle names."""
    if not isinstance(function, Name) or function.path not in _REBUILDS:
        called = function.path if isinstance(function, Name) else f"a {type(function).__name__}"
        raise Refused(f"calls {called}, which rebuilds no tensor; nothing of it was run")
    if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
        raise Refused(f"calls {function.path} with other arguments than a tensor has; nothing of it was run")
    return _REBUILDS[function.path](*arguments)


def _rebuild_tensor(storage, offset, shape, strides) -> View:
    """The tensor as a ``View``, after a check that it lies inside its storage and has no more elements than that."""
    if max(len(shape), len(strides)) > MAX_DIMS:
        raise Refused(
            f"holds a tensor of {max(len(shape), len(strides))} dimensions; no weight has more than {MAX_DIMS}"
        )
    if type(storage) is not Storage or not all(map(_is_count, (offset, *shape, *strides))):
        raise Refused("holds a tensor whose storage, offset, shape or strides are out of bounds")
    numel = math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    sane = math.prod(n or 1 for n in shape) <= MAX_ELEMENTS
    if not sane or (numel and not (numel <= storage.numel and last < storage.numel)):
        raise Refused(
            f"holds a tensor of shape {list(shape)}, strides {list(strides)} and offset {offset}, "
            f"which leaves its storage of {storage.numel} elements"
        )
    return View(storage, offset, tuple(shape), tuple(strides))


def _empty_dict() -> dict:
    """The value of ``OrderedDict()``. ``torch.save`` writes that call first and then the items as further opcodes."""
    return {}


def _rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks, metadata=None) -> View:
    if hooks or metadata:
        raise Refused("holds a tensor with hooks or metadata, which no state dict needs; nothing of it was run")
    return _rebuild_tensor(storage, offset, shape, strides)


def _rebuild_parameter(tensor, requires_grad, hooks) -> View:
    if hooks or type(tensor) is not View:
        raise Refused("holds a parameter with hooks, or one that is no tensor; nothing of it was run")
    return tensor


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_ELEMENTS


_REBUILDS = {
    "collections.OrderedDict": _empty_dict,
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
}
