"""``Weight``: a weight as it is stored, in any format of ``jspec.quantization.formats``, and what it stands for."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.quantization import codes, levels, mxfp4, mxfp4_pairs, nvfp4, unpack_pairs
from jspec.quantization.formats import SUPER, Format, StoredArray, num_groups
from jspec.quantization.tables import TABLES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight ``[..., out, in]`` as it is stored. With g the group of input i, it stands for

        W[o, i] = (numbers[o, i] - zero[o, g]) * scale[o, g] * channel_scale[o, 0] / channel_scale[o, 1] * input_scale[i]

    where an array that a format does not have is 1. The zero is ``scale[o, g, 1]`` where the format has zeros, and else
    ``Format.middle``, such as 8 for codes 0 .. 15. Where it has offsets, ``scale[o, g, 1]`` is added to the product with
    ``scale[o, g, 0]``. A number is an integer, a float, or what a code stands for. Leading axes, such as those of experts or
    heads, are those of all arrays but ``order`` and ``input_scale``. The arrays may be of NumPy or of JAX, or shapes.

    Attributes:
      numbers: ``[..., out, in]`` of ``form.numbers``, or packed codes ``[..., out, 16 bits blocks]``; of ``mxfp4_pairs``
        ``[pairs, ..., out, 32]``; without a format bfloat16 or float32.
      scale: ``[..., out]`` or ``[..., out, groups]`` of ``form.scale``, or with zeros or offsets ``[..., out, groups, 2]``;
        in levels ``[..., out, supers, words]``; of ``mxfp4_pairs`` ``[pairs, ..., out]``. None without a format.
      channel_scale: of NVFP4 float32 ``[..., out, 2]``, else None.
      order: int32 ``[in]``, which number of x each input of the weight is, where that has them in another order; else None.
      input_scale: float32 ``[in]``, in the order of x, what each input is multiplied by before the product; else None.
      form: the format; None for a weight that is not quantised.
      inputs: how many inputs the weight has, which packed codes do not tell; by default as many as there are numbers.
    """

    numbers: Any
    scale: Any = None
    channel_scale: Any = None
    order: Any = None
    input_scale: Any = None
    form: Format | None = dataclasses.field(default=None, metadata={"static": True})
    inputs: int = dataclasses.field(default=0, metadata={"static": True})

    def __post_init__(self):
        if not self.inputs:
            assert self.form is None or (not self.form.in_codes and not self.in_pairs), "inputs that codes do not tell"
            object.__setattr__(self, "inputs", self.numbers.shape[-1])

    @classmethod
    def of(cls, arrays: Mapping[str, Any], form: Format, inputs: int) -> "Weight":
        """The weight of a format, whose arrays have the names of ``Format.arrays``."""
        others = (arrays.get(name) for name in ("channel_scale", "order", "input_scale"))
        return cls(arrays["weight"], arrays["scale"], *others, form=form, inputs=inputs)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """``numbers``, ``scale``, ``channel_scale``, ``order`` and ``input_scale``."""
        return self.numbers, self.scale, self.channel_scale, self.order, self.input_scale

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., out, in)`` of what it stands for."""
        before = self.numbers.shape[1:-1] if self.in_pairs else self.numbers.shape[:-1]
        return *before, self.inputs

    @property
    def kind(self) -> str:
        """What it is: the kind of its format, or the dtype of its numbers if it has none."""
        return self.numbers.dtype.name if self.form is None else self.form.kind

    @property
    def is_plain(self) -> bool:
        """Whether it is not quantised: its numbers are what it stands for."""
        return self.form is None

    @property
    def per_channel(self) -> bool:
        """Whether each output channel has one scale."""
        return self.form is not None and self.form.per_channel

    @property
    def zeros(self) -> bool:
        """Whether groups have zeros of their own, beside their scales."""
        return self.form is not None and self.form.zeros

    @property
    def group(self) -> int | None:
        """How many inputs share a scale; None if all of an output channel do, or there are no scales."""
        return None if self.form is None else self.form.group

    @property
    def packed(self) -> bool:
        """Whether ``numbers`` are packed codes."""
        return self.form is not None and self.form.packed

    @property
    def in_groups(self) -> bool:
        """Whether groups of inputs share scales, as in FP8 blocks and in codes."""
        return self.form is not None and not self.form.per_channel

    @property
    def scales_sums(self) -> bool:
        """Whether kernels multiply the sums of groups of inputs by their scales, rather than the numbers."""
        return self.form is not None and not (self.form.per_channel or self.form.scales_numbers)

    @property
    def in_pairs(self) -> bool:
        """Whether pairs of groups come first, as in ``mxfp4_pairs``."""
        return self.form is not None and self.form.in_pairs

    def __getitem__(self, rows) -> "Weight":
        """The output channels ``rows``, or the tokens of an embedding: an index of the first axis."""
        return self._each(lambda array: array[rows])

    def split(self, parts: int) -> "Weight":
        """``[parts out, in]`` as ``[parts, out, in]``: maps of experts or of heads, which are stored one after another."""
        axis = 1 if self.in_pairs else 0

        def by_part(array):
            before, after = array.shape[:axis], array.shape[axis + 1 :]
            return array.reshape(*before, parts, array.shape[axis] // parts, *after)

        return self._each(by_part)

    def of_inputs(self, inputs: slice) -> "Weight":
        """The part ``[out, inputs]`` of a weight ``[out, in]`` without an order. It begins with a group, and with a block of
        packed codes."""
        form, count = self.form, len(range(self.inputs)[inputs])
        numbers, scale = self.numbers[..., inputs], self.scale
        if self.packed:
            assert form is not None
            first, stop = (i // codes.BLOCK * form.block_bytes for i in (inputs.start, inputs.stop))
            numbers = self.numbers[:, first:stop]
        if form is not None and form.group is not None:
            size = SUPER if form.levels else form.group
            scale = scale[:, inputs.start // size : num_groups(inputs.stop, size)]
        input_scale = None if self.input_scale is None else self.input_scale[inputs]
        return dataclasses.replace(self, numbers=numbers, scale=scale, input_scale=input_scale, inputs=count)

    def multiplied(self) -> Any:
        """What products multiply x of bfloat16 by, float32 ``[..., out, in]`` in the order of x: what it stands for, but for
        formats that ``rounds_products``, whose numbers are multiplied by their scales in bfloat16."""
        form = self.form
        if form is None or not form.rounds_products:
            return self.dequantize(rounded=True)
        scale, offset = (None if of is None else self._of_inputs(of) for of in self._scales(True))
        if form.table is None:
            return self._in_order_of_x(rounded_product(self._differences(True), scale, offset))
        table, code = TABLES[form.table], codes.unpack_codes(self.numbers, self.inputs)
        product = rounded_product(self._xp.asarray(table.multiples)[code], scale)
        return self._in_order_of_x(product * np.float32(1 / table.factor))

    def dequantize(self, rounded: bool = False) -> Any:
        """What it stands for, float32 ``[..., out, in]`` in the order of x. Arrays of NumPy give one of NumPy, and arrays of
        JAX one of JAX. The numbers of a table are ``rounded`` as kernels multiply x of bfloat16 by them; all others are so
        anyway."""
        return self._in_order_of_x(self._in_stored_order(rounded))

    def _in_order_of_x(self, numbers) -> Any:
        """Numbers ``[..., in]`` in the order of ``self.numbers``, times those of inputs."""
        if self.order is not None and isinstance(numbers, jax.Array):
            numbers = numbers.at[..., self.order].set(numbers)
        elif self.order is not None:
            numbers = numbers[..., np.argsort(self.order)]
        if self.input_scale is None:
            return numbers
        return numbers * self._xp.broadcast_to(self.input_scale, numbers.shape)

    def _in_stored_order(self, rounded: bool) -> Any:
        """The same with the inputs in the order of ``numbers``."""
        if self.in_pairs:
            wide = unpack_pairs.dequantize(self.numbers, self.scale, self.inputs).astype(np.float32)
            return self._xp.asarray(wide)
        if self.in_groups:
            scale, offset = self._scales()
            product = self._differences(rounded) * self._of_inputs(scale)
            return product if offset is None else product + self._of_inputs(offset)
        numbers = self.numbers.astype(np.float32)
        return numbers if self.form is None else numbers * self.scale[..., None]

    def _differences(self, rounded: bool) -> Any:
        """The numbers, or those of codes less their zeros; half of them where scales are powers of two. Those of a table are
        ``rounded`` or not."""
        form = self.form
        assert form is not None
        numbers = codes.unpack_codes(self.numbers, self.inputs, form.bits) if form.packed else self.numbers
        if form.table:
            return self._xp.asarray(TABLES[form.table].values(rounded))[numbers]
        if form.e2m1:
            return self._xp.asarray(nvfp4.VALUES / (2 if form.scales == "powers" else 1))[numbers]
        numbers = numbers.astype(np.float32)
        if form.scales == "powers":
            return numbers / 2
        if form.zeros:
            return numbers - self._of_inputs(self.scale[..., 1].astype(np.float32))
        return numbers - np.float32(form.middle) if form.middle else numbers

    def _scales(self, rounded: bool = False) -> tuple[Any, Any]:
        """The scale of each group, twice that if it is a power of two, because such powers may be subnormal; and its offset
        or None. The numbers of levels are ``rounded`` or not."""
        form = self.form
        assert form is not None
        if form.scales == "powers":
            return mxfp4.twice_powers(self.scale), None
        if form.levels:
            return levels.unpack_levels(self.scale, form, rounded)
        beside = form.zeros or form.offsets
        scale = (self.scale[..., 0] if beside else self.scale).astype(np.float32)
        if form.channel_numbers:
            scale = scale * self.channel_scale[..., :1] / self.channel_scale[..., 1:]
        return scale, self.scale[..., 1].astype(np.float32) if form.offsets else None

    def _of_inputs(self, of_groups) -> Any:
        """Numbers of groups, ``[..., groups]``, repeated for each input of their group: ``[..., in]``."""
        size, shape = min((self.form and self.form.group) or self.inputs, self.inputs), of_groups.shape
        repeated = self._xp.broadcast_to(of_groups[..., None], (*shape, size))
        return repeated.reshape(*shape[:-1], -1)[..., : self.inputs]

    @property
    def _xp(self) -> Any:
        """The library of its arrays."""
        return jnp if isinstance(self.numbers, jax.Array) else np

    def _each(self, change) -> "Weight":
        """With each array changed but those of inputs."""
        arrays = (self.numbers, self.scale, self.channel_scale)
        numbers, scale, channel_scale = (None if array is None else change(array) for array in arrays)
        return dataclasses.replace(self, numbers=numbers, scale=scale, channel_scale=channel_scale)


def random_weight(key, shape: tuple[int, int], std: float, *, dtype, form: Format | None = None) -> Weight:
    """A weight of about normal numbers, or of equally likely codes of E2M1, of a table, and of five or six bits.

    Args:
      key: the PRNG key.
      shape: (out, in).
      std: standard deviation of what it stands for; where scales are powers of two, up to a factor of the square root of 2.
      dtype: of a weight that is not quantised.
      form: the format; None for a weight that is not quantised.
    """
    if form is None:
        return Weight(std * jax.random.normal(key, shape, dtype))
    arrays = form.arrays(shape)
    equally = form.e2m1 or form.table or form.bits in codes.SHARING
    make = _random_bits if equally else _random_codes if form.in_codes else _random_numbers
    numbers, scale = make(key, arrays["weight"], form), _scale_of_random(std, form)
    offset = -scale * (1 << (form.bits - 1))
    if form.levels:
        scale = jnp.broadcast_to(levels.pack_same(scale, offset, form), arrays["scale"].shape)
    else:
        scale = jnp.full(arrays["scale"].shape[: 1 if form.per_channel else 2], scale, form.scale)
    if form.zeros:
        scale = jnp.stack([scale, jnp.full_like(scale, codes.ZERO if form.bits == 4 else 0)], axis=-1)
    elif form.offsets and not form.levels:
        scale = jnp.stack([scale, jnp.full_like(scale, offset)], axis=-1)
    channel_scale = jnp.asarray([[std / nvfp4.STD_OF_RANDOM_CODES, 1]], jnp.float32)
    return Weight(
        numbers,
        scale,
        jnp.repeat(channel_scale, shape[0], axis=0) if form.channel_numbers else None,
        jnp.arange(shape[1], dtype=jnp.int32) if form.ordered else None,
        jnp.ones(shape[1], jnp.float32) if form.scaled_inputs else None,
        form,
        shape[1],
    )


def _scale_of_random(std: float, form: Format) -> float:
    """The scale of all random numbers or codes of a format, as it is stored."""
    if form.table:
        return std / float(np.sqrt(np.mean(np.square(TABLES[form.table].values()))))
    if form.e2m1:
        power = mxfp4.ONE + round(float(np.log2(std / nvfp4.STD_OF_RANDOM_CODES)))
        return {"nvfp4": 1, "mxfp4": power, "mxfp4_pairs": mxfp4_pairs.factors(power, power)}[form.kind]
    if form.in_codes:
        return (3**0.5 if form.bits in codes.SHARING else 3) * std / (1 << (form.bits - 1))
    scale = 4 * std / form.largest
    return mxfp4.ONE + round(float(np.log2(scale))) if form.scales == "powers" else scale


_compiled_once = functools.partial(jax.jit, static_argnames=("array", "form"))  # and not operation by operation


@_compiled_once
def _random_numbers(key, array: StoredArray, form: Format) -> jax.Array:
    """Numbers of eight bits."""
    numbers = jnp.clip(jax.random.normal(key, array.shape) * form.largest / 4, -form.largest, form.largest)
    return (jnp.round(numbers) if array.dtype == "int8" else numbers).astype(array.dtype)


@_compiled_once
def _random_codes(key, array: StoredArray, form: Format) -> jax.Array:
    """Codes of integers, packed if they have four bits."""
    half = 1 << (form.bits - 1)  # as many codes lie below the middle
    each = (2,) if form.packed else (1,)  # codes of a byte
    numbers = jax.random.normal(key, (*array.shape, *each)) * (half / 3)
    numbers = jnp.clip(jnp.round(numbers), -half, half - 1)
    if not form.packed:
        return numbers[..., 0].astype(np.int8)
    both = (numbers + half).astype(np.uint8)
    return both[..., 0] | both[..., 1] << 4


@_compiled_once
def _random_bits(key, array: StoredArray, form: Format) -> jax.Array:
    """Codes that are equally likely."""
    del form
    return jax.random.bits(key, array.shape, np.uint8)


def rounded_product(numbers, scale, offset=None) -> Any:
    """Numbers that bfloat16 holds times their scales, plus offsets if there are any: these are rounded to bfloat16, and the
    result is once. It is float32, of NumPy or of JAX."""
    scale, offset = (None if of is None else of.astype(jnp.bfloat16).astype(np.float32) for of in (scale, offset))
    product = numbers * scale
    return (product if offset is None else product + offset).astype(jnp.bfloat16).astype(np.float32)
