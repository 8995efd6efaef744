"""Products with stored weights: arguments, and the numbers that they stand for in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from normals import normal

from jspec.pallas.matmul import matmul
from jspec.quantization import codes, levels, nvfp4
from jspec.quantization.formats import known_format
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight


def problem(M: int, outputs: int, inputs: int, kind: str, extreme: bool = False, rounded: bool = True):
    """x of bfloat16, a weight, and the numbers that are multiplied, float64: with their scales, but for those of an output
    channel in eight bits. If ``rounded``, codes are multiplied by their scales in bfloat16, as kernels do."""
    rng = np.random.default_rng(M + outputs + inputs)
    x = normal(rng, (M, inputs), "bfloat16")
    if kind == "bfloat16":
        plain = normal(rng, (outputs, inputs), kind)
        return (x, Weight(plain)), np.asarray(plain, np.float64)
    form = known_format(kind)

    def stored(weight, scale) -> Weight:
        return Weight(jax.device_put(weight), jax.device_put(scale), form=form, inputs=inputs)

    if form.table or form.kind in ("int4", "int5", "int6", "int8_groups"):
        low, high = (0, 2**form.bits - 1) if form.packed else (-128, 127)
        values = rng.integers(low, high + 1, (outputs, inputs))
        if extreme:
            values = rng.choice([0, 7, 14, 15] if form.table else [low, high], (outputs, inputs))
        weight = codes.pack_codes(values.astype(np.uint8), form.bits) if form.packed else values.astype(np.int8)
        rounds = rounded and form.rounds_products
        stored_scale, each, zero, offset = _scales(rng, form, (outputs, inputs), rounds, extreme)
        assert [weight.shape, stored_scale.shape] == [a.shape for a in form.arrays((outputs, inputs)).values()]
        table = TABLES[form.table] if form.table else None
        numbers = values - zero if table is None else (table.multiples if rounded else table.values())[values]
        products = numbers * each + offset
        if rounds:
            products = products.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
        products = products * np.float32(1 / table.factor) if table is not None and rounded else products
        return (x, stored(weight, stored_scale)), products
    if kind == "int8":
        weight = (
            rng.choice([-128, -127, 0, 127], (outputs, inputs))
            if extreme
            else rng.integers(-128, 128, (outputs, inputs))
        )
        weight = jnp.asarray(weight, jnp.int8)
    else:
        numbers = (
            rng.choice([-448, 448, 2.0**-9, 0], (outputs, inputs)) if extreme else rng.normal(0, 50, (outputs, inputs))
        )
        weight = jnp.asarray(numbers, jnp.float8_e4m3fn)
    numbers = np.asarray(weight.astype(jnp.float32), np.float64)
    if kind == "fp8_block":
        scale = np.exp(rng.normal(-3, 1, (outputs, -(-inputs // 128)))).astype(np.float32)
        return (x, stored(weight, scale)), numbers * np.repeat(scale.astype(np.float64), 128, axis=1)[:, :inputs]
    if kind == "mxfp8":
        scale = rng.integers(100, form.largest_power + 1, (outputs, -(-inputs // 32)), np.uint8)
        each = np.ldexp(1.0, scale.astype(int) - 127).repeat(32, axis=1)[:, :inputs]
        return (x, stored(weight, scale)), numbers * each
    return (x, stored(weight, np.exp(rng.normal(-3, 1, outputs)).astype(np.float32))), numbers


def _scales(rng, form, shape: tuple[int, int], rounded: bool, extreme: bool):
    """Scales as they are stored; and of each number its scale, zero and offset, float64 ``[out, in]``, rounded to bfloat16
    if kernels multiply numbers by them."""
    outputs, inputs = shape
    if form.levels:
        supers, count = -(-inputs // 256), 256 // form.group
        low, high = (0, 63) if form.offsets else (-128, 127)
        number = rng.choice([1, -1], (outputs, supers, 1 + form.offsets)) * np.exp(
            rng.normal(-4, 1, (outputs, supers, 1))
        )
        number = number.astype(np.float16 if form.offsets else np.float32)
        integers = [
            rng.integers(low, high + 1, (outputs, supers, count)).astype(np.int8) for _ in range(1 + form.offsets)
        ]
        stored = levels.pack_levels(number, *integers)
        wide = _rounded(number.astype(np.float64)) if rounded else number.astype(np.float64)
        found = [(wide[..., i, None] * integer).reshape(outputs, -1) for i, integer in enumerate(integers)]
    else:
        groups = 1 if form.group is None else -(-inputs // form.group)
        scale = rng.choice([1, -1], (outputs, groups)) * np.exp(rng.normal(-3, 1, (outputs, groups)))
        beside = rng.normal(size=scale.shape) if form.offsets else np.zeros(scale.shape)
        if form.zeros:
            low, high = (0, 15) if form.packed else (-128, 127)
            beside = rng.choice([low, high + 1], scale.shape) if extreme else rng.integers(low, high + 2, scale.shape)
        stacked = np.stack([scale, beside], axis=-1) if form.zeros or form.offsets else scale
        stored = np.asarray(jnp.asarray(stacked, form.scale))
        found = (
            [np.asarray(stored, np.float64)]
            if stacked is scale
            else list(np.moveaxis(stored.astype(np.float64), -1, 0))
        )
    zero = found.pop() if form.zeros else np.full((outputs, 1), form.middle)
    found = [_rounded(of) for of in found] if rounded else found
    scale, offset = (*found, np.zeros((outputs, 1)))[:2]
    size = form.group or inputs
    return stored, *(
        np.repeat(of, size if of.shape[1] > 1 else inputs, axis=1)[:, :inputs] for of in (scale, zero, offset)
    )


def _rounded(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(ml_dtypes.bfloat16).astype(np.float64)


def check(got, args, numbers):
    """Sums in float32 may differ from exact ones by a little of what they add up."""
    x, weight = args
    factor = np.asarray(weight.scale, np.float64) if weight.per_channel else 1.0
    exact = np.asarray(x, np.float64)
    wanted, size = exact @ numbers.T * factor, np.abs(exact) @ np.abs(numbers).T * factor
    assert got.shape == wanted.shape
    assert got.dtype == jnp.float32
    assert (np.abs(np.asarray(got, np.float64) - wanted) <= 1e-5 * size + 1e-30).all()


def assert_product_is_rounded_once(weight: Weight, rows: tuple[int, ...], dtype: str):
    """``matmul`` of so many random tokens gives the sums of what the weight stands for, whatever their dtype; numbers of
    four bits, whose scales are those of bfloat16, are rounded to that of the tokens."""
    x = normal(np.random.default_rng(1), (*rows, weight.inputs), dtype)
    y = matmul(x, weight)
    assert y.dtype == dtype
    inputs, numbers = np.asarray(x, np.float64), np.asarray(weight.dequantize(), np.float64)
    numbers = numbers.astype(x.dtype).astype(np.float64) if weight.kind == "int4" else numbers
    exact, size = inputs @ numbers.T, np.abs(inputs) @ np.abs(numbers).T
    half_unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 8) if dtype == "bfloat16" else 0
    assert (np.abs(np.asarray(y, np.float64) - exact) <= half_unit + 1e-6 * size).all()


def nvfp4_problem(M: int, outputs: int, inputs: int):
    """x of bfloat16, a weight in NVFP4, and what they stand for in float64."""
    rng = np.random.default_rng(M)
    x = normal(rng, (M, inputs), "bfloat16")
    values = rng.integers(16, size=(outputs, inputs), dtype=np.uint8)
    every = np.array([0, 1, 8, 0x38, 0x7E], np.uint8)  # 0, the smallest number, the smallest normal one, 1 and 448
    bits = np.where(
        rng.integers(2, size=(outputs, -(-inputs // 16))), rng.choice(every, 1), rng.integers(0x30, 0x48, 1)
    )
    bits[:5, 0] = every
    scale = bits.astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    numbers = np.stack([rng.uniform(1, 3, outputs), rng.uniform(1, 3, outputs)], axis=-1).astype(np.float32)
    each = np.repeat(scale.astype(np.float64), 16, axis=1)[:, :inputs] * (
        numbers[:, :1].astype(np.float64) / numbers[:, 1:]
    )
    weight = nvfp4.VALUES[values] * each
    arrays = (jax.device_put(array) for array in (codes.pack_codes(values), scale, numbers))
    return (x, Weight(*arrays, form=known_format("nvfp4"), inputs=inputs)), weight


def mxfp4_problem(M: int, outputs: int, inputs: int):
    """x of bfloat16, a weight in MXFP4, and what they stand for in float64."""
    rng = np.random.default_rng(M)
    x = normal(rng, (M, inputs), "bfloat16")
    values = rng.integers(16, size=(outputs, inputs), dtype=np.uint8)
    scale = rng.integers(118, known_format("mxfp4").largest_power + 1, (outputs, -(-inputs // 32)), np.uint8)
    each = np.ldexp(1.0, scale.astype(int) - 127).repeat(32, axis=1)[:, :inputs]
    weight = Weight(
        jax.device_put(codes.pack_codes(values)), jax.device_put(scale), form=known_format("mxfp4"), inputs=inputs
    )
    return (x, weight), nvfp4.VALUES[values] * each


def words(byte: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(byte).reshape(-1).view("<u4")
