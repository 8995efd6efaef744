"""Declarations of parameters, from which their names, shapes, bytes and places in a checkpoint follow.

A config declares its parameters as data. The query, key and value projections of a decoder, for example, are one
parameter of shape ``[(N + 2G) H, D]``, which three tensors of the checkpoint fill:

    Parameter(
        name="layers.{}.attention.qkv.weight",              # in the params
        tensors={                                           # in the checkpoint, joined in this order along axis 0
            "model.layers.{}.self_attn.q_proj.weight": Axis("NH", "heads"),
            "model.layers.{}.self_attn.k_proj.weight": Axis("GH", "kv"),
            "model.layers.{}.self_attn.v_proj.weight": Axis("GH", "kv"),
        },
        other_axes=(Axis("D", "embed"),),
        copies=((0,), (1,), ...),                           # what ``{}`` stands for: one parameter for each layer
        quantization="int8",
    )

Sizes such as ``NH`` are products of the config's ``dimensions``, ``{"N": 32, "G": 8, "H": 128, "D": 4096, ...}``. This
module imports no array library, so that the bytes of a model are known before JAX is imported and before a file is read.
tests/config/test_param_specs.py checks that the modules of ``jspec.models`` have exactly the parameters declared here.
"""

import abc
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from jspec.quantization.formats import Format, StoredArray, format_of, known_format

DTYPE_BYTES = {"float32": 4, "int32": 4, "uint32": 4, "uint8": 1}
ONCE = ((),)  # ``copies`` of a parameter whose name has no ``{}``: a single copy, with no index

_FACTOR = re.compile(r"\d+|[A-Z][a-z]?")


class Axis(NamedTuple):
    """One axis of a parameter.

    Attributes:
      size: its length, a product of dimension letters and numbers: ``D``, ``NH``, ``2D``.
      name: the name of the logical axis: ``vocab``, ``embed``, ``heads``, ... A sharding maps it to an axis of the device
        mesh.
    """

    size: str
    name: str


VOCAB, EMBED, DRAFT_VOCAB = Axis("V", "vocab"), Axis("D", "embed"), Axis("Vd", "draft_vocab")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a model, or a family of like parameters such as one for each layer.

    Attributes:
      name: its dotted name in the params. Each ``{}`` stands for an index, such as that of the layer.
      tensors: the tensors of the checkpoint that fill it, by name, and the part of axis 0 that each of them fills.
        Several tensors are joined along axis 0 in this order.
      joined: None, or the name of the one tensor in which the checkpoint holds all of ``tensors``, joined already. The
        names in ``tensors`` then only tell its parts apart.
      other_axes: the axes after axis 0.
      copies: the indices of each parameter of the family: ``((0,), (1,))`` for one parameter in each of two layers. They
        replace ``{}`` in ``name`` and in the names of the tensors.
      quantization: ``int8`` or ``fp8`` for a weight that is stored in eight bits, with one scale for each output channel;
        ``fp8_block`` for one in eight, with one for each 128 inputs of an output channel; ``int4``, or another name of
        ``jspec.quantization.formats``, or ``nvfp4`` or ``mxfp4`` for one in four bits. None for any other parameter.
      dtype: a key of ``DTYPE_BYTES``. None for the dtype of the weights, which nearly all parameters have.
      weights_each: number of the model's weights in one stored number: 2 in a byte of MXFP4 codes, 0 in their scales.
      sizes: sizes of dimension letters that are not those of the config, such as H in layers with heads of another size.
    """

    name: str
    tensors: Mapping[str, Axis]
    other_axes: tuple[Axis, ...] = ()
    copies: Sequence[tuple[int, ...]] = ONCE
    quantization: str | None = None
    dtype: str | None = None
    weights_each: int = 1
    joined: str | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Names of the logical axes: of axis 0 one for each of ``tensors``, then one for each other axis."""
        return tuple(axis.name for axis in self.tensors.values()), *((axis.name,) for axis in self.other_axes)

    def tensor_lengths(self, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        """How much of axis 0 each of ``tensors`` fills."""
        dimensions = {**dimensions, **self.sizes}
        return tuple(size_of(axis.size, dimensions) for axis in self.tensors.values())

    def shape(self, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one copy."""
        rows, dimensions = sum(self.tensor_lengths(dimensions)), {**dimensions, **self.sizes}
        return rows, *(size_of(axis.size, dimensions) for axis in self.other_axes)

    @property
    def form(self) -> Format | None:
        """The format in which it is stored; None if it is not quantised."""
        return format_of(self.quantization)

    def array_name(self, part: str) -> str:
        """Name of one of the arrays of a quantised parameter: its own for ``weight``, and for other keys of
        ``Format.arrays`` one that ends with it."""
        if part == "weight":
            return self.name
        return self.name.removesuffix("weight") + part if self.name.endswith(".weight") else f"{self.name}_{part}"


class StoredParam(NamedTuple):
    """How a quantised parameter is stored.

    Attributes:
      form: its format.
      shape: of what it stands for, (out, in).
      names: the names of its arrays in the params, by the keys of ``Format.arrays``.
    """

    form: Format
    shape: tuple[int, ...]
    names: Mapping[str, str]

    @property
    def arrays(self) -> dict[str, StoredArray]:
        """Shape and dtype of each of its arrays, by their names in the params."""
        return {self.names[part]: array for part, array in self.form.arrays(self.shape).items()}


class Declared(abc.ABC):
    """Base of every config: counts, shapes and names that follow from its ``dimensions`` and ``parameters``."""

    @property
    @abc.abstractmethod
    def dimensions(self) -> Mapping[str, int]:
        """Size of each dimension letter."""

    @property
    @abc.abstractmethod
    def parameters(self) -> tuple[Parameter, ...]:
        """Declarations of all parameters, in the order in which a checkpoint lists them."""

    @property
    def num_parameters(self) -> int:
        """Number of weights and biases. Scales are left out, and a tied output head counts once."""
        dimensions = self.dimensions
        return sum(p.weights_each * len(p.copies) * math.prod(p.shape(dimensions)) for p in self.parameters)

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of all parameters and scales, where a number that is not quantised takes ``itemsize`` bytes."""
        return sum(bytes_of(parameter, self.dimensions, itemsize) for parameter in self.parameters)

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by its name in the params. Scales are left out."""
        dimensions = self.dimensions
        return {p.name.format(*copy): p.shape(dimensions) for p, copy in expanded(self.parameters)}

    @property
    def formats(self) -> str:
        """The names of the formats of its quantised parameters, in words: ``fp8 and nvfp4``; empty if none is."""
        return " and ".join(dict.fromkeys(p.quantization for p in self.parameters if p.quantization and p.copies))

    @property
    def reduced(self) -> bool:
        """Whether the output head has a reduced vocabulary, Vd < V."""
        sizes = self.dimensions
        return sizes.get("Vd", sizes["V"]) < sizes["V"]

    @property
    def vocabulary_summary(self) -> str:
        """``vocabulary 97``, or ``draft vocabulary 40 of 97``."""
        sizes = self.dimensions
        return f"draft vocabulary {sizes['Vd']} of {sizes['V']}" if self.reduced else f"vocabulary {sizes['V']}"

    def with_quantization(self, quantization: str) -> Self:
        """A copy of this config whose linear maps and output head are stored as ``int8``, ``fp8`` or ``int4``."""
        return dataclasses.replace(self, quantization=quantization)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def with_draft_vocabulary(self, size: int) -> Self:
        """A copy of this config whose output head has logits for ``size`` tokens only.

        Raises:
          ValueError: the config has no field ``draft_vocab_size``, or ``size`` does not fit.
        """
        if "draft_vocab_size" not in getattr(self, "__dataclass_fields__", {}):
            raise ValueError(f"draft_vocab_size={size}: {type(self).__name__} has no draft vocabulary; leave it out")
        return dataclasses.replace(self, draft_vocab_size=size)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def stored_params(self) -> dict[str, StoredParam]:
        """How each quantised parameter is stored, by its name."""
        dimensions, found = self.dimensions, {}
        for parameter, copy in expanded([p for p in self.parameters if p.quantization is not None]):
            form, shape = known_format(parameter.quantization or ""), parameter.shape(dimensions)
            names = {part: parameter.array_name(part).format(*copy) for part in form.arrays(shape)}
            found[names["weight"]] = StoredParam(form, shape, names)
        return found

    def param_dtypes(self) -> dict[str, str]:
        """Dtype of each parameter that has not the dtype of the weights, by its name."""
        return {p.name.format(*copy): p.dtype for p, copy in expanded(self.parameters) if p.dtype is not None}


def bytes_of(parameter: Parameter, dimensions: Mapping[str, int], itemsize: int) -> int:
    """Bytes of all copies of a parameter, scales included, where a number that is not quantised takes ``itemsize`` bytes."""
    shape = parameter.shape(dimensions)
    plain = math.prod(shape) * DTYPE_BYTES.get(parameter.dtype or "", itemsize)
    return len(parameter.copies) * (parameter.form.bytes(shape) if parameter.form else plain)


def of_experts(quantization: str | None) -> str | None:
    """How experts are stored where other maps are stored as ``quantization``: not quantised where codes have an order of
    their own, or inputs numbers of theirs, for which there is no kernel."""
    form = format_of(quantization)
    return quantization if form and not (form.ordered or form.scaled_inputs) else None


def expanded(parameters: Sequence[Parameter]) -> Iterator[tuple[Parameter, tuple[int, ...]]]:
    """Each parameter with each of its copies, layer by layer.

    All parameters of layer 0 come before those of layer 1, because neighbours in ``parameters`` that have the same copies
    are listed copy by copy.
    """
    for copies, group in itertools.groupby(parameters, key=lambda p: p.copies):
        neighbours = list(group)
        for copy in copies:
            yield from ((parameter, copy) for parameter in neighbours)


def size_of(expression: str, dimensions: Mapping[str, int]) -> int:
    """The value of a product such as ``NH`` or ``2D``: 10 for ``2D`` where D is 5."""
    return math.prod(int(factor) if factor.isdigit() else dimensions[factor] for factor in _factors(expression))


@functools.cache
def _factors(expression: str) -> tuple[str, ...]:
    factors = tuple(_FACTOR.findall(expression))
    assert "".join(factors) == expression, f"{expression!r} is no product of dimension letters"
    return factors


def indices(start: int, stop: int) -> tuple[tuple[int, ...], ...]:
    """``copies`` of a parameter with one index, which runs over ``start .. stop - 1``."""
    return tuple((i,) for i in range(start, stop))


def vector(name: str, tensor: str, axis: Axis, copies: Sequence[tuple[int, ...]] = ONCE) -> Parameter:
    """A parameter of one axis, such as the weight of a norm."""
    return Parameter(name, {tensor: axis}, copies=copies)


# ``jspec.models.heads.draft_vocabulary``. Its axis has a name of its own, because every shard of a model has all of it.
DRAFT_IDS = Parameter("draft_ids", {"d2t": Axis("V", "draft_ids")}, dtype="int32")


def matrix(name: str, tensor: str, first: Axis, second: Axis, copies: Sequence[tuple[int, ...]] = ONCE) -> Parameter:
    """A parameter ``[first, second]`` that one tensor fills."""
    return Parameter(name, {tensor: first}, (second,), copies)


def linear(
    name: str,
    tensors: Mapping[str, Axis],
    inputs: Axis,
    copies: Sequence[tuple[int, ...]] = ONCE,
    *,
    bias: bool = False,
    quantization: str | None = None,
    joined: str | None = None,
) -> tuple[Parameter, ...]:
    """The weight ``[out, in]`` of a linear map and, with ``bias``, its bias ``[out]``.

    Args:
      name: name of the map in the params, without ``.weight`` or ``.bias``.
      tensors: its names in the checkpoint, likewise, and the output channels that each of them fills.
      inputs: the axis of the input.
      copies, quantization: as in ``Parameter``.
      bias: whether the map has a bias.
      joined: as in ``Parameter``, likewise.
    """

    def declared(suffix: str, **more) -> Parameter:
        named = {f"{tensor}.{suffix}": axis for tensor, axis in tensors.items()}
        return Parameter(
            f"{name}.{suffix}", named, copies=copies, joined=None if joined is None else f"{joined}.{suffix}", **more
        )

    weight = declared("weight", other_axes=(inputs,), quantization=quantization)
    return (weight, declared("bias")) if bias else (weight,)


def norm(name: str, tensor: str, axis: Axis, copies: Sequence[tuple[int, ...]] = ONCE, *, kind: str = "rms"):
    """The parameters of a norm, by the names of the norm: a weight, and for ``kind`` ``layer`` a bias."""
    kinds = ("weight", "bias") if kind == "layer" else ("weight",)
    return tuple(vector(f"{name}.{part}", f"{tensor}.{part}", axis, copies) for part in kinds)
