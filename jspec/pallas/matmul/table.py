"""Which kernel computes a product: ``matmul``, through which every product goes, and the table that it reads.

Products of experts are one kernel for weights of every form, with a tiling for each (``jspec.pallas.moe.grouped_mlp``).

Figures are in ``benchmarks/log/bf16-products.md`` and ``benchmarks/log/quantised-products.md``."""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import on_hopper
from jspec.pallas.matmul.bf16 import bf16_matmul
from jspec.pallas.matmul.few_tokens import few_tokens_matmul, tiling_of
from jspec.pallas.matmul.one_token import padded_matmul, reduction_matmul
from jspec.pallas.matmul.partial_sums import PartialSums, all_reduce
from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.reference import matmul_reference, per_feature
from jspec.pallas.matmul.w8a8 import w8a8_matmul, w8a8_matmul_reference
from jspec.pallas.matmul.weight_only import weight_only_matmul, weight_only_matmul_reference
from jspec.quantization.mxfp4 import is_mxfp4


def matmul(
    x,
    weight,
    scale=None,
    bias=None,
    *,
    dtype=None,
    reduce_axis: str | None = None,
    allow_partial_sums: bool = False,
    channel_scale=None,
) -> Any:
    """The linear map ``[..., in], [out, in] -> [..., out]``, plus a bias, by the first row of ``TABLE`` that serves it.

    Sums are computed in float32 and rounded once. fp32 is multiplied in full fp32, never in TF32. int8 and fp8 numbers
    are exact in bfloat16 and float32: they are multiplied as they are, and each sum is multiplied by the scale of its
    output channel, or those over 128 inputs by the scale of their block, and of codes of four bits, less their zero, those
    over a group by its scale. The conversion takes place inside the product, so no dequantised copy of the weight is ever
    written.

    Args:
      x: bfloat16 or float32, or ``QuantizedActivations`` of the weight's dtype for one of int8 or FP8 with a scale for
        each output channel.
      weight: ``[out, in]`` of x's dtype, int8 or float8_e4m3fn; or codes of four bits, uint8 ``[out, 64 blocks]``.
      scale: of a quantised weight, float32 ``[out]``; of FP8 in blocks (``jspec.quantization.fp8_block``) float32
        ``[out, groups]``, of codes (``jspec.quantization.codes``) ``[out, groups]`` or ``[out, groups, 2]``, and of MXFP4
        (``jspec.quantization.mxfp4``) uint8 ``[out, groups]``.
      bias: ``[out]``, or None.
      dtype: of the result; that of x if None.
      reduce_axis: the mesh axis whose shards have parts of the inputs each. Products are added up over them, to the same
        bits in each shard, before the bias is added. None if all inputs are here.
      allow_partial_sums: whether the result may be ``PartialSums``, as that of shards then is. It is not if there is a
        bias without a ``reduce_axis``.
      channel_scale: of NVFP4 (``jspec.quantization.nvfp4``), float32 ``[out, 2]``; else None.
    """
    to_reduce = allow_partial_sums and reduce_axis is not None
    in_parts = to_reduce or (allow_partial_sums and bias is None)
    product = Product(x, weight, scale, bias, dtype or x.dtype, in_parts, channel_scale)
    row = row_of(product)
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
    weight: Any
    scale: Any = None
    bias: Any = None
    dtype: Any = jnp.float32
    allow_partial_sums: bool = False
    channel_scale: Any = None

    @property
    def in_blocks(self) -> bool:
        """Whether the weight is FP8 in blocks."""
        return self.stored == "fp8_block"

    @property
    def stored(self) -> str:
        """What the weight is: its dtype, or ``fp8_block`` or ``int8_groups`` if groups of its inputs have scales."""
        name: str = self.weight.dtype.name
        in_groups = self.scale is not None and self.scale.ndim > 1
        return _IN_GROUPS.get(name, name) if in_groups else name


def xla_matmul(product: Product) -> Any:
    """Any product, as XLA computes it: the reference implementation for what x and weight are."""
    x, weight, scale, dtype = product.x, product.weight, product.scale, product.dtype
    if isinstance(x, QuantizedActivations):
        return w8a8_matmul_reference(x, weight, scale)
    if scale is not None:
        return weight_only_matmul_reference(x, weight, scale, dtype, product.channel_scale)
    return matmul_reference(x, weight, None if dtype == x.dtype else dtype)


_UNLIMITED = range(sys.maxsize)
_BF16, _FLOATS = ("bfloat16",), ("bfloat16", "float32")
_IN_GROUPS = {"float8_e4m3fn": "fp8_block", "int8": "int8_groups"}
_FOUR_BITS, _INT8, _EIGHT_BITS, _FP8_BLOCKS = ("uint8",), ("int8",), ("int8", "float8_e4m3fn"), ("fp8_block",)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: a way to compute products on an NVIDIA GPU, and the products that it serves. On other platforms
    it computes the reference implementation, in partial sums where the kernel gives them.

    Attributes:
      name: what the row is.
      compute: the result for a ``Product``.
      activations, weights: dtypes of x and of the weight as they are stored, as ``Product.stored`` has it; x of eight bits
        is ``QuantizedActivations``.
      tokens, numbers, inputs: how many tokens, numbers of the weight and input features.
      hopper: whether it is for Hopper GPUs alone.
      widens: whether it gives float32 for x of bfloat16, too.
      with_bias, adds_bias: whether it serves products that have a bias, and whether it adds the bias itself.
      suits: what else it asks of a product: whether there is a way to divide it.
    """

    name: str
    compute: Callable[[Product], jax.Array | PartialSums]
    activations: tuple[str, ...] = (*_EIGHT_BITS, *_FLOATS)
    weights: tuple[str, ...] = ("uint8", *_EIGHT_BITS, *_IN_GROUPS.values(), *_FLOATS)
    tokens: range = _UNLIMITED
    numbers: range = _UNLIMITED
    inputs: range = _UNLIMITED
    hopper: bool = False
    widens: bool = True
    with_bias: bool = True
    adds_bias: bool = False
    suits: Callable[[Product], bool] = lambda _: True

    def serves(self, product: Product) -> bool:
        """Whether the row is for a product in programs for this machine's GPU."""
        x, weight, bias, dtype = product.x, product.weight, product.bias, product.dtype
        activations = x.numbers if isinstance(x, QuantizedActivations) else x
        return (
            activations.dtype.name in self.activations
            and product.stored in self.weights
            and math.prod(x.shape[:-1]) in self.tokens
            and weight.size in self.numbers
            and x.shape[-1] in self.inputs
            and (self.widens or dtype == x.dtype)
            and (self.with_bias or bias is None)
            and (not self.hopper or on_hopper())
            and self.suits(product)
        )


_ONE, _SEVERAL, _MANY = range(1, 2), range(2, 65), range(1, 513)  # tokens
_SOME, _MEDIUM = range(2**23, sys.maxsize), range(2**24, 2**26)  # numbers
_LARGE, _REDUCED = range(2**25, sys.maxsize), range(10_000_001, sys.maxsize)


def _few_tokens(p: Product) -> jax.Array | PartialSums:
    return few_tokens_matmul(p.x, p.weight, p.scale, p.dtype, p.allow_partial_sums, p.channel_scale)


def _suits_few_tokens(p: Product) -> bool:
    if is_mxfp4(p.scale):
        return False
    return tiling_of(p.x, p.weight, p.scale, p.dtype, p.allow_partial_sums, p.channel_scale) is not None


TABLE = (
    # XLA's product of more tokens is as fast.
    Row("W8A8", lambda p: w8a8_matmul(p.x, p.weight, p.scale, p.allow_partial_sums), _INT8, _INT8, _MANY, hopper=True),
    # [28672, 4096] with 1, 16, 80 and 320 tokens: 30, 31, 43 and 130 us on an H100, and of NVFP4 40, 43, 50 and 144. The row
    # that follows takes 36, 36, 121 and 447, and of NVFP4 51, 51, 131 and 375.
    Row("few tokens, four bits", _few_tokens, _BF16, _FOUR_BITS, numbers=_SOME, hopper=True, suits=_suits_few_tokens),
    # Every tile of tokens reads and dequantises the weight again. XLA would write it in float32. MXFP4 is multiplied here,
    # too.
    Row(
        *(
            "four bits",
            lambda p: weight_only_matmul(p.x, p.weight, p.scale, p.dtype, p.channel_scale),
            _BF16,
            _FOUR_BITS,
        )
    ),
    # [28672, 4096] with 16, 80 and 320 tokens: 36, 43 and 120 us on an H200. The rows that follow take 41, 72 and 224. XLA's
    # product of five is faster, and so is a whole round of one, which it multiplies as eight.
    Row(
        "few tokens, eight bits",
        _few_tokens,
        _BF16,
        _EIGHT_BITS,
        range(9, 321),
        _SOME,
        hopper=True,
        suits=_suits_few_tokens,
    ),
    # With 1, 16, 80 and 320 tokens: 37, 36, 55 and 159 us. The row that follows takes 40, 44, 157 and 431. Tokens that are
    # no whole eights are copied with zeros first.
    Row("few tokens, FP8 blocks", _few_tokens, _BF16, _FP8_BLOCKS, numbers=_SOME, hopper=True, suits=_suits_few_tokens),
    # XLA would write the dequantised weight; with many tokens it was not compared.
    Row(
        *("groups, eight bits", lambda p: weight_only_matmul(p.x, p.weight, p.scale, p.dtype), _BF16),
        weights=tuple(_IN_GROUPS.values()),
    ),
    # XLA's product is as fast with small weights, and faster with more tokens. That of fp8 was not compared.
    Row("int8", lambda p: weight_only_matmul(p.x, p.weight, p.scale, p.dtype), _BF16, _INT8, _SEVERAL, _LARGE),
    Row("one token, eight bits", lambda p: padded_matmul(p.x, p.weight, p.scale, p.dtype), _FLOATS, _EIGHT_BITS, _ONE),
    # On an H200 a reduction of bfloat16 weights is up to 15% faster than the matrix product that XLA makes ([28672, 4096]:
    # 57.9 us and 62.8), but slower with longer sums ([5120, 25600]: 72.6 us and 66.9). Of smaller weights XLA makes a
    # reduction by itself.
    Row(
        *("one token, reduction", lambda p: reduction_matmul(p.x, p.weight, p.bias), _FLOATS, _FLOATS, _ONE, _REDUCED),
        inputs=range(16_385),
        widens=False,
        adds_bias=True,
    ),
    # XLA's products of larger weights are as fast, and rounds in which the target reads 80 tokens are no slower with XLA's.
    # Smaller weights were not compared. A bias would be a launch more.
    Row(
        *("bf16", lambda p: bf16_matmul(p.x, p.weight, p.allow_partial_sums), _BF16, _BF16, _SEVERAL, _MEDIUM),
        hopper=True,
        widens=False,
        with_bias=False,
    ),
    Row("XLA", xla_matmul),
)


def row_of(product: Product) -> Row:
    """The first row of ``TABLE`` that serves a product."""
    return next(row for row in TABLE if row.serves(product))
