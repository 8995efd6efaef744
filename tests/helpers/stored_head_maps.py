"""Maps of heads of latent attention as checkpoints store them, and what they stand for, number by number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from packed_weights import MAGNITUDES

from jspec.quantization.codes import pack_codes
from jspec.quantization.formats import Format, format_of, known_format
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight

FP8 = ml_dtypes.float8_e4m3fn
# Groups of each size, integers of four bits and of eight, with and without zeros, and in another order.
IN_CODES = (
    "int4_32_float16_zeros",
    "int4_64_bfloat16_ordered",
    "int4_all_float16_zeros",
    "int8_32_bfloat16_zeros",
    "nvfp4",
    "mxfp4",
    "mxfp8",
    "nf4_64",
)


def head_map(stored: str, N: int, n: int, Ck: int) -> tuple[Weight, np.ndarray, str]:
    """A map of N heads, what it stands for in float64 ``[N, n, Ck]``, and the dtype of what it multiplies.

    Args:
      stored: a dtype; ``blocks``, of FP8; or a format of codes. Behind a space may be the dtype of what it multiplies,
        which is float32 otherwise.
      N, n, Ck: how many heads, numbers of each, and numbers of a latent.
    """
    kind, dtype = stored.split()[0], "bfloat16" if "bfloat16" in (stored, stored.rpartition(" ")[2]) else "float32"
    if (form := format_of(kind)) is not None and (form.in_codes or form.scales_numbers):
        of, wide = _in_codes(kind, N, n, Ck)
        return of, wide, dtype
    rng = np.random.default_rng(Ck)
    weight = rng.normal(size=(N, n, Ck)) * n**-0.5
    if kind in ("float32", "bfloat16"):
        weight = weight.astype(jnp.dtype(dtype))
        return Weight(jax.device_put(weight)), np.asarray(weight, np.float64), dtype
    groups = -(-Ck // 128) if kind == "blocks" else 1
    weight = (100 * weight).astype("int8" if kind == "int8" else FP8)
    scale = (rng.uniform(0.5, 1, (N, n, groups)) / 100).astype(np.float32)
    each = np.repeat(np.asarray(scale, np.float64), 128 if groups > 1 else Ck, axis=-1)[..., :Ck]
    wide = weight.astype(np.float64) * each
    form = known_format({"int8": "int8", "blocks": "fp8_block"}.get(kind, "fp8"))
    arrays = weight, scale[..., 0] if form.per_channel else scale
    return Weight(*map(jax.device_put, arrays), form=form), wide, dtype


def _in_codes(kind: str, N: int, n: int, Ck: int) -> tuple[Weight, np.ndarray]:
    form, rng, about = known_format(kind), np.random.default_rng(Ck), n**-0.5 / 3
    if form.scales_numbers:
        codes, size = rng.integers(16, size=(N, n, Ck), dtype=np.uint8), 16 if kind == "nvfp4" else 32
        exponents = rng.integers(-3, 1, size=(N, n, Ck // size))
        scale, of_channels = (exponents + 127 + round(np.log2(about))).astype(np.uint8), None
        factors = 2.0 ** (scale.astype(int) - 127)
        if kind == "nvfp4":  # each head with a number of its own, which multiplies or divides
            scale = (2.0**exponents * rng.choice([1, 1.125, 1.75], size=exponents.shape)).astype(FP8)
            overall = about * (1 + np.arange(N) / 2)[:, None, None] / 2
            pair = [1 / overall, np.ones_like(overall)] if N % 2 else [np.ones_like(overall), overall]
            of_channels = np.broadcast_to(np.concatenate(pair[::-1], axis=-1), (N, n, 2)).astype(np.float32)
            factors = scale.astype(float) * (of_channels[..., :1] / of_channels[..., 1:]).astype(float)
        numbers = np.array([*MAGNITUDES, *(-np.array(MAGNITUDES))])[codes]
        stored = numbers.astype(FP8) if kind == "mxfp8" else pack_codes(codes)
        return _of(form, Ck, stored, scale, of_channels), numbers * np.repeat(factors, size, axis=-1)
        return _of(form, Ck, pack_codes(codes), scale, of_channels), numbers * np.repeat(factors, size, axis=-1)
    if form.table:
        codes, scale = (
            rng.integers(16, size=(N, n, Ck)).astype(np.uint8),
            rng.uniform(0.5, 1, (N, n, Ck // 64)) * 3 * about,
        )
        scale = scale.astype(np.float32)
        wide = TABLES[form.table].values()[codes] * np.repeat(scale.astype(float), 64, axis=-1)
        return _of(form, Ck, pack_codes(codes), scale, None), wide
    groups = 1 if form.group is None else Ck // form.group
    scale = (rng.uniform(0.5, 1, (N, n, groups)) * about / 2 ** (form.bits - 4)).astype(form.scale)
    middle = 1 << form.bits - 1
    codes = rng.integers(2 * middle, size=(N, n, Ck))
    zeros = rng.integers(middle // 2, 3 * middle // 2, size=scale.shape) if form.zeros else np.full(scale.shape, middle)
    wide = (codes - np.repeat(zeros, Ck // groups, axis=-1)) * np.repeat(scale.astype(float), Ck // groups, axis=-1)
    order = rng.permutation(Ck).astype(np.int32) if form.ordered else None
    if order is not None:
        wide[..., order] = wide.copy()
    held = zeros - (middle if form.bits == 8 else 0)
    scales = np.stack([scale, held.astype(scale.dtype)], axis=-1) if form.zeros else scale
    weight = pack_codes(codes.astype(np.uint8)) if form.bits == 4 else (codes - middle).astype(np.int8)
    return _of(form, Ck, weight, scales, None, order), wide


def _of(form: Format, Ck: int, *arrays) -> Weight:
    return Weight(*(None if array is None else jax.device_put(array) for array in arrays), form=form, inputs=Ck)
