"""Which kernel computes a product: ``matmul``, through which every product goes, and the table that it reads.

Products of experts are one kernel for weights of every form, with a tiling for each (``jspec.pallas.moe.grouped_mlp``).

Figures are in ``benchmarks/log/bf16-products.md`` and ``benchmarks/log/quantised-products.md``."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas import dispatch
from jspec.pallas.dispatch import on_hopper, row_of, wants_one_order
from jspec.pallas.matmul.bf16 import bf16_matmul
from jspec.pallas.matmul.few_tokens import few_tokens_matmul, tiling_of
from jspec.pallas.matmul.one_token import padded_matmul, reduction_matmul
from jspec.pallas.matmul.partial_sums import PartialSums, all_reduce
from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.reference import matmul_reference, per_feature
from jspec.pallas.matmul.sm90_tiling import MosaicTiling
from jspec.pallas.matmul.w8a8 import w8a8_matmul, w8a8_matmul_reference
from jspec.pallas.matmul.weight_only import weight_only_matmul, weight_only_matmul_reference
from jspec.quantization.formats import KINDS
from jspec.quantization.weight import Weight


def matmul(
    x,
    weight: Weight | jax.Array,
    bias=None,
    *,
    dtype=None,
    reduce_axis: str | None = None,
    allow_partial_sums: bool = False,
) -> Any:
    """The linear map ``[..., in], [out, in] -> [..., out]``, plus a bias, by the first row of ``TABLE`` that serves it.

    Sums are computed in float32 and rounded once. fp32 is multiplied in full fp32, never in TF32. int8 and fp8 numbers
    are exact in bfloat16 and float32: they are multiplied as they are, and each sum is multiplied by the scale of its
    output channel, or those over 128 inputs by the scale of their block. Numbers of four bits are multiplied by their scales
    first (``Weight.multiplied``). The conversion takes place inside the product, so no dequantised copy of the weight is
    ever written.

    Args:
      x: bfloat16 or float32, or ``QuantizedActivations`` of the weight's dtype for one of int8 or FP8 with a scale for
        each output channel.
      weight: ``[out, in]``, of any format; an array of x's dtype is a weight without one.
      bias: ``[out]``, or None.
      dtype: of the result; that of x if None.
      reduce_axis: the mesh axis whose shards have parts of the inputs each. Products are added up over them, to the same
        bits in each shard, before the bias is added. None if all inputs are here.
      allow_partial_sums: whether the result may be ``PartialSums``, as that of shards then is. It is not if there is a
        bias without a ``reduce_axis``.
    """
    weight = weight if isinstance(weight, Weight) else Weight(weight)
    if weight.input_scale is not None:  # XLA does so where x is computed, unless a kernel computes it
        x = (x.astype(jnp.float32) * per_feature(weight.input_scale, x)).astype(x.dtype)
        weight = dataclasses.replace(weight, input_scale=None)
    if weight.order is not None:
        if reduce_axis is not None:  # a shard's inputs may be anywhere among those of all
            x = jax.lax.all_gather(x, reduce_axis, axis=x.ndim - 1, tiled=True)
        x, weight = jnp.take(x, weight.order, axis=-1), dataclasses.replace(weight, order=None)
    to_reduce = allow_partial_sums and reduce_axis is not None
    in_parts = to_reduce or (allow_partial_sums and bias is None)
    product = Product(x, weight, bias, dtype or x.dtype, in_parts, wants_one_order())
    row = row_of(TABLE, product, product.one_order)
    if row.adds_bias and reduce_axis is None:
        return row.compute(product)
    y = row.compute(product._replace(bias=None))
    if to_reduce:
        summands = y.summands if isinstance(y, PartialSums) else y[..., None, :]
        return PartialSums(summands, bias, reduce_axis)
    y = all_reduce(y, reduce_axis)
    return y if bias is None else y + per_feature(bias, y)


class Product(NamedTuple):
    """A product by which a row is chosen, and that the row computes; see ``matmul``. It may have shapes in place of
    arrays."""

    x: Any
    weight: Weight
    bias: Any = None
    dtype: Any = jnp.float32
    allow_partial_sums: bool = False
    one_order: bool = False

    @property
    def activations(self) -> str:
        """The dtype of the numbers of x."""
        return (self.x.numbers if isinstance(self.x, QuantizedActivations) else self.x).dtype.name


def xla_matmul(product: Product) -> Any:
    """Any product, as XLA computes it: the reference implementation for what x and weight are."""
    x, weight, _, dtype, *_ = product
    if isinstance(x, QuantizedActivations):
        return w8a8_matmul_reference(x, weight.numbers, weight.scale)
    if weight.is_plain:
        return matmul_reference(x, weight.numbers, None if dtype == x.dtype else dtype)
    return weight_only_matmul_reference(x, weight, dtype)


_UNLIMITED = range(sys.maxsize)
_BF16, _FLOATS = ("bfloat16",), ("bfloat16", "float32")
_CODES, _EIGHT_BITS = tuple(form.kind for form in KINDS.values() if form.packed), ("int8", "fp8")
_MOSAIC_CODES = tuple(kind for kind in _CODES if kind != "mxfp4")
_GROUPS_OF_EIGHT = ("fp8_block", "mxfp8", "int8_groups")


@dataclasses.dataclass(frozen=True)
class Row(dispatch.Row):
    """A row of the table: a way to compute products on an NVIDIA GPU, and the products that it serves. On other platforms
    it computes the reference implementation, in partial sums where the kernel gives them.

    Attributes:
      name: what the row is.
      compute: the result for a ``Product``.
      activations: dtypes of x; x of eight bits is ``QuantizedActivations``.
      weights: kinds of formats (``jspec.quantization.formats``), and dtypes of weights without one.
      tokens, numbers, inputs: how many tokens, elements of the weight's array and input features.
      hopper: whether it is for Hopper GPUs alone.
      widens: whether it gives float32 for x of bfloat16, too.
      with_bias, adds_bias: whether it serves products that have a bias, and whether it adds the bias itself.
      divides: how it divides a product that it serves otherwise, or in words why it cannot.
      order: as of ``dispatch.Row``.
    """

    name: str
    compute: Callable[[Product], jax.Array | PartialSums]
    activations: tuple[str, ...] = ("int8", "float8_e4m3fn", *_FLOATS)
    weights: tuple[str, ...] = (*_CODES, *_EIGHT_BITS, *_GROUPS_OF_EIGHT, *_FLOATS)
    tokens: range = _UNLIMITED
    numbers: range = _UNLIMITED
    inputs: range = _UNLIMITED
    hopper: bool = False
    widens: bool = True
    with_bias: bool = True
    adds_bias: bool = False
    divides: Callable[[Product], MosaicTiling | str | None] = lambda _: None
    order: str | None = None

    def conditions(self, p: Product) -> Iterator[tuple[bool, str]]:
        """What the row asks of a product: whether that is so, and what to say if it is not."""
        tokens, numbers, inputs = math.prod(p.x.shape[:-1]), p.weight.numbers.size, p.x.shape[-1]
        yield p.activations in self.activations, f"x is {p.activations}, not {_any(self.activations)}"
        yield p.weight.kind in self.weights, f"the weight is {p.weight.kind}, not {_any(self.weights)}"
        if not (p.one_order and self.order):  # or another row would be faster
            yield tokens in self.tokens, f"{tokens} tokens are not {_within(self.tokens)}"
            yield numbers in self.numbers, f"{numbers} numbers of the weight are not {_within(self.numbers)}"
            yield self.with_bias or p.bias is None, "it has a bias"
        yield inputs in self.inputs, f"{inputs} inputs are not {_within(self.inputs)}"
        yield self.widens or p.dtype == p.x.dtype, f"the result is {p.dtype}, not that of x"
        yield not self.hopper or on_hopper(), "this is no Hopper GPU"
        divided = self.divides(p)
        yield not isinstance(divided, str), str(divided)


def _any(names: tuple[str, ...]) -> str:
    return " or ".join(names)


def _within(limits: range) -> str:
    first, last = limits.start, limits.stop - 1
    if limits.stop == sys.maxsize:
        return f"{first} or more"
    return str(last) if first == last else f"{first} to {last}"


_ONE, _SEVERAL, _MANY = range(1, 2), range(2, 65), range(1, 513)  # tokens
_SOME, _MEDIUM = range(2**23, sys.maxsize), range(2**24, 2**26)  # numbers
_LARGE, _REDUCED = range(2**25, sys.maxsize), range(10_000_001, sys.maxsize)


def _few_tokens(
    name: str,
    weights: tuple[str, ...],
    tokens: range = _UNLIMITED,
    with_bias: bool = True,
    small: bool = False,
) -> Row:
    """A row of the kernel for few tokens, which serves any number where there must be one order of sums; or, if ``small``,
    weights that are too small for every multiprocessor to read, whatever the order."""
    return Row(
        name,
        lambda p: few_tokens_matmul(p.x, p.weight, p.dtype, p.allow_partial_sums),
        activations=_BF16,
        weights=weights,
        tokens=tokens,
        numbers=_UNLIMITED if small else _SOME,
        hopper=True,
        with_bias=with_bias,
        divides=lambda p: tiling_of(p.x, p.weight, p.dtype, p.allow_partial_sums, p.one_order or small),
        order=None if small else "chain",
    )


def _weight_only(p: Product) -> jax.Array:
    return weight_only_matmul(p.x, p.weight, p.dtype)


TABLE = (
    Row(
        "W8A8",
        lambda p: w8a8_matmul(p.x, p.weight.numbers, p.weight.scale, p.allow_partial_sums),
        activations=("int8",),
        weights=("int8",),
        tokens=_MANY,  # XLA's product of more tokens is as fast
        hopper=True,
    ),
    # [28672, 4096] with 1, 16, 80 and 320 tokens: 23, 24, 37 and 123 us on an H200, and of NVFP4 40, 44, 54 and 145. The row
    # that follows took 36, 36, 121 and 447 on an H100, and of NVFP4 51, 51, 131 and 375.
    _few_tokens("few tokens, codes", weights=_MOSAIC_CODES),
    # Of more than 32 tokens the next row hardly divides the inputs among program instances: [1024, 4096] has 16 with 80.
    # Rounds of an 8B in Q4_K_M were slow there (benchmarks/log/gguf.md). With this kernel they have not been timed yet.
    _few_tokens("few tokens, codes of small weights", weights=_MOSAIC_CODES, tokens=range(33, 321), small=True),
    # Every tile of tokens reads and dequantises the weight again. XLA would write it in float32. MXFP4 is multiplied here,
    # too.
    Row("codes", _weight_only, activations=_BF16, weights=_CODES),
    # [28672, 4096] with 16, 80, 320 and 2,048 tokens: 36, 43, 120 and 730 us on an H200. The rows that follow take 41, 72,
    # 224 and 867. XLA's product of five is faster, and so is a whole round of one, which it multiplies as eight.
    _few_tokens("few tokens, eight bits", weights=_EIGHT_BITS, tokens=range(9, sys.maxsize)),
    # With 1, 16, 80 and 320 tokens: 37, 36, 55 and 159 us. The row that follows takes 40, 44, 157 and 431. Tokens that are
    # no whole eights are copied with zeros first.
    _few_tokens("few tokens, FP8 blocks", weights=("fp8_block", "mxfp8")),
    _few_tokens("few tokens, small groups", weights=("int8_groups",)),
    _few_tokens("few tokens, groups of small weights", weights=_GROUPS_OF_EIGHT, tokens=range(33, 321), small=True),
    # XLA would write the dequantised weight; with many tokens it was not compared.
    Row("groups, eight bits", _weight_only, activations=_BF16, weights=_GROUPS_OF_EIGHT),
    # XLA's product is as fast with small weights, and faster with more tokens. That of fp8 was not compared.
    Row("int8", _weight_only, activations=_BF16, weights=("int8",), tokens=_SEVERAL, numbers=_LARGE),
    Row(
        "one token, eight bits",
        lambda p: padded_matmul(p.x, p.weight.numbers, p.weight.scale, p.dtype),
        activations=_FLOATS,
        weights=_EIGHT_BITS,
        tokens=_ONE,
    ),
    # On an H200 a reduction of bfloat16 weights is up to 15% faster than the matrix product that XLA makes ([28672, 4096]:
    # 57.9 us and 62.8), but slower with longer sums ([5120, 25600]: 72.6 us and 66.9). Of smaller weights XLA makes a
    # reduction by itself.
    Row(
        "one token, reduction",
        lambda p: reduction_matmul(p.x, p.weight.numbers, p.bias),
        activations=_FLOATS,
        weights=_FLOATS,
        tokens=_ONE,
        numbers=_REDUCED,
        inputs=range(16_385),
        widens=False,
        adds_bias=True,
    ),
    # [28672, 4096], [4096, 14336] and [4096, 4096] with 80 tokens: 63, 36 and 15 us on an H200; XLA takes 66, 36 and 20.
    # With one token 56, 31 and 12, where the reduction takes 54, 28 and 10; with 320 130, 59 and 24, and XLA 114, 57 and 25.
    _few_tokens("few tokens, bf16", weights=_BF16, tokens=range(65, 81), with_bias=False),
    # XLA's products of larger weights are as fast, and rounds in which the target reads 80 tokens are no slower with XLA's.
    # Smaller weights were not compared. A bias would be a launch more.
    Row(
        "bf16",
        lambda p: bf16_matmul(p.x, p.weight.numbers, p.allow_partial_sums),
        activations=_BF16,
        weights=_BF16,
        tokens=_SEVERAL,
        numbers=_MEDIUM,
        hopper=True,
        widens=False,
        with_bias=False,
    ),
    Row("XLA", xla_matmul),
)
