"""One declaration per parameter, from which names, shapes, counts, bytes and the tables of checkpoints follow.

A config declares its parameters as data. The query, key and value projections of a decoder, for example, are

    Parameter(
        name="layers.{}.attention.qkv.weight",              # in the params
        tensors={                                           # in the checkpoint, stacked in this order along axis 0
            "model.layers.{}.self_attn.q_proj.weight": Axis("NH", "heads"),
            "model.layers.{}.self_attn.k_proj.weight": Axis("GH", "kv"),
            "model.layers.{}.self_attn.v_proj.weight": Axis("GH", "kv"),
        },
        columns=(Axis("D", "embed"),),
        copies=((0,), (1,), ...),                           # what ``{}`` stands for: one parameter for each layer
        quantization="int8",
    )

of shape ``[(N + 2G) H, D]``. The sizes are products of the config's ``dimensions``, ``{"N": 32, "G": 8, ...}``. This
module knows no array library, so that a config can be counted before anything is imported or read. The modules of
``jspec.models`` are held against these declarations in tests/test_parameters.py.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from jspec.config import ModelConfig

SCALE_BYTES = INTEGER_BYTES = 4  # float32 and int32
ONCE = ((),)  # the copies of a parameter whose name has no index

_FACTOR = re.compile(r"\d+|[A-Z][a-z]?")


class Axis(NamedTuple):
    """One axis of a parameter.

    Attributes:
      size: a product of dimension letters and numbers: ``D``, ``NH``, ``2D``.
      name: the logical axis, which a sharding maps to an axis of the device mesh: ``vocab``, ``embed``, ``heads``, ...
    """

    size: str
    name: str


VOCAB, EMBED, MLP = Axis("V", "vocab"), Axis("D", "embed"), Axis("F", "mlp")
HEADS, KV, HEAD_DIM = Axis("NH", "heads"), Axis("GH", "kv"), Axis("H", "head_dim")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a model, or one for each layer.

    Attributes:
      name: its dotted name in the params; each ``{}`` stands for an index.
      tensors: name in the checkpoint -> the rows (axis 0) that this tensor fills; several are stacked in this order.
      columns: the other axes.
      copies: the indices of each copy; the same ones go into the names of the tensors.
      quantization: ``int8`` or ``fp8`` for a weight that is stored in eight bits with a scale for each row, else None.
      integer: whether it is int32; other parameters have the dtype of the weights.
    """

    name: str
    tensors: Mapping[str, Axis]
    columns: tuple[Axis, ...] = ()
    copies: Sequence[tuple[int, ...]] = ONCE
    quantization: str | None = None
    integer: bool = False

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Logical axes: those of the stacked tensors for axis 0, then one for each other axis."""
        return tuple(axis.name for axis in self.tensors.values()), *((axis.name,) for axis in self.columns)

    def rows(self, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        """Rows that each of ``tensors`` fills."""
        return tuple(size_of(axis.size, dimensions) for axis in self.tensors.values())

    def shape(self, dimensions: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one copy."""
        return sum(self.rows(dimensions)), *(size_of(axis.size, dimensions) for axis in self.columns)

    @property
    def scale(self) -> str:
        """Name of the scales, float32 ``[rows]``, of a quantised parameter."""
        return self.name.removesuffix("weight") + "scale" if self.name.endswith(".weight") else f"{self.name}_scale"


class Declared:
    """What follows from the declaration of a config, which gives its ``dimensions`` and ``parameters``."""

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Dimension letter -> size."""
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter, in the order of a checkpoint."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Number of weights, biases included and scales left out; a tied output head counts once."""
        dimensions = self.dimensions
        return sum(len(one.copies) * math.prod(one.shape(dimensions)) for one in self.parameters)

    def weight_bytes(self, itemsize: int) -> int:
        """Bytes of the weights, scales included, at ``itemsize`` bytes for a number that is not quantised."""
        dimensions, total = self.dimensions, 0
        for one in self.parameters:
            shape = one.shape(dimensions)
            each = math.prod(shape) * (INTEGER_BYTES if one.integer else itemsize)
            if one.quantization is not None:
                each = math.prod(shape) + SCALE_BYTES * shape[0]
            total += len(one.copies) * each
        return total

    def param_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in the params -> shape, scales left out."""
        dimensions = self.dimensions
        return {one.name.format(*copy): one.shape(dimensions) for one, copy in expanded(self.parameters)}

    def with_quantization(self, quantization: str) -> Self:
        """The same with weights of eight bits, for configs that are language models."""
        raise ValueError(f"quantization={quantization!r}: expected none, the weights of a draft head are not quantised")

    def scale_names(self) -> dict[str, str]:
        """Name of every quantised parameter -> the name of its scales."""
        quantized = [one for one in self.parameters if one.quantization is not None]
        return {one.name.format(*copy): one.scale.format(*copy) for one, copy in expanded(quantized)}

    def integer_names(self) -> frozenset[str]:
        """Names of the parameters that are int32."""
        integers = [one for one in self.parameters if one.integer]
        return frozenset(one.name.format(*copy) for one, copy in expanded(integers))


def expanded(parameters: Sequence[Parameter]) -> Iterator[tuple[Parameter, tuple[int, ...]]]:
    """Every copy of every parameter: neighbours with the same copies alternate, so layers come one after another."""
    for copies, group in itertools.groupby(parameters, key=lambda one: one.copies):
        together = list(group)
        for copy in copies:
            yield from ((one, copy) for one in together)


def size_of(expression: str, dimensions: Mapping[str, int]) -> int:
    """The integer that a product such as ``NH`` or ``2D`` stands for."""
    return math.prod(int(factor) if factor.isdigit() else dimensions[factor] for factor in _factors(expression))


@functools.cache
def _factors(expression: str) -> tuple[str, ...]:
    factors = tuple(_FACTOR.findall(expression))
    assert "".join(factors) == expression, f"{expression!r} is no product of dimension letters"
    return factors


def indices(start: int, stop: int) -> tuple[tuple[int, ...], ...]:
    """The copies ``start .. stop - 1`` of a parameter with one index."""
    return tuple((i,) for i in range(start, stop))


def vector(name: str, tensor: str, axis: Axis, copies: Sequence[tuple[int, ...]] = ONCE) -> Parameter:
    """A parameter of one axis, such as the weight of a norm."""
    return Parameter(name, {tensor: axis}, copies=copies)


def matrix(name: str, tensor: str, rows: Axis, columns: Axis, copies: Sequence[tuple[int, ...]] = ONCE) -> Parameter:
    """A parameter of two axes that one tensor fills."""
    return Parameter(name, {tensor: rows}, (columns,), copies)


def linear(
    name: str,
    tensors: Mapping[str, Axis],
    reads: Axis,
    copies: Sequence[tuple[int, ...]] = ONCE,
    *,
    bias: bool = False,
    quantization: str | None = None,
) -> tuple[Parameter, ...]:
    """The weight of a linear map, ``[out, in]``, and its bias where it has one; names without ``.weight``."""

    def named(suffix: str) -> dict[str, Axis]:
        return {f"{tensor}.{suffix}": axis for tensor, axis in tensors.items()}

    weight = Parameter(f"{name}.weight", named("weight"), (reads,), copies, quantization)
    return (weight, Parameter(f"{name}.bias", named("bias"), copies=copies)) if bias else (weight,)


def decoder_layers(
    config: "ModelConfig",
    copies: Sequence[tuple[int, ...]],
    *,
    prefix: str = "",
    reads: Axis = EMBED,
    norms: Mapping[str, str] | None = None,
) -> tuple[Parameter, ...]:
    """The parameters of pre-norm decoder layers.

    Args:
      config: their sizes and biases.
      copies: which layers.
      prefix: what stands before ``layers.{}.`` in the checkpoint.
      reads: what the attention reads; D wide in a language model.
      norms: the norms before the attention, name in the params -> name in the checkpoint; by default the one of a
        language model.
    """
    ours, theirs = "layers.{}.", prefix + "layers.{}."
    norms = {"attention_norm": "input_layernorm"} if norms is None else norms
    before = {**norms, "mlp_norm": "post_attention_layernorm"}
    found = [
        vector(f"{ours}{name}.weight", f"{theirs}{tensor}.weight", EMBED, copies) for name, tensor in before.items()
    ]
    qkv, out = {"q_proj": HEADS, "k_proj": KV, "v_proj": KV}, {"o_proj": EMBED}
    for name, tensors, width, bias in (
        ("attention.qkv", {f"self_attn.{tensor}": axis for tensor, axis in qkv.items()}, reads, config.qkv_bias),
        ("attention.out", {f"self_attn.{tensor}": axis for tensor, axis in out.items()}, HEADS, config.output_bias),
        ("mlp.gate_up", {"mlp.gate_proj": MLP, "mlp.up_proj": MLP}, EMBED, config.mlp_bias),
        ("mlp.down", {"mlp.down_proj": EMBED}, MLP, config.mlp_bias),
    ):
        placed = {theirs + tensor: axis for tensor, axis in tensors.items()}
        found += linear(ours + name, placed, width, copies, bias=bias, quantization=config.quantization)
    for name in ("q_norm", "k_norm") if config.qk_norm else ():
        found.append(vector(f"{ours}attention.{name}.weight", f"{theirs}self_attn.{name}.weight", HEAD_DIM, copies))
    return tuple(found)


def language_model(config: "ModelConfig") -> tuple[Parameter, ...]:
    """The parameters of a causal language model. A tied embedding is quantised as the output head that it is, a
    separate one never."""
    kind, tied = config.quantization, config.tie_embeddings
    embedding = matrix("embedding", "model.embed_tokens.weight", VOCAB, EMBED)
    return (
        dataclasses.replace(embedding, quantization=kind if tied else None),
        *decoder_layers(config, indices(0, config.num_layers), prefix="model."),
        vector("norm.weight", "model.norm.weight", EMBED),
        *(() if tied else linear("head", {"lm_head": VOCAB}, EMBED, quantization=kind)),
    )
